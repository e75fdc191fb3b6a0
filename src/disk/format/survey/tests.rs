//! Which members are opened, and each refusal.

use super::*;
use crate::{
    config::{Capacity, DiskPath},
    disk::format::PAGE_BYTES,
};

type Bytes = Box<[u8; HEAD_BYTES]>;

fn config(blocks: &[u32]) -> Config {
    let disk = |(at, &blocks): (usize, &u32)| DiskPath::with_blocks(format!("disk{at}"), blocks);
    Config::default().disks(blocks.iter().enumerate().map(disk).collect())
}

fn blank() -> Bytes {
    Box::new([0; HEAD_BYTES])
}

/// A head with its copies in these states; `None` is blank.
fn head(config: &Config, uuid: u8, member: u16, states: [Option<StoreState>; 2]) -> Bytes {
    let mut bytes = blank();
    for (copy, state) in states.into_iter().enumerate() {
        let Some(state) = state else { continue };
        let new = Superblock::new(config, [uuid; 16], member);
        let superblock = Superblock { state, sequence: state as u64, ..new };
        bytes[copy * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(&superblock.encode());
    }
    bytes
}

const WHOLE: [Option<StoreState>; 2] = [Some(StoreState::Whole), Some(StoreState::Whole)];
const FORMING: [Option<StoreState>; 2] = [Some(StoreState::Forming), None];
const HALF: [Option<StoreState>; 2] = [Some(StoreState::Forming), Some(StoreState::Whole)];

fn survey_members(config: &Config, heads: &[Bytes]) -> Result<OpenPlan> {
    let stripe = Stripe::new(config);
    let found: Vec<Found<'_>> = (heads.iter().zip(&config.disk.paths).zip(stripe.members()))
        .map(|((head, disk), geometry)| Found { path: &disk.path, bytes: geometry.bytes, device: false, head })
        .collect();
    survey(&found, config)
}

fn refusal(plan: Result<OpenPlan>) -> String {
    let error = plan.expect_err("a refusal");
    assert!(matches!(error, Error::Store { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn a_store_is_created_until_a_member_is_whole_and_opened_from_then_on() {
    let c = config(&[5, 6]);
    let create = |a: Bytes, b: Bytes| assert_eq!(survey_members(&c, &[a, b]).expect("accepted"), OpenPlan::Create);
    create(blank(), blank());
    create(head(&c, 1, 0, FORMING), blank());
    create(head(&c, 1, 0, FORMING), head(&c, 2, 1, FORMING));
    let open = |a: Bytes, b: Bytes| match survey_members(&c, &[a, b]).expect("accepted") {
        OpenPlan::Open(members) => members.iter().map(|m| (m.superblock.state, m.repair_other)).collect::<Vec<_>>(),
        OpenPlan::Create => panic!("one member is whole"),
    };
    let (done, half, forming) = ((StoreState::Whole, false), (StoreState::Whole, true), (StoreState::Forming, true));
    assert_eq!(open(head(&c, 1, 0, FORMING), head(&c, 1, 1, HALF)), [forming, half]);
    assert_eq!(open(head(&c, 1, 0, HALF), head(&c, 1, 1, HALF)), [half, half]);
    assert_eq!(open(head(&c, 1, 0, WHOLE), head(&c, 1, 1, HALF)), [done, half]);
    assert_eq!(open(head(&c, 1, 0, WHOLE), head(&c, 1, 1, WHOLE)), [done, done]);
}

#[test]
fn each_refusal_names_its_reason() {
    let c = config(&[5, 6]);
    let whole = |config: &Config, uuid, member| head(config, uuid, member, WHOLE);
    let foreign = Box::new([0xEE; HEAD_BYTES]);
    let damaged = {
        let mut bytes = whole(&c, 1, 1);
        (bytes[100], bytes[PAGE_BYTES + 100]) = (0xFF, 0xFF);
        bytes
    };
    let other = |change: fn(&mut Config)| {
        let mut other = config(&[5, 6]);
        change(&mut other);
        whole(&other, 1, 1)
    };
    let cases: Vec<(&str, Bytes)> = vec![
        ("did not write (it begins with eeeeeeee", foreign),
        ("both damaged", damaged),
        ("no superblock (all zeros)", blank()),
        ("expected a member of store 01010101", whole(&c, 2, 1)),
        ("found a store of 3 members", whole(&config(&[5, 6, 7]), 1, 1)),
        ("found member 0 of the store, expected member 1", whole(&c, 1, 0)),
        ("found a store with `namespace` = \"other\"", other(|c| c.namespace = "other".into())),
        ("set `block_bytes` to 32768", other(|c| c.block_bytes = 32 << 10)),
        ("a store of 9 slots on this path", other(|c| c.disk.paths[1].capacity = Capacity::Blocks(9))),
        ("6 slots on this path (1441792 bytes), 15 in all", other(|c| c.disk.paths[0].capacity = Capacity::Blocks(9))),
    ];
    for (words, second) in cases {
        let text = refusal(survey_members(&c, &[whole(&c, 1, 0), second]));
        assert!(text.contains(words) && text.starts_with("disk1: found "), "{words:?} is not in: {text}");
    }
    // A path more than the store has, in front of its own.
    let text = refusal(survey_members(&c, &[blank(), whole(&config(&[6]), 1, 0)]));
    assert!(text.starts_with("disk1: found a store of 1 members, expected one of 2"), "{text}");
}

#[test]
fn a_store_with_a_wrong_fingerprint_alone_is_refused() {
    let c = config(&[5]);
    let mut superblock = Superblock::new(&c, [1; 16], 0);
    (superblock.state, superblock.fingerprint) = (StoreState::Whole, 0);
    let mut bytes = blank();
    bytes[..PAGE_BYTES].copy_from_slice(&superblock.encode());
    assert!(refusal(survey_members(&c, &[bytes])).contains("layout fingerprint 0000000000000000"));
}

#[test]
fn a_device_that_became_another_programs_is_refused() {
    let c = config(&[5]);
    let survey =
        |head: &Bytes, device| survey_to_write(&[Found { path: Path::new("d"), bytes: 1 << 40, device, head }], &c);
    // A partition table, a swap header, an md array.
    let cases: [(usize, &[u8]); 3] =
        [(510, &[0x55, 0xAA]), (4086, b"SWAPSPACE2"), (PAGE_BYTES, &[0xFC, 0x4E, 0x2B, 0xA9])];
    for (at, mark) in cases {
        let (mut head, page) = (head(&c, 1, 0, WHOLE), at / PAGE_BYTES * PAGE_BYTES);
        head[page..][..PAGE_BYTES].fill(0);
        assert!(matches!(survey(&head, true), Ok(OpenPlan::Open(_))), "zeros are repaired, as the advice says");
        head[at..][..mark.len()].copy_from_slice(mark);
        let refused = refusal(survey(&head, true));
        assert!(refused.contains(&format!("did not write over a superblock (bytes {page} to ")), "{refused}");
        assert!(refused.contains(&format!("blkdiscard --zeroout --offset {page} ")), "{refused}");
        assert!(matches!(survey(&head, false), Ok(OpenPlan::Open(_))), "a file is no other program's");
    }
}

#[test]
fn sizes_are_checked() {
    let c = config(&[5]);
    let wanted = Stripe::new(&c).members()[0].bytes;
    let survey_members =
        |head: &Bytes, bytes, device| survey(&[Found { path: Path::new("d"), bytes, device, head }], &c);
    let whole = head(&c, 1, 0, WHOLE);
    assert!(refusal(survey_members(&whole, wanted - 1, false)).contains("truncated to"));
    assert!(refusal(survey_members(&blank(), wanted - 1, false)).contains("holds no store"));
    assert!(refusal(survey_members(&blank(), wanted + 1, false)).contains("holds no store"));
    assert!(refusal(survey_members(&blank(), wanted - 1, true)).contains("lower `disks.blocks`"));
    for (head, bytes, device) in [(&blank(), 0, false), (&blank(), wanted, false), (&blank(), wanted + 9, true)] {
        assert_eq!(survey_members(head, bytes, device).expect("accepted"), OpenPlan::Create);
    }
    assert!(matches!(survey_members(&whole, wanted + 1, false), Ok(OpenPlan::Open(_))));
}

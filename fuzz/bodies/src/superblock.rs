//! Superblocks: bytes from anywhere, at the start of every member, against settings from anywhere.

use crate::{
    memory::bounded,
    store_files::{blank_files, config, members},
};
use arbitrary::{Arbitrary, Unstructured};
use kvhoist::{
    Config, Error, block_on,
    internals::{
        checksum::checksum,
        disk::{
            format::{
                HEAD_BYTES, PAGE_BYTES,
                pair::SuperblockPair,
                superblock::{StoreState, Superblock, SuperblockError, fingerprint},
                survey::{Found, OpenPlan, survey_to_write},
            },
            recovery::{Member, Recovered, open},
        },
    },
};
use kvhoist_simulation::sim::Memory;

/// Slots of all members at most, so that an input is cheap.
const SLOTS_MAX: u32 = 200;

#[derive(Debug, Arbitrary)]
struct Input {
    block_bytes: u16,
    namespace: String,
    members: Vec<MemberInput>,
}

#[derive(Debug, Arbitrary)]
struct MemberInput {
    blocks: u8,
    device: bool,
    /// Bytes that it has less or more than it must.
    off_by: i8,
    pages: [Page; 2],
}

#[derive(Debug, Arbitrary)]
enum Page {
    Blank,
    /// What the program writes, then spoiled.
    Ours {
        whole: bool,
        sequence: u8,
        uuid: u8,
        member: u8,
        edits: Vec<(u16, u8)>,
        seal: bool,
    },
    Raw(Vec<u8>),
}

impl Page {
    fn bytes(&self, config: &Config, index: usize) -> [u8; PAGE_BYTES] {
        let mut bytes = [0; PAGE_BYTES];
        match self {
            Page::Blank => {}
            Page::Raw(raw) => {
                let len = raw.len().min(PAGE_BYTES);
                bytes[..len].copy_from_slice(&raw[..len]);
            }
            Page::Ours { whole, sequence, uuid, member, edits, seal } => {
                // Mostly its own place: members of other places are refused at once.
                let member = if usize::from(*member) < config.disk.paths.len() { usize::from(*member) } else { index };
                let state = if *whole { StoreState::Whole } else { StoreState::Forming };
                let new = Superblock::new(config, [*uuid; 16], member as u16);
                bytes = Superblock { state, sequence: u64::from(*sequence).max(1), ..new }.encode();
                for (at, value) in edits {
                    // Half of them among the fields.
                    let range = if *at < 1 << 15 { 128 } else { PAGE_BYTES };
                    bytes[usize::from(*at) % range] = *value;
                }
                if *seal {
                    let crc = checksum(&bytes[..504]);
                    bytes[504..512].copy_from_slice(&crc.to_le_bytes());
                }
            }
        }
        bytes
    }
}

/// Judges the members, then opens what was found acceptable, twice.
pub fn run(data: &[u8]) {
    let Ok(mut input) = Input::arbitrary_take_rest(Unstructured::new(data)) else { return };
    input.members.truncate(4);
    let blocks: Vec<u32> = input.members.iter().map(|member| u32::from(member.blocks)).collect();
    let mut config = config(usize::from(input.block_bytes), &blocks);
    config.namespace = input.namespace;
    if config.validate().is_err() || config.disk.paths.is_empty() || blocks.iter().sum::<u32>() > SLOTS_MAX {
        return;
    }
    let mut found = members(&config);
    let mut files = blank_files(&config);
    for (index, member) in input.members.iter().enumerate() {
        for (page, at) in member.pages.iter().zip([0, PAGE_BYTES]) {
            files[index][at..at + PAGE_BYTES].copy_from_slice(&page.bytes(&config, index));
        }
        found[index].device = member.device;
        found[index].bytes = found[index].bytes.saturating_add_signed(member.off_by.into());
    }
    let heads: Vec<&[u8; HEAD_BYTES]> = files.iter().map(|file| file.first_chunk().expect("a head")).collect();
    heads.iter().for_each(|head| check_head(head));
    let plan = check_plan(&found, &heads, &config);
    open_twice(plan, found, files, &config);
}

/// What counts is one of the two copies, whole as it was written; what does not count is counted out for a reason.
fn check_head(head: &[u8; HEAD_BYTES]) {
    let copies = [head.first_chunk(), head.last_chunk()].map(|page| page.expect("two pages"));
    let sound = copies.map(Superblock::decode);
    for (bytes, sound) in copies.iter().zip(&sound) {
        if let Ok(superblock) = sound {
            assert_eq!(superblock.encode(), **bytes, "one superblock, one form");
        }
    }
    let newer = sound.iter().any(|copy| matches!(copy, Err(SuperblockError::Newer(_))));
    match SuperblockPair::decode(head) {
        SuperblockPair::Valid { superblock, copy, other_is_whole } => {
            assert!(!newer);
            assert_eq!(sound[copy].as_ref(), Ok(&superblock));
            match &sound[1 - copy] {
                Ok(other) => {
                    assert!(other.sequence <= superblock.sequence);
                    let Superblock { state, sequence, .. } = superblock;
                    let same = Superblock { state, sequence, ..other.clone() } == superblock;
                    assert_eq!(other_is_whole, other.state == StoreState::Whole && same);
                }
                Err(_) => assert!(!other_is_whole),
            }
        }
        SuperblockPair::Bad(error) => assert_eq!(newer, matches!(error, SuperblockError::Newer(_))),
        SuperblockPair::Blank => assert!(head.iter().all(|byte| *byte == 0)),
        SuperblockPair::Torn => {
            assert!(sound.iter().all(Result::is_err) && head[PAGE_BYTES..].iter().all(|byte| *byte == 0));
        }
    }
}

/// Opened is only what agrees in every setting; created only where no whole superblock is.
fn check_plan(found: &[Member], heads: &[&[u8; HEAD_BYTES]], config: &Config) -> Option<OpenPlan> {
    let found: Vec<Found<'_>> = (found.iter().zip(heads))
        .map(|(member, head)| Found { path: &member.path, bytes: member.bytes, device: member.device, head })
        .collect();
    match bounded(1 << 20, || survey_to_write(&found, config)) {
        Ok(OpenPlan::Create) => {
            for head in heads {
                if let SuperblockPair::Valid { superblock, .. } = SuperblockPair::decode(head) {
                    assert_eq!(superblock.state, StoreState::Forming, "a whole store is not overwritten");
                }
            }
            Some(OpenPlan::Create)
        }
        Ok(OpenPlan::Open(states)) => {
            assert!(states.iter().any(|member| member.superblock.state == StoreState::Whole));
            for (index, member) in states.iter().enumerate() {
                let Superblock { version, uuid, state, sequence, .. } = member.superblock;
                assert_eq!(uuid, states[0].superblock.uuid);
                let expected = Superblock { version, state, sequence, ..Superblock::new(config, uuid, index as u16) };
                assert_eq!(member.superblock, expected);
                assert_eq!(member.superblock.fingerprint, fingerprint(config));
            }
            Some(OpenPlan::Open(states))
        }
        Err(Error::Store { found, expected, action, .. }) => {
            assert!(!found.is_empty() && !expected.is_empty() && !action.is_empty());
            None
        }
        Err(other) => panic!("an error of another kind: {other}"),
    }
}

/// A refused store is not written to; an accepted one is whole in both copies afterwards, and opens again as it is.
fn open_twice(plan: Option<OpenPlan>, members: Vec<Member>, files: Vec<Vec<u8>>, config: &Config) {
    let uuid = match &plan {
        Some(OpenPlan::Open(states)) => states[0].superblock.uuid,
        _ => [0xC5; 16],
    };
    // An empty file is preallocated before it gets here.
    if plan.is_some() && members.iter().zip(kept(config)).any(|(member, wanted)| member.bytes < wanted) {
        return;
    }
    let (result, after) = opened(files.clone(), &members, config, [0xC5; 16]);
    assert_eq!(result.is_ok(), plan.is_some());
    let Ok(recovered) = result else {
        return assert!(after == files, "a refused store was written to");
    };
    assert_eq!(recovered.counts.free, config.disk_slots());
    for (index, file) in after.iter().enumerate() {
        match SuperblockPair::decode(file.first_chunk().expect("a head")) {
            SuperblockPair::Valid { superblock, other_is_whole: true, .. } => {
                assert_eq!((superblock.state, superblock.uuid), (StoreState::Whole, uuid));
                assert_eq!(usize::from(superblock.member), index);
            }
            head => panic!("{head:?}"),
        }
    }
    let (again, unchanged) = opened(after.clone(), &members, config, [0xFF; 16]);
    assert!(again.is_ok() && unchanged == after, "a whole store is not written to by opening it");
}

fn kept(config: &Config) -> Vec<u64> {
    members(config).into_iter().map(|member| member.bytes).collect()
}

fn opened(
    files: Vec<Vec<u8>>,
    members: &[Member],
    config: &Config,
    uuid: [u8; 16],
) -> (Result<Recovered, kvhoist::Error>, Vec<Vec<u8>>) {
    let storage = Memory::new(files);
    // Four reads of a megabyte in flight, and what the members' records take.
    let result = bounded(16 << 20, || block_on(open(&storage, members, config, uuid, &(), &mut |_, _| ())));
    (result, storage.into_files())
}

//! Every frame comes back as it was written, and no bytes make a decoder panic.

use proptest::{collection::vec, option, prelude::*};

use super::*;
use crate::{
    block::{BlockKey, Tier},
    error::ServiceFault,
};

fn key() -> impl Strategy<Value = BlockKey> {
    any::<[u8; 32]>().prop_map(BlockKey::new)
}

fn keys() -> impl Strategy<Value = Vec<BlockKey>> {
    vec(key(), 0..20)
}

fn blocks() -> impl Strategy<Value = Blocks> {
    let place =
        (any::<u32>(), any::<u32>(), any::<u64>()).prop_map(|(region, len, offset)| Place { region, len, offset });
    vec((key(), vec(place, 0..5)), 0..20).prop_map(|blocks| {
        let (keys, places) = blocks.into_iter().unzip();
        Blocks { keys, places }
    })
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        ("\\PC{0,60}", any::<[u64; 3]>(), any::<bool>()).prop_map(
            |(namespace, [block_bytes, capacity_bytes, host_bytes], shared)| {
                Request::Attach { namespace, block_bytes, capacity_bytes, host_bytes, shared }
            }
        ),
        (any::<u32>(), any::<[bool; 2]>(), any::<[u64; 2]>()).prop_map(|(region, [pin, device], [offset, len])| {
            let kind = if device { RegionKind::Device } else { RegionKind::Host };
            Request::Register { region, kind, pin, offset, len }
        }),
        any::<u32>().prop_map(|region| Request::Unregister { region }),
        keys().prop_map(|keys| Request::MatchLen { keys }),
        keys().prop_map(|keys| Request::MatchPrefix { keys }),
        keys().prop_map(|keys| Request::Contains { keys }),
        blocks().prop_map(Request::Load),
        (option::of(key()), blocks()).prop_map(|(parent, blocks)| Request::Store { parent, blocks }),
        keys().prop_map(|keys| Request::Prefetch { keys }),
        (any::<bool>(), keys()).prop_map(|(durable, keys)| Request::Remove { durable, keys }),
        Just(Request::Sync),
        Just(Request::Stats),
        any::<u64>().prop_map(|request| Request::Cancel { request }),
        Just(Request::Status),
        keys().prop_map(|keys| Request::Touch { keys }),
        (option::of(key()), keys()).prop_map(|(next, keys)| Request::Release { next, keys }),
        (any::<u64>(), keys()).prop_map(|(ms, keys)| Request::Keep { ms, keys }),
        ("\\PC{0,60}", any::<u64>(), any::<bool>())
            .prop_map(|(namespace, block_bytes, shared)| { Request::RemoveSpace { namespace, block_bytes, shared } }),
    ]
}

fn failure() -> impl Strategy<Value = Failure> {
    (0u16..14, "\\PC{0,80}").prop_map(|(code, text)| Failure { fault: super::hello::fault_of(code + 1), text })
}

fn figures() -> impl Strategy<Value = TierFigures> {
    any::<[u64; 6]>().prop_map(|[hits, resident, slots, evictions, refused, bytes_in]| TierFigures {
        hits,
        resident,
        slots,
        evictions,
        refused,
        bytes_in,
    })
}

fn stats() -> impl Strategy<Value = SpaceStats> {
    ([figures(), figures(), figures()], any::<[u64; 12]>(), "\\PC{0,20}").prop_map(|(tiers, n, disk_trouble)| {
        SpaceStats {
            tiers,
            misses: n[0],
            stores: n[1],
            stores_known: n[2],
            writes_refused: n[3],
            checksum_failures: n[4],
            read_errors: n[5],
            write_errors: n[6],
            quarantined: n[7],
            straight_bytes: n[8],
            read_bytes: n[9],
            writes_declined: n[10],
            writes_over_budget: n[11],
            disk_trouble,
        }
    })
}

fn status() -> impl Strategy<Value = ServiceStatus> {
    let space = ("\\PC{0,20}", any::<[u32; 2]>(), any::<bool>(), any::<[u64; 3]>(), option::of(stats())).prop_map(
        |(namespace, [uid, clients], shared, [block_bytes, capacity_bytes, host_bytes], stats)| SpaceStatus {
            folder: format!("space-{namespace}"),
            namespace,
            uid,
            shared,
            block_bytes,
            capacity_bytes,
            host_bytes,
            clients,
            stats,
        },
    );
    let client = ("\\PC{0,20}", any::<[u32; 4]>(), any::<[u64; 3]>()).prop_map(
        |(namespace, [pid, uid, regions, requests], [id, region_bytes, bytes_in_flight])| ClientStatus {
            id,
            pid,
            uid,
            namespace,
            regions,
            requests,
            region_bytes,
            bytes_in_flight,
        },
    );
    let paths = vec("\\PC{0,20}", 0..4);
    (any::<[u64; 5]>(), any::<(u32, bool)>(), paths, vec(space, 0..4), vec(client, 0..4)).prop_map(
        |(n, (pid, draining), paths, spaces, clients)| ServiceStatus {
            version: "0.1.0".into(),
            pid,
            draining,
            capacity_bytes: n[0],
            capacity_left: n[1],
            host_bytes: n[2],
            host_left: n[3],
            cut_off: n[4],
            paths,
            spaces,
            clients,
        },
    )
}

fn reply() -> impl Strategy<Value = Reply> {
    let result = prop_oneof![any::<bool>().prop_map(Ok), failure().prop_map(Err)];
    prop_oneof![
        failure().prop_map(Reply::Failed),
        failure().prop_map(Reply::Goodbye),
        any::<[u64; 3]>().prop_map(|[block_bytes, capacity_bytes, host_bytes]| Reply::Attached {
            block_bytes,
            capacity_bytes,
            host_bytes
        }),
        any::<bool>().prop_map(|pinned| Reply::Registered { pinned }),
        Just(Reply::Done),
        any::<u32>().prop_map(Reply::Count),
        vec((0..Tier::COUNT).prop_map(|at| Tier::ALL[at]), 0..50).prop_map(Reply::Tiers),
        vec(any::<bool>(), 0..50).prop_map(Reply::Flags),
        vec(result, 0..50).prop_map(Reply::Results),
        stats().prop_map(|stats| Reply::Stats(Box::new(stats))),
        status().prop_map(|status| Reply::Status(Box::new(status))),
    ]
}

/// The header of a frame, which must say how long it is.
fn header(frame: &[u8]) -> Header {
    let header = Header::decode(frame.first_chunk().expect("a header")).expect("a good one");
    assert_eq!(header.body_bytes as usize, frame.len() - HEADER_BYTES);
    header
}

proptest! {
    #[test]
    fn a_request_comes_back_as_it_was_written(request in request(), id in any::<u64>()) {
        let frame = request.encode(id);
        let header = header(&frame);
        prop_assert_eq!(header.id, id);
        prop_assert_eq!(Request::decode(header.kind, &frame[HEADER_BYTES..]).expect("its own bytes"), request);
    }

    #[test]
    fn a_reply_comes_back_as_it_was_written(reply in reply(), id in any::<u64>()) {
        let frame = reply.encode(id);
        let header = header(&frame);
        prop_assert_eq!(header.id, id);
        prop_assert_eq!(Reply::decode(header.kind, &frame[HEADER_BYTES..]).expect("its own bytes"), reply);
    }

    #[test]
    fn a_frame_that_is_cut_short_or_goes_on_is_refused(request in request(), reply in reply(), at in any::<u16>()) {
        let (mut asked, mut answered) = (request.encode(1), reply.encode(1));
        let (ask_kind, answer_kind) = (header(&asked).kind, header(&answered).kind);
        for frame in [&mut asked, &mut answered] {
            let body = frame.len() - HEADER_BYTES;
            if body > 0 {
                frame.truncate(HEADER_BYTES + usize::from(at) % body);
            } else {
                frame.push(0);
            }
        }
        prop_assert!(Request::decode(ask_kind, &asked[HEADER_BYTES..]).is_err());
        prop_assert!(Reply::decode(answer_kind, &answered[HEADER_BYTES..]).is_err());
    }

    #[test]
    fn no_bytes_make_a_decoder_panic(kind in 0u16..300, bytes in vec(any::<u8>(), 0..400)) {
        drop(Request::decode(kind, &bytes));
        drop(Reply::decode(kind, &bytes));
        bytes.first_chunk().map(Header::decode);
        bytes.first_chunk().map(Hello::decode);
        bytes.first_chunk().map(Welcome::decode);
    }
}

#[test]
fn the_handshake_comes_back_as_it_was_written() {
    let hello = Hello { version_min: 3, version_max: 900 };
    assert_eq!(Hello::decode(hello.encode().first_chunk().expect("whole")), Ok(hello));
    for answer in [Ok(1), Err(ServiceFault::Version), Err(ServiceFault::Permission)] {
        let welcome = Welcome::new(answer, Limits::new(7, 8, 1 << 40));
        assert_eq!(welcome.encode().len(), Welcome::BYTES);
        assert_eq!(Welcome::decode(welcome.encode().first_chunk().expect("whole")), Ok(welcome));
    }
}

#[test]
fn the_newest_common_version_is_spoken() {
    let of = |version_min, version_max| Hello { version_min, version_max }.common_version();
    assert_eq!(of(1, 1), Some(1));
    assert_eq!(of(0, u16::MAX), Some(VERSION_MAX));
    assert_eq!(of(VERSION_MAX + 1, u16::MAX), None, "from the future");
    assert_eq!(of(0, VERSION_MIN - 1), None, "from the past");
    assert_eq!(of(5, 0), None, "none at all");
}

#[test]
fn numbers_that_are_too_large_take_no_memory() {
    // A count is held against the bytes that follow it, before anything is allocated for it.
    let most = u32::MAX.to_le_bytes();
    // Kind 3 is a number and nothing else.
    for kind in (1..=14).filter(|kind| *kind != 3) {
        assert!(Request::decode(kind, &most).is_err(), "kind {kind}");
    }
    let mut keys_only = Request::Load(Blocks::default()).encode(1);
    keys_only.truncate(HEADER_BYTES + 4);
    keys_only.extend(60_000u32.to_le_bytes());
    assert!(Request::decode(7, &keys_only[HEADER_BYTES..]).expect_err("no such places").to_string().contains("60000"));
}

#[test]
fn a_text_is_cut_off_between_characters() {
    let failure = Failure::new(ServiceFault::Io, "\u{fc}".repeat(TEXT_BYTES_MAX));
    assert!(failure.text.len() <= TEXT_BYTES_MAX && failure.text.chars().all(|c| c == '\u{fc}'));
}

#[test]
fn failures_past_the_table_are_told_as_its_last_one() {
    let failure = |n: usize| Failure::new(ServiceFault::Io, format!("{n}"));
    let results: Vec<BlockResult> = (0..100).map(|n| Err(failure(n))).collect();
    let frame = Reply::Results(results).encode(1);
    let Ok(Reply::Results(back)) = Reply::decode(header(&frame).kind, &frame[HEADER_BYTES..]) else {
        panic!("results come back");
    };
    assert_eq!(back[10], Err(failure(10)));
    assert_eq!(back[99], Err(failure(63)));
}

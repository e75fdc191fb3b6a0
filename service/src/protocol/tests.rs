//! Every frame comes back as it was written, and no bytes make a decoder panic.

use kvhoist::{BlockKey, Stats, Tier, internals::service::IPC_HANDLE_BYTES};
use proptest::{collection::vec, option, prelude::*, sample::select};

use super::*;
use crate::error::ServiceFault;

impl Arbitrary for Blocks {
    type Parameters = ();
    type Strategy = BoxedStrategy<Blocks>;

    fn arbitrary_with((): ()) -> Self::Strategy {
        let blocks = vec((key(), vec(any::<Place>(), 0..5)), 0..20);
        let of_lists =
            |(keys, places): (Vec<BlockKey>, Vec<Vec<Place>>)| Blocks { keys, places: BlockPlaces::from_iter(places) };
        let listed = blocks.prop_map(|blocks| blocks.into_iter().unzip()).prop_map(of_lists);
        let shifted = (vec((key(), any::<u64>()), 0..20), vec(any::<Place>(), 0..5)).prop_map(|(blocks, places)| {
            let (keys, shifts) = blocks.into_iter().unzip();
            Blocks { keys, places: BlockPlaces::shifted(&places, shifts) }
        });
        prop_oneof![listed, shifted].boxed()
    }
}

fn key() -> impl Strategy<Value = BlockKey> {
    any::<[u8; 32]>().prop_map(BlockKey::new)
}

pub(super) fn keys() -> impl Strategy<Value = Vec<BlockKey>> {
    vec(key(), 0..100)
}

pub(super) fn maybe_key() -> impl Strategy<Value = Option<BlockKey>> {
    option::of(key())
}

pub(super) fn fault() -> impl Strategy<Value = ServiceFault> {
    select(&ServiceFault::ALL[..])
}

pub(super) fn handle() -> impl Strategy<Value = [u8; IPC_HANDLE_BYTES]> {
    vec(any::<u8>(), IPC_HANDLE_BYTES).prop_map(|bytes| bytes.try_into().expect("as many as that"))
}

pub(super) fn tiers() -> impl Strategy<Value = Vec<Tier>> {
    vec(select(&Tier::WITH_REMOTE[..]), 0..100)
}

/// What maps of figures have: numbers, a word, words that may be missing, and maps.
fn figures() -> impl Strategy<Value = Stats> {
    let json = |(stores, storage, trouble, hits, buckets): (u64, String, Option<String>, u64, [u64; 24])| {
        let buckets = buckets.map(|count| (None::<f64>, count >> 5));
        let seconds = serde_json::json!({ "sum": (stores >> 24) as f64 / 1e6, "buckets": buckets });
        let json = serde_json::json!({
            "stores": stores, "storage": storage, "disk_read_only": trouble, "direct_io": hits > 7,
            "tiers": { "disk": { "hits": hits } }, "routes": { "host_to_disk": { "seconds": seconds } },
        });
        serde_json::from_value(json).expect("figures")
    };
    any::<(u64, String, Option<String>, u64, [u64; 24])>().prop_map(json)
}

pub(super) fn stats() -> impl Strategy<Value = Option<Stats>> {
    option::of(figures())
}

pub(super) fn boxed_stats() -> impl Strategy<Value = Box<Stats>> {
    figures().prop_map(Box::new)
}

/// No more failures than a reply tells apart.
pub(super) fn results() -> impl Strategy<Value = Vec<BlockResult>> {
    vec(any::<BlockResult>(), 0..50)
}

/// The header of a frame, which must say how long it is.
fn header(frame: &[u8]) -> Header {
    let header = Header::decode(frame.first_chunk().expect("a header")).expect("a good one");
    assert_eq!(header.body_bytes as usize, frame.len() - HEADER_BYTES);
    header
}

proptest! {
    #[test]
    fn a_request_comes_back_as_it_was_written(request: Request, id: u64) {
        let frame = request.encode(id);
        let header = header(&frame);
        prop_assert_eq!(header.id, id);
        prop_assert_eq!(Request::decode(header.kind, &frame[HEADER_BYTES..]).expect("its own bytes"), request);
    }

    /// However they were given, the places of a block are the same.
    #[test]
    fn shifted_places_are_those_of_each_block(
        places in vec(any::<Place>(), 0..5), shifts in vec(any::<u64>(), 0..20), first in 0..20_usize
    ) {
        let shifted = BlockPlaces::shifted(&places, shifts.clone());
        let moved = |shift: &u64| {
            let of_block = places.iter().map(|place| Place { offset: place.offset.wrapping_add(*shift), ..*place });
            of_block.collect::<Vec<_>>()
        };
        let listed: BlockPlaces = shifts.iter().map(moved).collect();
        let range = first.min(shifts.len())..shifts.len();
        prop_assert_eq!(shifted.blocks(), listed.blocks());
        prop_assert_eq!(shifted.count(range.clone()), listed.count(range.clone()));
        prop_assert!(shifted.of(range.clone()).eq(listed.of(range)));
    }

    #[test]
    fn a_reply_comes_back_as_it_was_written(reply: Reply, id: u64) {
        let frame = reply.encode(id);
        let header = header(&frame);
        prop_assert_eq!(header.id, id);
        prop_assert_eq!(Reply::decode(header.kind, &frame[HEADER_BYTES..]).expect("its own bytes"), reply);
    }

    #[test]
    fn a_frame_that_is_cut_short_or_goes_on_is_refused(request: Request, reply: Reply, at: u16) {
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
    assert_eq!(of(VERSION_MIN, VERSION_MIN), Some(VERSION_MIN));
    assert_eq!(of(0, u16::MAX), Some(VERSION_MAX));
    assert_eq!(of(VERSION_MAX + 1, u16::MAX), None, "from the future");
    assert_eq!(of(0, VERSION_MIN - 1), None, "from the past");
    assert_eq!(of(5, 0), None, "none at all");
}

/// docs/protocol.md says what the bytes mean.
#[test]
fn the_page_of_the_protocol_has_every_tier_and_reply() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/protocol.md")).expect("a page");
    let tiers = Tier::WITH_REMOTE.map(|tier| {
        let frame = Reply::Tiers(vec![tier]).encode(1);
        format!("{} {}", frame.last().expect("a byte"), tier.name())
    });
    let row = format!("| 0x106 | Tiers | u32 count, a byte each: {} |", tiers.join(", "));
    assert!(page.contains(&row), "expected: {row}");
    for kind in 0x100..=0x10c_u16 {
        assert_eq!(page.matches(&format!("| 0x{kind:x} |")).count(), 1, "a row for kind 0x{kind:x}");
    }
    assert!(!page.contains("| 0x10d |") && Reply::decode(0x10d, &[]).is_err_and(|error| error.what == "kind of reply"));
}

/// As many as a service can have, and none of their names short.
#[test]
fn a_status_has_the_rows_that_a_frame_has_room_for() {
    let text = || "\u{1}".repeat(NAMESPACE_BYTES_MAX);
    let space = || SpaceStatus { namespace: text(), stats: Some(Stats::default()), ..SpaceStatus::default() };
    let clients = |n: u64| (0..n).map(|id| ClientStatus { id, namespace: text(), ..ClientStatus::default() }).collect();
    for (spaces, rows, whole) in [(2, 2, true), (256, 4096, false), (4096, 1, false)] {
        let spaces = (0..spaces).map(|_| space()).collect();
        let status = ServiceStatus { spaces, clients: clients(rows), cut_off: 7, ..ServiceStatus::default() };
        let frame = Reply::Status(Box::new(status.clone())).encode(1);
        let header = header(&frame);
        let Ok(Reply::Status(back)) = Reply::decode(header.kind, &frame[HEADER_BYTES..]) else {
            panic!("a status comes back");
        };
        assert_eq!((back.cut_off, *back == status), (7, whole));
        assert!(status.spaces.starts_with(&back.spaces) && status.clients.starts_with(&back.clients));
        assert!(!back.spaces.is_empty() && !back.clients.is_empty(), "some of each");
    }
}

#[test]
fn numbers_that_are_too_large_take_no_memory() {
    // A count is held against the bytes that follow it, before anything is allocated for it.
    let most = u32::MAX.to_le_bytes();
    // Kind 3 is a number and nothing else.
    for kind in (1..=14).filter(|kind| *kind != 3) {
        assert!(Request::decode(kind, &most).is_err(), "kind {kind}");
    }
    for is_shifted in [0, 1] {
        let mut keys_only = Request::Load(Blocks::default()).encode(1);
        keys_only.truncate(HEADER_BYTES + 4);
        keys_only.push(is_shifted);
        keys_only.extend(60_000u32.to_le_bytes());
        let refused = Request::decode(7, &keys_only[HEADER_BYTES..]).expect_err("no such places").to_string();
        assert!(refused.contains("60000"), "{refused}");
    }
    let places = [Place { region: 1, len: 1, offset: 0 }; 17];
    let too_many =
        Blocks { keys: vec![BlockKey::new([1; 32]); 4096], places: BlockPlaces::shifted(&places, vec![0; 4096]) };
    let refused = Request::decode(7, &Request::Load(too_many).encode(1)[HEADER_BYTES..]).expect_err("too many places");
    assert!(refused.to_string().contains("69632"), "{refused}");
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

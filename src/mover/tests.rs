//! A mover over a disk that never answers: what it takes and gives back by itself.

use std::{future::pending, io, rc::Rc, sync::Arc};

use futures_util::FutureExt;

use super::Mover;
use crate::{
    block::{BlockKey, FileId, OpKind, Tier},
    config::{Config, DiskPath, WritePolicy},
    device::Memcpy,
    index::EntryId,
    io::{Storage, Workers},
    memory::Lent,
    state::{Class, Committed, Need, Purpose, READ_TO_HOST, Shared, Taken, WRITE},
    urgency::Urgency,
};

const BYTES: usize = 4096;
const KEY: BlockKey = BlockKey::new([1; 32]);

struct Silent;

impl Storage for Silent {
    fn name(&self) -> &'static str {
        "silent"
    }

    async fn transfer(&self, _: OpKind, _: FileId, _: u64, _: Lent) -> io::Result<()> {
        pending().await
    }
}

/// A mover with two host slots and two disk slots, one block of reads and one of writes in flight.
fn mover() -> Rc<Mover<Silent, Memcpy>> {
    let mut config = Config::default()
        .block_bytes(BYTES)
        .host_blocks(2)
        .disks(vec![DiskPath::with_blocks("silent", 2)])
        .write_policy(WritePolicy::WriteBack);
    config.limits.read_bytes_in_flight_max = BYTES as u64;
    config.limits.write_bytes_in_flight_max = BYTES as u64;
    Mover::new(Shared::of_test(config), None, Silent, Memcpy::new(), Workers::none(), true)
}

#[test]
fn a_write_waits_for_its_bytes_without_a_disk_slot_and_a_read_with_its_host_slot() {
    let mover = mover();
    let shared = Arc::clone(&mover.shared);
    let in_flight =
        [OpKind::Read, OpKind::Write].map(|kind| shared.in_flight.take_now(kind, Urgency::Awaited, 1 << 20));
    assert!(in_flight.iter().all(Option::is_some), "all bytes are in flight");
    for (needs, tier, slots_left) in [(WRITE, Tier::Disk, 2), (READ_TO_HOST, Tier::Host, 1)] {
        let (mut state, mut taken) = (shared.lock(), Taken::default());
        let missing = taken.take(&mut state, &needs, Purpose::Call);
        assert!(matches!(missing, Some(Need::Permit(_))), "{tier}");
        assert_eq!(state.free_slots(tier), slots_left, "{tier}");
        drop(state);
    }
    drop(in_flight);
}

/// What an awaited write needs is taken with its commit. A write in the background would take it before awaited ones
/// that are on their way to the reactor.
#[test]
fn a_write_that_begins_with_its_commit_is_awaited() {
    for (class, disk_slots_left) in [(Class::Background, 2), (Class::Awaited, 1)] {
        let mover = mover();
        let shared = Arc::clone(&mover.shared);
        let filling = shared.lock().acquire(Tier::Host).expect("both are free");
        assert!(shared.commit(&KEY, None, filling, 0).is_ok(), "visible");
        let mut state = shared.lock();
        let id = state.index.find(&KEY).expect("visible");
        let begun = state.begin_write(id, &KEY, class, 1);
        let free_slots = state.free_slots(Tier::Disk);
        drop(state);
        let Ok(Committed::Write(write, _receiver)) = begun else { panic!("nothing else writes it") };
        assert_eq!((write.begun.is_ok(), free_slots), (class == Class::Awaited, disk_slots_left));
        let bytes = shared.in_flight.take_now(OpKind::Write, Urgency::Awaited, 1);
        assert_eq!(bytes.is_none(), write.begun.is_ok(), "one block may be in flight");
    }
}

/// libcufile did not write the block, which was removed meanwhile, and another was stored under its key.
#[test]
fn a_write_by_way_of_the_host_writes_no_other_block_of_its_key() {
    let mover = mover();
    let shared = Arc::clone(&mover.shared);
    let filling = shared.lock().acquire(Tier::Host).expect("both are free");
    assert!(shared.commit(&KEY, None, filling, 0).is_ok(), "visible");
    let removed = EntryId::NONE;
    let written = mover.write_through_host(&KEY, removed).now_or_never();
    assert!(matches!(written, Some((None, Ok(())))), "the disk is asked for nothing");
    assert_eq!(shared.lock().free_slots(Tier::Disk), 2);
}

//! What an entry of the index costs: measured by counting the allocator.

#[path = "../common/mod.rs"]
mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use common::key;
use kvhoist::{
    Tier,
    internals::index::{Index, Lru, Policy, Rb},
};

struct Counting;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; only sums are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const KEY_BYTES: usize = 32;

/// Bytes an entry, key excluded, of `entries` entries that may be evicted in every tier for which `resident` says so.
fn bytes_per_entry(entries: u64, resident: impl Fn(u64, Tier) -> bool) -> usize {
    let before = LIVE_BYTES.load(Relaxed);
    let mut index = Index::new(1);
    index.try_reserve(entries as usize).expect("there is memory");
    for n in 0..entries {
        let id = index.insert(key(n), None);
        for tier in Tier::ALL.into_iter().filter(|tier| resident(n, *tier)) {
            assert!(index.begin_fill(id, tier) && index.complete_fill(id, tier, n as u32));
        }
    }
    let bytes = LIVE_BYTES.load(Relaxed) - before;
    drop(index);
    bytes.div_ceil(entries as usize) - KEY_BYTES
}

/// Bytes a slot of a disk tier that is full, has evicted as much again three times, and was half used again.
fn bytes_per_slot(slots: u64, policy: Policy) -> usize {
    let before = LIVE_BYTES.load(Relaxed);
    let mut policy = Some(policy);
    let mut index = Index::with_policies(1, |tier| match tier {
        Tier::Disk => policy.take().expect("there is one disk tier"),
        _ => Policy::Lru(Lru::new()),
    });
    index.try_reserve(slots as usize).expect("there is memory");
    for n in 0..slots * 4 {
        let slot = (n >= slots).then(|| index.victim(Tier::Disk).expect("nothing is held"));
        let slot = slot.map_or(n as u32, |victim| index.evict(victim, Tier::Disk));
        let id = index.insert(key(n), None);
        assert!(index.begin_fill(id, Tier::Disk) && index.complete_fill(id, Tier::Disk, slot));
        if n % 2 == 0 {
            index.touch(id);
        }
    }
    let bytes = LIVE_BYTES.load(Relaxed) - before;
    index.validate().expect("valid");
    bytes.div_ceil(slots as usize)
}

fn rb_costs_at_most_48_bytes_a_slot_more_than_lru() {
    for slots in [10_000, 14_400, 29_000] {
        let lru = bytes_per_slot(slots, Policy::Lru(Lru::new()));
        let [rb, refusing] = [Rb::new(slots as u32), Rb::refusing(slots as u32)]
            .map(|rb| bytes_per_slot(slots, Policy::Rb(Box::new(rb))));
        println!("{slots} slots: {lru} B a slot with LRU, {rb} B with RB, {refusing} B where it may refuse");
        assert!(rb <= lru + 48 && refusing <= lru + 48, "{slots} slots: {lru}, {rb} and {refusing} bytes");
    }
}

/// Bytes that an index takes beyond what it reserved, while it evicts as much as it holds 32 times, and many more
/// writes are decided on than it remembers.
fn bytes_grown(slots: u64, values_writes: bool) -> usize {
    let mut index = Index::new(1);
    index.try_reserve(slots as usize).expect("there is memory");
    if values_writes {
        index.value_writes(slots as u32).expect("there is memory");
    }
    let before = LIVE_BYTES.load(Relaxed);
    for n in 0..slots * 33 {
        let slot = (n >= slots).then(|| index.victim(Tier::Host).expect("nothing is held"));
        let slot = slot.map_or(n as u32, |victim| index.evict(victim, Tier::Host));
        let id = index.insert(key(n), None);
        assert!(index.begin_fill(id, Tier::Host) && index.complete_fill(id, Tier::Host, slot));
        if values_writes {
            assert!(index.worth(id, false).probability > 0.0);
        }
        index.decided(id);
    }
    LIVE_BYTES.load(Relaxed) - before
}

fn a_full_index_grows_by_nothing() {
    for values_writes in [false, true] {
        assert_eq!(bytes_grown(10_000, values_writes), 0, "it values writes: {values_writes}");
    }
}

/// One test, because bytes are counted for the whole process.
#[test]
fn an_entry_costs_at_most_115_bytes_plus_its_key() {
    rb_costs_at_most_48_bytes_a_slot_more_than_lru();
    a_full_index_grows_by_nothing();
    // Tables double: just above a power of two is the worst, just below it the best.
    for entries in [100_000, 120_000, 230_000] {
        let disk = bytes_per_entry(entries, |_, tier| tier == Tier::Disk);
        let usual = bytes_per_entry(entries, |n, tier| match tier {
            Tier::Disk => true,
            Tier::Host => n.is_multiple_of(4),
            _ => n.is_multiple_of(20),
        });
        let worst = bytes_per_entry(entries, |_, _| true);
        println!("{entries} entries: {disk} B on disk only, {usual} B with a quarter in host, {worst} B in all tiers");
        // The entry and its place in the map: the orders of eviction are links in it.
        for bytes in [disk, usual, worst] {
            assert!(bytes <= 115, "{bytes} bytes");
        }
    }
}

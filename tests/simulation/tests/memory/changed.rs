//! Memory that is changed while blocks are stored from it.

use kvhoist::Route;

use super::*;

/// A block that was stored in place and never read back counts against its memory, not against the drive; one that was
/// read back, or copied first, counts against the drive. After 16 blocks of the former kind the memory's stores are
/// copied.
#[test]
fn what_may_be_the_callers_fault_takes_no_slot_out_of_use() {
    sim::block_on(async {
        let (cache, reactor, world) = open(config().bypass_host(true).quarantine_max(2)).await;
        let (mut memory, mut other) = (Memory::new(1), Memory::new(1));
        let (region, other_region) = (memory.register(&cache), other.register(&cache));
        let found = || {
            let stats = cache.stats();
            (stats.changed_memory, stats.quarantined, stats.tier(Tier::Disk).free, stats.disk_retired)
        };
        let store = async |place: Vec<Segment>, n: u8| {
            let stored = cache.store_from(&[key(n)], None, &[place]).await.expect("asked");
            assert!(matches!(stored[..], [Ok(true)]), "{stored:?}");
        };
        let load = async |place: Vec<Segment>, n: u8| {
            matches!(cache.load_into(&[key(n)], &[place]).await.expect("asked")[..], [Ok(true)])
        };
        // Found in the caller's memory, and again in host memory.
        let damage = || {
            let next = world.storage.counts().started[OpKind::Read as usize];
            (next..next + 2).for_each(|nth| world.storage.script(OpKind::Read, nth, Fault::BitFlip));
        };
        let free = found().2;
        for n in 0..16 {
            store(memory.place(0), 100 + n).await;
            damage();
            assert!(!load(memory.place(0), 100 + n).await, "a miss");
            assert_eq!(found(), (1 + u64::from(n), 0, free, None), "its slot is free again");
        }
        // Of other memory a block is stored in place, read back, and only then damaged.
        store(other.place(0), 50).await;
        assert!(load(other.place(0), 50).await && !cache.contains(&key(100)));
        damage();
        assert!(!load(other.place(0), 50).await, "a miss");
        assert_eq!(found(), (16, 1, free - 1, None), "the drive's fault");
        // The first memory's blocks are copied now: what the drive loses of them is the drive's fault.
        let straight = cache.stats().route_blocks(Route::RegionToDisk);
        store(memory.place(0), 120).await;
        for n in 0..8 {
            drop(cache.fetch(&key(n)).await.expect("served").expect("on disk"));
        }
        damage();
        assert!(!load(memory.place(0), 120).await, "a miss, once host memory has evicted it");
        assert_eq!(found(), (16, 2, free - 2, None));
        assert_eq!(cache.stats().route_blocks(Route::RegionToDisk), straight, "not in place");
        cache.unregister(&region).await.expect("its own");
        cache.unregister(&other_region).await.expect("its own");
        finish(cache, reactor).await;
    });
}

//! Requests for slots: who is woken, and what is given back.

use std::{future::Future, rc::Rc};

use kvhoist::{Route, Segment, WritePolicy, internals::io::OpKind};
use kvhoist_simulation::sim::{self, Fault, Sim, SimOptions, Simulated, World};

use crate::scene::*;

#[test]
fn a_block_published_without_a_pin_wakes_the_request_for_its_slot() {
    sim::block_on(async {
        for write_policy in [WritePolicy::WriteThroughSelective, WritePolicy::WriteBack] {
            let (cache, reactor, _disk) = open(config().host_blocks(1).write_policy(write_policy)).await;
            let reservation = cache.reserve().await.expect("the only slot");
            let waiter = tokio::task::spawn_local({
                let cache = cache.clone();
                async move { elapsed(store(&cache, 1)).await }
            });
            tokio::task::yield_now().await;
            let mut reservation = reservation;
            reservation.copy_from_slice(&payload(0));
            reservation.commit(&key(0), None).await.expect("visible");
            let (result, took) = waiter.await.expect("no panic");
            result.expect("the slot is free to take");
            assert!(took < DEADLINE / 4, "{write_policy:?}: woken after {took:?}, by the watch for deadlines");
            finish(cache, reactor).await;
        }
    });
}

#[test]
fn an_evicted_leaf_uncovers_its_parent_for_the_next_request() {
    sim::block_on(async {
        let write_policy = WritePolicy::WriteThroughSelective;
        let (cache, reactor, _disk) = open(config().host_blocks(2).write_policy(write_policy)).await;
        cache.store(&key(0), None, &payload(0)).await.expect("the parent");
        cache.store(&key(1), Some(&key(0)), &payload(1)).await.expect("its child");
        let leaf = cache.fetch(&key(1)).await.expect("found").expect("found");
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let cache = cache.clone();
                tokio::task::spawn_local(async move { elapsed(cache.reserve()).await })
            })
            .collect();
        tokio::task::yield_now().await;
        drop(leaf);
        let mut held = Vec::new();
        for waiter in waiters {
            let (reserved, took) = waiter.await.expect("no panic");
            held.push(reserved.expect("both slots can be had"));
            assert!(took < DEADLINE / 4, "woken after {took:?}, by the watch for deadlines");
        }
        drop(held);
        finish(cache, reactor).await;
    });
}

#[test]
fn the_end_of_a_removed_blocks_write_begins_the_next_one_for_who_waits_for_its_slot() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().host_blocks(2).write_policy(WritePolicy::WriteBack)).await;
        store(&cache, 0).await.expect("stored");
        let lease = cache.fetch(&key(0)).await.expect("found").expect("found");
        disk.script_next(OpKind::Write, Fault::Stall);
        let syncing = spawn(&cache, async |cache| cache.sync().await);
        a_while().await;
        assert_eq!(disk.stalled(), 1, "the block is being written");
        let removal = spawn_remove(&cache, 0);
        a_while().await;
        // Its other slot has the same key, so its write waits for the one that is under way.
        store(&cache, 0).await.expect("stored anew");
        let storing = spawn(&cache, async |cache| elapsed(store(&cache, 1)).await);
        a_while().await;
        assert!(!storing.is_finished(), "one slot is leased, the other one is not written");
        disk.release();
        let (stored, took) = storing.await.expect("no panic");
        stored.expect("the block that had the slot was written");
        assert!(took < DEADLINE / 4, "woken after {took:?}, by the watch for deadlines");
        drop(lease);
        syncing.await.expect("no panic").expect("written");
        removal.await.expect("no panic").expect("removed");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_load_does_not_wait_for_a_promotion_that_waits_for_it() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open(config().movements_max(1)).await;
        fill(&cache).await;
        let mut memory = vec![0u8; BLOCK_BYTES];
        // SAFETY: the memory outlives the cache, and nobody touches it before the load has ended.
        let lent = unsafe { kvhoist::Memory::host(memory.as_mut_ptr(), BLOCK_BYTES) };
        let region = kvhoist::block_on(cache.register(lent)).expect("registered");
        let segments = vec![vec![kvhoist::Segment { ptr: memory.as_mut_ptr(), len: BLOCK_BYTES }]];
        // Both are polled before the reactor is: the load is first in the channel, the promotion has begun.
        let (keys, wanted) = ([key(0)], key(0));
        let load = cache.load_into(&keys, &segments);
        let (loaded, fetched) = both(load, cache.fetch(&wanted)).await;
        assert!(matches!(loaded.expect("asked")[..], [Ok(true)]), "loaded");
        assert!(fetched.expect("no timeout").is_some());
        cache.unregister(&region).await.expect("its own region");
        assert_eq!(memory, payload(0));
        finish(cache, reactor).await;
    });
}

/// While a call waits for room among the commands, its memory may be unregistered, and be another's from then on.
#[test]
fn a_layered_load_holds_its_memory_before_it_waits_for_room() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().movements_max(1)).await;
        fill(&cache).await;
        let mut memory = vec![0u8; BLOCK_BYTES];
        // SAFETY: the memory outlives the cache, and nobody touches it before the load has ended.
        let lent = unsafe { kvhoist::Memory::host(memory.as_mut_ptr(), BLOCK_BYTES) };
        let region = cache.register(lent).await.expect("registered");
        let segments = vec![vec![Segment { ptr: memory.as_mut_ptr(), len: BLOCK_BYTES }]];
        disk.script_next(OpKind::Read, Fault::Stall);
        let reading = spawn(&cache, async |cache| fetch(&cache, 0).await);
        a_while().await;
        let queued = spawn(&cache, async |cache| fetch(&cache, 1).await);
        a_while().await;
        let keys = [key(2)];
        let mut load = Box::pin(cache.load_layers(&keys, &segments, &[0]));
        assert!(is_pending(&mut load).await, "no room: a command is queued");
        let mut unregistered = Box::pin(cache.unregister(&region));
        assert!(is_pending(&mut unregistered).await, "the load holds the memory");
        disk.release();
        let load = load.await.expect("taken on");
        assert!(matches!(load.blocks().await[..], [Ok(true)]), "loaded");
        unregistered.await.expect("its own region");
        assert_eq!(memory, payload(2));
        for fetched in [reading, queued] {
            assert!(fetched.await.expect("no panic").expect("served"), "resident");
        }
        finish(cache, reactor).await;
    });
}

#[test]
fn what_a_write_that_was_cut_off_held_is_given_back() {
    let world = Rc::new(World::new(1, sim::blank_files(&config())));
    // The reactor's tasks are dropped while a payload, a record and a checksum are under way: no panic under the lock,
    // which would end the process here.
    for polls in 0..40 {
        let cache = sim::block_on(async {
            let Simulated { cache, reactor } = sim::open(config(), &world).await.expect("open");
            let store = tokio::task::spawn_local({
                let cache = cache.clone();
                async move { drop(store(&cache, 50 + polls).await) }
            });
            for _ in 0..polls {
                tokio::task::yield_now().await;
            }
            drop((store, reactor));
            cache
        });
        kvhoist::internals::validate(&cache).expect("the books are in order");
    }
}

#[test]
fn memory_goes_straight_where_the_disk_allows_and_through_a_slot_where_not() {
    for (rule, shift, straight) in
        [(4, 4, true), (64, 64, true), (512, 64, false), (512, 1536, true), (4096, 512, false)]
    {
        sim::block_on(async {
            let mut memory = vec![0; 8 * BLOCK_BYTES];
            let config = config().bypass_host(true);
            let mut world = World::new(1, Vec::new());
            let options = SimOptions { memory_align_bytes: rule, ..SimOptions::default() };
            world.storage = Sim::new(1, sim::blank_files(&config), options);
            let Simulated { cache, reactor } = sim::open(config, &world).await.expect("blank files open");
            assert_eq!(cache.stats().memory_align_bytes, rule);
            let start = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(4096) + shift);
            // SAFETY: the memory outlives the cache, and is looked at where no call is under way.
            let lent = unsafe { kvhoist::Memory::host(start, 6 * BLOCK_BYTES) };
            let region = kvhoist::block_on(cache.register(lent)).expect("registered");
            let places: Vec<_> =
                (0..6).map(|n| vec![Segment { ptr: start.wrapping_add(n * BLOCK_BYTES), len: BLOCK_BYTES }]).collect();
            let keys: Vec<_> = (0..6).map(key).collect();
            // SAFETY: in the memory, and no call is under way.
            let bytes = || unsafe { std::slice::from_raw_parts_mut(start, 6 * BLOCK_BYTES) };
            let want: Vec<u8> = (0..6).flat_map(payload).collect();
            bytes().copy_from_slice(&want);
            let stored = cache.store_from(&keys, None, &places).await.expect("asked");
            assert!(stored.iter().all(|result| matches!(result, Ok(true))), "{stored:?}");
            bytes().fill(0);
            let loaded = cache.load_into(&keys, &places).await.expect("asked");
            assert!(loaded.iter().all(|result| matches!(result, Ok(true))), "{loaded:?}");
            assert!(*bytes() == *want, "the right bytes");
            let stats = cache.stats();
            let blocks = |route| stats.route_blocks(route);
            assert_eq!(
                [blocks(Route::RegionToDisk), blocks(Route::DiskToRegion)],
                [if straight { 6 } else { 0 }; 2],
                "memory at {shift} of a page, a disk that wants {rule}"
            );
            assert_eq!(world.storage.counts().failed, [0; 3], "nothing was tried that could not be");
            cache.unregister(&region).await.expect("its own region");
            finish(cache, reactor).await;
        });
    }
}

/// The lease of the only device slot is dropped once another block is stored, which needs the only host slot.
#[test]
fn a_promotion_that_waits_for_a_device_slot_holds_no_host_slot() {
    sim::block_on(async {
        let settings = config().host_blocks(1).device_blocks(1);
        let (cache, reactor, _disk) = open(settings).await;
        for n in 0..2 {
            store(&cache, n).await.expect("stored");
        }
        let lease = cache.fetch_to_device(&key(0)).await.expect("served").expect("resident");
        let promoting = spawn(&cache, async |cache| elapsed(cache.fetch_to_device(&key(1))).await);
        a_while().await;
        assert!(!promoting.is_finished(), "the only device slot is leased");
        let (stored, took) = elapsed(store(&cache, 2)).await;
        stored.expect("the host slot is free to take");
        assert!(took < DEADLINE / 4, "stored after {took:?}");
        drop(lease);
        let (promoted, took) = promoting.await.expect("no panic");
        let promoted = promoted.expect("served").expect("resident");
        assert_eq!(promoted.route(), Route::DiskToHostToDevice, "it was read twice");
        assert!(took < DEADLINE / 2, "woken after {took:?}, by the watch for deadlines");
        assert_eq!(cache.read_device(&promoted, Vec::new()).await.expect("read"), payload(1));
        drop(promoted);
        finish(cache, reactor).await;
    });
}

/// Whose turn it is at the device slot has lost its block to who waits behind it, and leases the only host slot.
#[test]
fn a_promotion_that_has_to_read_its_block_again_holds_no_device_slot_meanwhile() {
    sim::block_on(async {
        let settings = config().host_blocks(1).device_blocks(1);
        let (cache, reactor, _disk) = open(settings).await;
        for n in 0..3 {
            store(&cache, n).await.expect("stored");
        }
        let lease = cache.fetch_to_device(&key(0)).await.expect("served").expect("resident");
        let first = spawn(&cache, async |cache| cache.fetch_to_device(&key(1)).await);
        a_while().await;
        let held = cache.fetch(&key(2)).await.expect("served").expect("resident");
        let second = spawn(&cache, async |cache| elapsed(cache.fetch_to_device(&key(2))).await);
        a_while().await;
        assert!(!first.is_finished() && !second.is_finished(), "the only device slot is leased");
        drop(lease);
        let (promoted, took) = second.await.expect("no panic");
        let promoted = promoted.expect("the first gives its turn back").expect("resident");
        assert!(took < DEADLINE / 2, "promoted after {took:?}");
        drop((promoted, held));
        assert!(first.await.expect("no panic").expect("in time").is_some(), "it is read again");
        finish(cache, reactor).await;
    });
}

/// Polls once.
async fn is_pending<F: Future + Unpin>(future: &mut F) -> bool {
    std::future::poll_fn(|context| std::task::Poll::Ready(std::pin::Pin::new(&mut *future).poll(context).is_pending()))
        .await
}

/// Both results, polling the first one first.
async fn both<A: Future, B: Future>(a: A, b: B) -> (A::Output, B::Output) {
    let (mut a, mut b) = (Box::pin(a), Box::pin(b));
    let (mut first, mut second) = (None, None);
    std::future::poll_fn(|context| {
        use std::task::Poll;
        if first.is_none()
            && let Poll::Ready(output) = a.as_mut().poll(context)
        {
            first = Some(output);
        }
        if second.is_none()
            && let Poll::Ready(output) = b.as_mut().poll(context)
        {
            second = Some(output);
        }
        if first.is_some() && second.is_some() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    (first.expect("ready"), second.expect("ready"))
}

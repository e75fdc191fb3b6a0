//! The hand-off between callers and the reactor, under a model checker that chooses every interleaving.
//!
//! What runs is the product: [`Cache`](super::Cache) and the mover, over the lock of [`crate::sync`], which is the
//! checker's here. Only the threads, the storage and the clock are the model's. A lost wake-up is a deadlock to the
//! checker, because no clock moves that could end a wait.
//!
//! The checker switches threads where the lock is taken or released, where a future waits, and in the storage. What
//! tokio's channels do between two of these is one step: they are checked by their own authors.

mod closes;
mod computes;
mod rooms;
mod world;

use std::sync::Arc;

use shuttle::{future::block_on, thread::JoinHandle};
use world::{BLOCK_BYTES, World, assert_is, below, check, config, give_up_some_time, key, payload};

use crate::{Cache, Error, Lease, Memory, Segment, Tier, WritePolicy, error::Result, memory::AlignedBuf};

/// Fetches, and holds the lease for a while.
async fn fetch(cache: &Cache, n: u32) -> bool {
    let Some(lease) = cache.fetch(&key(n)).await.expect("fetch") else { return false };
    assert_is(&lease, n);
    shuttle::future::yield_now().await;
    assert_is(&lease, n);
    true
}

/// Callers that stay and callers that leave, all after the same block: each who stays gets it.
#[test]
fn whoever_stays_gets_the_block_that_others_leave() {
    check(|| {
        let world = World::new(config(0, 2, 4), 2, false);
        let stays = world.caller(async |cache: Cache| assert!(fetch(&cache, 0).await));
        let leaves = world.caller(async |cache: Cache| {
            if let Some(found) = give_up_some_time(cache.fetch(&key(0))).await {
                assert_is(&found.expect("fetch").expect("on disk"), 0);
            }
            assert!(fetch(&cache, 0).await);
        });
        let other = world.caller(async |cache: Cache| drop(give_up_some_time(cache.fetch(&key(0))).await));
        [stays, leaves, other].into_iter().for_each(|caller| caller.join().expect("no panic"));
        world.end();
    });
}

/// Who finds the lock taken has its holder look the block up: one in memory, one on disk, one that is nowhere.
#[test]
fn a_fetch_that_finds_the_lock_taken_gets_its_block() {
    check(|| {
        let world = World::new(config(0, 3, 4), 2, false);
        assert!(block_on(fetch(&world.cache, 0)));
        let held = world.cache.shared().lock();
        let callers =
            [0, 1, 2].map(|n| world.caller(async move |cache: Cache| assert_eq!(fetch(&cache, n).await, n < 2)));
        (0..6).for_each(|_| shuttle::thread::yield_now());
        drop(held);
        callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
        let stats = world.cache.stats();
        let hits = [Tier::Host, Tier::Disk].map(|tier| stats.tier(tier).hits);
        assert_eq!((hits, stats.misses), ([1, 2], 1), "each look-up counts once");
        world.end();
    });
}

/// One who joins the read that another's look-up has begun, and one who leaves.
#[test]
fn fetches_of_one_block_that_find_the_lock_taken_all_get_it() {
    check(|| {
        let world = World::new(config(0, 2, 4), 1, false);
        let held = world.cache.shared().lock();
        let callers = [(); 2].map(|()| world.caller(async |cache: Cache| assert!(fetch(&cache, 0).await)));
        let leaves = world.caller(async |cache: Cache| drop(give_up_some_time(cache.fetch(&key(0))).await));
        (0..6).for_each(|_| shuttle::thread::yield_now());
        drop(held);
        callers.into_iter().chain([leaves]).for_each(|caller| caller.join().expect("no panic"));
        world.end();
    });
}

/// More who want a host slot than there are: every slot that comes free goes to one who waits.
#[test]
fn slots_that_come_free_find_their_waiters() {
    check(|| {
        let world = World::new(config(0, 1, 4), 3, false);
        let callers = [0, 1, 2].map(|n| {
            world.caller(async move |cache: Cache| {
                drop(give_up_some_time(cache.reserve_for_overwrite()).await);
                assert!(fetch(&cache, n).await);
                drop(cache.reserve_for_overwrite().await.expect("reserve"));
            })
        });
        callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
        world.end();
    });
}

/// Two callers want slots of a chain that one pin holds back. When the suffix goes its prefix may go as well: both get
/// one, though only one thing happened.
fn two_slots_of_a_chain(release: fn(&World, Lease)) {
    let world = World::new(config(0, 2, 8), 2, true);
    block_on(async { assert!(fetch(&world.cache, 0).await && fetch(&world.cache, 1).await) });
    let held = block_on(world.cache.fetch(&key(1))).expect("fetch").expect("resident");
    let both = Arc::new(tokio::sync::Barrier::new(2));
    let callers = [(); 2].map(|()| {
        let both = Arc::clone(&both);
        world.caller(async move |cache: Cache| {
            let reserved = cache.reserve_for_overwrite().await.expect("reserve");
            both.wait().await;
            drop(reserved);
        })
    });
    release(&world, held);
    callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
    world.end();
}

#[test]
fn a_suffix_that_is_let_go_sets_its_prefix_free() {
    check(|| two_slots_of_a_chain(|_, held| drop(held)));
}

#[test]
fn a_suffix_that_is_removed_sets_its_prefix_free() {
    check(|| {
        two_slots_of_a_chain(|world, held| {
            assert!(block_on(world.cache.remove(&key(1))).expect("remove"));
            drop(held);
        });
    });
}

/// A read of a block holds its device copy back, and sets it free again for those who wait for a device slot.
#[test]
fn the_end_of_a_read_frees_the_device_copy() {
    check(|| {
        let world = World::new(config(1, 2, 4), 3, false);
        drop(block_on(world.cache.fetch_to_device(&key(0))).expect("fetch").expect("on disk"));
        assert!(block_on(async { fetch(&world.cache, 2).await && fetch(&world.cache, 1).await }));
        assert_eq!(world.cache.match_prefix(&[key(0)]), [Tier::Device], "its host slot was given up");
        let reads = world.caller(async |cache: Cache| {
            drop(give_up_some_time(cache.fetch(&key(0))).await);
        });
        let promotes = world.caller(async |cache: Cache| {
            drop(cache.fetch_to_device(&key(1)).await.expect("fetch").expect("on disk"));
        });
        [reads, promotes].into_iter().for_each(|caller| caller.join().expect("no panic"));
        world.end();
    });
}

/// A block that must be written before it may go, committed while somebody waits for its slot: it is written.
#[test]
fn a_dirty_block_makes_way_for_who_waits() {
    check(|| {
        let settings = config(0, 1, 4).write_policy(WritePolicy::WriteBack);
        let world = World::new(settings, 0, false);
        let callers = [0, 1, 2].map(|n| {
            world.caller(async move |cache: Cache| {
                cache.store(&key(n), None, &payload(n)).await.expect("store");
            })
        });
        callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
        world.end();
    });
}

/// Loads into callers' memory, begun by their callers or by the reactor, while the cache is closed: each caller has its
/// memory back at the answer, with the block in it or an error.
#[test]
fn a_load_that_a_close_overtakes_is_answered_when_its_memory_is_free() {
    check(|| {
        let world = World::new(config(0, 2, 4).bypass_host(true), 2, false);
        let callers = [0, 1].map(|n| {
            world.caller(async move |cache: Cache| {
                let mut memory = AlignedBuf::zeroed(2 * BLOCK_BYTES);
                // SAFETY: the memory lives until the region is forgotten, and nobody looks at it before the answer.
                let lent = unsafe { Memory::host(memory.as_mut_ptr(), memory.len()) };
                let Ok(region) = cache.register(lent).await else { return };
                let place = |at: usize| {
                    vec![Segment { ptr: memory.as_ptr().wrapping_add(at * BLOCK_BYTES).cast_mut(), len: BLOCK_BYTES }]
                };
                let places = [place(0), place(1)];
                let loaded = cache.load_into(&[key(n), key(3)], &places).await;
                match loaded.as_deref() {
                    Ok([Ok(true), missing]) => {
                        assert_eq!(memory[..BLOCK_BYTES], payload(n));
                        assert!(matches!(missing, Ok(false) | Err(Error::Closed)));
                    }
                    Ok([Err(Error::Closed), _]) | Err(Error::Closed) => {}
                    other => panic!("{other:?}"),
                }
                drop(cache.unregister(&region).await);
            })
        });
        block_on(world.cache.close()).expect("close");
        callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
        world.ended();
    });
}

/// Stores from callers' memory, some of the same block, whose writes their callers submit or the reactor makes, while
/// the I/O thread dies now and then. What was answered is there.
#[test]
fn a_store_that_a_close_overtakes_is_answered_when_its_memory_is_free() {
    check(|| {
        let world = World::new(config(0, 2, 6).bypass_host(true), 0, false);
        let callers = [0, 1].map(|n| {
            world.caller(async move |cache: Cache| {
                let mut memory = AlignedBuf::zeroed(3 * BLOCK_BYTES);
                let keys = [n, 2, 3 + n];
                keys.iter()
                    .zip(memory.chunks_mut(BLOCK_BYTES))
                    .for_each(|(n, block)| block.copy_from_slice(&payload(*n)));
                // SAFETY: the memory lives until the region is forgotten, and nobody writes to it before.
                let lent = unsafe { Memory::host(memory.as_mut_ptr(), memory.len()) };
                let Ok(region) = cache.register(lent).await else { return };
                let places = [0, 1, 2].map(|at: usize| {
                    vec![Segment { ptr: memory.as_ptr().wrapping_add(at * BLOCK_BYTES).cast_mut(), len: BLOCK_BYTES }]
                });
                let stored = cache.store_from(&keys.map(key), None, &places).await;
                for (n, stored) in keys.into_iter().zip(stored.into_iter().flatten()) {
                    match (stored, cache.fetch(&key(n)).await) {
                        (Ok(true), Ok(lease)) => assert_is(&lease.expect("it was stored"), n),
                        (Ok(true) | Err(Error::Closed), _) => {}
                        other => panic!("{other:?}"),
                    }
                }
                drop(cache.unregister(&region).await);
                memory.fill(0);
            })
        });
        block_on(world.cache.close()).expect("close");
        callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
        world.ended();
    });
}

/// Waiters that are told that it takes too long, while the movement goes on and lands.
#[test]
fn who_is_answered_at_the_deadline_leaves_the_movement_whole() {
    check(|| {
        let world = World::new(config(0, 2, 4), 2, false);
        let callers = [0, 0, 1].map(|n| {
            world.caller(async move |cache: Cache| match cache.fetch(&key(n)).await {
                Ok(lease) => assert_is(&lease.expect("on disk"), n),
                Err(error) => assert!(matches!(error, Error::Timeout { .. }), "{error}"),
            })
        });
        let watch = world.time_out();
        callers.into_iter().chain([watch]).for_each(|caller| caller.join().expect("no panic"));
        world.end();
    });
}

/// Everything at once, over three tiers.
#[test]
fn any_calls_in_any_order_leave_a_whole_cache() {
    check(|| {
        let world = any_world();
        let callers = any_callers(&world, |error| panic!("{error}"));
        callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
        world.end();
    });
}

/// The same, with a close among it.
#[test]
fn a_close_among_any_calls_leaves_a_whole_cache() {
    check(|| {
        let world = any_world();
        let callers = any_callers(&world, |error| assert!(matches!(error, Error::Closed), "{error}"));
        block_on(give_up_some_time(world.cache.close()));
        block_on(world.cache.close()).expect("close");
        callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
        world.ended();
    });
}

/// The same, with nobody who closes it: the last handle is dropped when the last caller ends.
#[test]
fn the_last_handle_may_go_at_any_time() {
    check(|| {
        let world = any_world();
        drop(any_callers(&world, |error| panic!("{error}")));
        world.leave();
    });
}

fn any_world() -> World {
    let policies = [WritePolicy::WriteThrough, WritePolicy::WriteThroughSelective, WritePolicy::WriteBack];
    let write_policy = policies[below(3) as usize];
    World::new(config(1, 3, 3 + below(3)).write_policy(write_policy).selective_hits(1), 3, below(2) == 0)
}

fn any_callers(world: &World, refused: fn(Error)) -> [JoinHandle<()>; 3] {
    [(); 3].map(|()| {
        world.caller(async move |cache: Cache| {
            for _ in 0..2 {
                if let Err(error) = one_call(&cache, below(4)).await {
                    refused(error);
                }
            }
        })
    })
}

async fn one_call(cache: &Cache, n: u32) -> Result<()> {
    let block = payload(n);
    match below(12) {
        0 => {
            let Some(lease) = cache.fetch(&key(n)).await? else { return Ok(()) };
            shuttle::future::yield_now().await;
            assert_is(&lease, n);
        }
        1 => drop(give_up_some_time(cache.fetch(&key(n))).await.transpose()?),
        2 => cache.store(&key(n), None, &block).await?,
        3 => drop(give_up_some_time(cache.store(&key(n), None, &block)).await.transpose()?),
        4 => drop(cache.remove(&key(n)).await?),
        5 => drop(give_up_some_time(cache.remove(&key(n))).await.transpose()?),
        6 => drop(give_up_some_time(cache.fetch_to_device(&key(n))).await.transpose()?),
        7 => drop(cache.prefetch(&[key(n)])?),
        8 => drop(give_up_some_time(cache.sync()).await.transpose()?),
        9 => {
            let mut reserved = cache.reserve_for_overwrite().await?;
            reserved.copy_from_slice(&block);
            _ = give_up_some_time(reserved.commit(&key(n), None)).await.transpose()?;
        }
        10 => {
            let wanted = key(n);
            let computed = cache.get_or_fetch_with(&wanted, None, async || Ok::<_, Error>(block.clone()));
            if let Some(bytes) = give_up_some_time(computed).await.transpose()? {
                assert_is(&bytes, n);
            }
        }
        _ => {
            let Some(lease) = cache.fetch_to_device(&key(n)).await? else { return Ok(()) };
            match cache.read_device(&lease, Vec::new()).await {
                Ok(bytes) => assert_is(&bytes, n),
                // Removed meanwhile.
                Err(Error::Argument { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

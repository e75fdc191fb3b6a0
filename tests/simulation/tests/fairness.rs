//! Who goes first: awaited movements before those that nobody awaits, and for slots whoever came first.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    ops::RangeInclusive,
    rc::Rc,
    time::Duration,
};

use kvhoist::{BlockKey, Cache, Config, DiskPath, Region, Segment, Tier, WritePolicy, internals::io::FileId};
use kvhoist_simulation::sim::{self, Reactor, Sim, SimOptions, Simulated, World};
use tokio::task::{spawn_local, yield_now};

const BLOCK_BYTES: usize = 4096;
const DEADLINE: Duration = Duration::from_millis(400);
/// Of every operation of the disk.
const LATENCY: Duration = Duration::from_millis(1);

/// One block at a time is read, and one written.
fn config() -> Config {
    Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(20)
        .disks(vec![DiskPath::with_blocks("simulated", 32)])
        .deadline_ms(DEADLINE.as_millis() as u64)
        .read_bytes_in_flight_max(BLOCK_BYTES as u64)
        .write_bytes_in_flight_max(BLOCK_BYTES as u64)
}

fn key(n: u8) -> BlockKey {
    BlockKey::new([n; 32])
}

async fn store(cache: &Cache, n: u8) {
    cache.store(&key(n), None, &[n; BLOCK_BYTES]).await.expect("stored");
}

async fn fetch(cache: &Cache, n: u8) {
    let lease = cache.fetch(&key(n)).await.expect("fetched").expect("it was stored");
    assert!(*lease == [n; BLOCK_BYTES], "block {n} shows wrong bytes");
}

/// Opens a cache with blocks `0..stored` on disk and nothing in host memory.
async fn open(config: Config, stored: u8) -> (Cache, Reactor, Sim) {
    let options = SimOptions { latency: LATENCY..=LATENCY, memory_align_bytes: 1, ..SimOptions::default() };
    let mut world = World::new(1, Vec::new());
    world.storage = Sim::new(1, sim::blank_files(&config), options.clone());
    let settings = config.clone().write_policy(WritePolicy::WriteThrough);
    let Simulated { cache, reactor } = sim::open(settings, &world).await.expect("blank files open");
    for n in 0..stored {
        store(&cache, n).await;
    }
    cache.close().await.expect("closed");
    reactor.ended().await;
    world.storage = Sim::new(2, vec![world.storage.contents(FileId(0))], options);
    let Simulated { cache, reactor } = sim::open(config, &world).await.expect("the store opens");
    (cache, reactor, world.storage)
}

async fn finish(cache: Cache, reactor: Reactor) {
    reactor.settle(Duration::from_secs(60)).await.expect("balanced");
    cache.close().await.expect("closed");
    reactor.ended().await;
    reactor.settle(Duration::from_secs(60)).await.expect("balanced after the end");
}

async fn elapsed<T>(future: impl Future<Output = T>) -> (T, Duration) {
    let began = tokio::time::Instant::now();
    (future.await, began.elapsed())
}

/// Callers that load blocks past the host tier one after the other, until they are stopped: an awaited read always
/// waits for its share.
struct Loads {
    stop: Rc<RefCell<bool>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    region: Region,
    _memory: Vec<u8>,
}

impl Loads {
    async fn begin(cache: &Cache, blocks: u8) -> Loads {
        let mut memory = vec![0; usize::from(blocks) * BLOCK_BYTES];
        // SAFETY: the memory outlives the region, and nobody touches it while a load is under way.
        let lent = unsafe { kvhoist::Memory::host(memory.as_mut_ptr(), memory.len()) };
        let region = kvhoist::block_on(cache.register(lent)).expect("registered");
        let stop = Rc::new(RefCell::new(false));
        let tasks = (0..blocks).map(|n| {
            let (cache, stop) = (cache.clone(), Rc::clone(&stop));
            let ptr = memory.as_mut_ptr().wrapping_add(usize::from(n) * BLOCK_BYTES);
            spawn_local(async move {
                while !*stop.borrow() {
                    let segments = vec![vec![Segment { ptr, len: BLOCK_BYTES }]];
                    let loaded = cache.load_into(&[key(n)], &segments).await.expect("asked");
                    assert!(matches!(loaded[..], [Ok(true)]), "{loaded:?}");
                }
            })
        });
        let tasks = tasks.collect();
        tokio::time::sleep(LATENCY * 3).await;
        Loads { stop, tasks, region, _memory: memory }
    }

    async fn end(self, cache: &Cache) {
        *self.stop.borrow_mut() = true;
        for task in self.tasks {
            task.await.expect("no panic");
        }
        cache.unregister(&self.region).await.expect("its own region");
    }
}

#[test]
fn a_fetch_that_joins_a_prefetch_goes_before_the_others() {
    // With 20 slots the prefetches wait for the disk, with 4 for a slot as well.
    for host_blocks in [20, 4] {
        sim::block_on(async {
            let (cache, reactor, _disk) = open(config().host_blocks(host_blocks), 16).await;
            let keys: Vec<_> = (0..16).map(key).collect();
            assert_eq!(cache.prefetch(&keys).expect("open"), 16);
            // All have asked for a slot.
            tokio::time::sleep(LATENCY / 2).await;
            let (_, took) = elapsed(fetch(&cache, 15)).await;
            // The reads before it are those that hold the slots, where there are few.
            let limit = if host_blocks == 20 { LATENCY * 2 } else { LATENCY * 6 };
            assert!(took <= limit, "with {host_blocks} slots: waited for prefetches, {took:?}");
            finish(cache, reactor).await;
        });
    }
}

#[test]
fn a_fetch_does_not_wait_for_the_slots_of_prefetches_that_came_before() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open(config().host_blocks(2), 17).await;
        let keys: Vec<_> = (0..16).map(key).collect();
        assert_eq!(cache.prefetch(&keys).expect("open"), 16);
        tokio::time::sleep(LATENCY / 2).await;
        let (_, took) = elapsed(fetch(&cache, 16)).await;
        assert!(took <= LATENCY * 4, "waited for prefetches, {took:?}");
        finish(cache, reactor).await;
    });
}

/// What was done when a fetch ended that began while `others` waited for workers, which transfer one block of a kind at
/// a time each; `None` if the seed has no workers that transfer.
async fn done_before_a_fetch(
    seed: u64,
    config: Config,
    others: impl AsyncFnOnce(&Cache) -> Rc<Cell<u64>>,
    (stored, fetched): (RangeInclusive<u8>, u8),
) -> Option<u64> {
    let options = SimOptions { latency: LATENCY..=LATENCY, ..SimOptions::default() };
    let mut world = World::new(seed, sim::blank_files(&config));
    (world.deaths, world.transfers_max) = (0.0, 1);
    world.storage = Sim::new(1, sim::blank_files(&config), options);
    let block = vec![7; config.block_bytes];
    for is_filled in [false, true] {
        let Simulated { cache, reactor } = sim::open(config.clone(), &world).await.expect("it opens");
        if is_filled {
            let done = others(&cache).await;
            tokio::time::sleep(LATENCY / 2).await;
            let before = done.get() + cache.stats().tier(Tier::Host).resident;
            assert!(*cache.fetch(&key(fetched)).await.expect("fetched").expect("it was stored") == block[..]);
            let after = done.get() + cache.stats().tier(Tier::Host).resident;
            let done = cache.stats().work_done;
            finish(cache, reactor).await;
            return (done > 0).then_some(after - before);
        }
        for n in stored.clone() {
            cache.store(&key(n), None, &block).await.expect("stored");
        }
        cache.close().await.expect("closed");
        reactor.ended().await;
    }
    unreachable!("the second run returns")
}

/// Of `queued` transfers no more are done before a fetch than workers have in flight when it comes, and begin while it
/// is transferred.
fn a_fetch_passes(queued: u64, done: impl Fn(u64) -> Option<u64>) {
    let counts: Vec<_> = (0..24).filter_map(done).collect();
    assert!(counts.len() >= 8, "seeds with workers: {counts:?}");
    assert!(
        counts.iter().all(|&count| count <= queued / 2),
        "of {queued} transfers so many were done before: {counts:?}"
    );
}

#[test]
fn a_fetch_waits_for_prefetches_in_flight_and_for_none_that_is_queued() {
    let config = || {
        Config::default().block_bytes(BLOCK_BYTES).host_blocks(48).disks(vec![DiskPath::with_blocks("simulated", 48)])
    };
    // The second of them joins the last prefetch.
    for fetched in [40, 31] {
        a_fetch_passes(32, |seed| {
            let prefetches = async |cache: &Cache| {
                let keys: Vec<_> = (0..32).map(key).collect();
                assert_eq!(cache.prefetch(&keys).expect("open"), 32);
                Rc::default()
            };
            sim::block_on(done_before_a_fetch(seed, config(), prefetches, (0..=40, fetched)))
        });
    }
}

#[test]
fn a_fetch_waits_for_stores_in_flight_and_for_none_that_is_queued() {
    // Smaller blocks are written by the reactor.
    let config =
        Config::default().block_bytes(256 << 10).host_blocks(48).disks(vec![DiskPath::with_blocks("simulated", 80)]);
    a_fetch_passes(32, |seed| {
        let stores = async |cache: &Cache| {
            let done = Rc::new(Cell::new(0));
            for n in 100..132 {
                let (cache, done) = (cache.clone(), Rc::clone(&done));
                spawn_local(async move {
                    cache.store(&key(n), None, &[n; 256 << 10]).await.expect("stored");
                    done.set(done.get() + 1);
                });
            }
            done
        };
        sim::block_on(done_before_a_fetch(
            seed,
            config.clone().write_bytes_in_flight_max(64 << 20),
            stores,
            (40..=40, 40),
        ))
    });
}

#[test]
fn a_store_that_needs_the_slot_of_a_dirty_block_gets_it_beside_continuous_loads() {
    sim::block_on(async {
        let write_policy = WritePolicy::WriteBack;
        let settings = config().host_blocks(2).bypass_host(true).write_policy(write_policy);
        let (cache, reactor, _disk) = open(settings, 4).await;
        let loads = Loads::begin(&cache, 4).await;
        for n in 10..16 {
            let (_, took) = elapsed(store(&cache, n)).await;
            assert!(took < DEADLINE / 8, "block {n} was stored after {took:?}");
        }
        loads.end(&cache).await;
        finish(cache, reactor).await;
    });
}

#[test]
fn a_sync_that_joins_a_background_write_ends_beside_continuous_loads() {
    sim::block_on(async {
        let write_policy = WritePolicy::WriteBack;
        let (low_watermark, high_watermark) = (1.0, 1.0);
        let settings = config()
            .low_watermark(low_watermark)
            .high_watermark(high_watermark)
            .bypass_host(true)
            .write_policy(write_policy);
        let (cache, reactor, _disk) = open(settings, 4).await;
        let loads = Loads::begin(&cache, 4).await;
        // The second store finds less than the watermark, and the first block is written back.
        store(&cache, 10).await;
        store(&cache, 11).await;
        tokio::time::sleep(LATENCY * 4).await;
        assert_eq!(cache.stats().tier(Tier::Disk).resident, 4, "nobody awaits the write-back");
        let (result, took) = elapsed(cache.sync()).await;
        result.expect("synced");
        assert!(took < DEADLINE / 8, "synced after {took:?}");
        loads.end(&cache).await;
        finish(cache, reactor).await;
    });
}

#[test]
fn a_store_that_needs_the_slot_of_a_prefetch_gets_it_beside_continuous_loads() {
    sim::block_on(async {
        let settings = config().host_blocks(2).bypass_host(true);
        let (cache, reactor, _disk) = open(settings, 8).await;
        let loads = Loads::begin(&cache, 4).await;
        assert_eq!(cache.prefetch(&[key(4), key(5), key(6)]).expect("open"), 3);
        tokio::time::sleep(LATENCY * 4).await;
        let (_, took) = elapsed(store(&cache, 10)).await;
        assert!(took < DEADLINE / 8, "stored after {took:?}");
        loads.end(&cache).await;
        finish(cache, reactor).await;
    });
}

#[test]
fn slots_go_to_those_who_wait_in_the_order_in_which_they_came() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open(config().host_blocks(1), 0).await;
        let mut held = Some(cache.reserve().await.expect("the only slot"));
        let served = Rc::new(RefCell::new(Vec::new()));
        let spawn_waiter = |n: u32| {
            let (cache, served) = (cache.clone(), Rc::clone(&served));
            spawn_local(async move {
                let reserved = cache.reserve().await.expect("a slot");
                served.borrow_mut().push(n);
                // Whoever comes now comes late.
                yield_now().await;
                drop(reserved);
            })
        };
        let mut waiters = Vec::new();
        for n in 0..4 {
            waiters.push(spawn_waiter(n));
            yield_now().await;
        }
        // This one asks in the very turn in which the slot comes free, and so before any waiter is polled.
        drop(held.take());
        let late = {
            let served = Rc::clone(&served);
            let reserving = cache.reserve();
            async move {
                let reserved = reserving.await.expect("a slot");
                served.borrow_mut().push(100);
                drop(reserved);
            }
        };
        let mut more = Vec::new();
        let arrivals = async {
            for n in 101..140 {
                more.push(spawn_waiter(n));
                yield_now().await;
            }
        };
        tokio::join!(late, arrivals);
        for waiter in waiters.into_iter().chain(more) {
            waiter.await.expect("no panic");
        }
        let order: Vec<u32> = (0..4).chain(100..140).collect();
        assert_eq!(*served.borrow(), order);
        finish(cache, reactor).await;
    });
}

#[test]
fn a_waiter_that_leaves_passes_on_the_slot_that_it_was_given() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open(config().host_blocks(1), 0).await;
        let held = cache.reserve().await.expect("the only slot");
        let mut leaves = Box::pin(cache.reserve());
        assert!(poll_once(leaves.as_mut()).is_none(), "no slot is free");
        let stays = spawn_local({
            let cache = cache.clone();
            async move { elapsed(cache.reserve()).await }
        });
        yield_now().await;
        drop(held);
        // It has been given the slot and is not polled again.
        drop(leaves);
        let (reserved, took) = stays.await.expect("no panic");
        drop(reserved.expect("the other's slot"));
        assert_eq!(took, Duration::ZERO, "the unlock wakes, and no deadline tick");
        finish(cache, reactor).await;
    });
}

fn poll_once<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
    match future.poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
        std::task::Poll::Ready(output) => Some(output),
        std::task::Poll::Pending => None,
    }
}

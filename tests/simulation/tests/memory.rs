//! Memory that callers lend, lease and give back: whose it is, how long it is used, and who is to blame for it.

#[path = "memory/changed.rs"]
mod changed;

use std::{
    future::Future,
    task::{Context, Waker},
    time::Duration,
};

use kvhoist::{BlockKey, Cache, Config, DiskPath, Error, Region, Segment, Tier, internals::io::OpKind};
use kvhoist_simulation::sim::{self, CopyOptions, Fault, Reactor, Sim, SimCopy, SimOptions, Simulated, World};

const BLOCK_BYTES: usize = 4096;

/// What Linux calls a lack of memory, a lack of buffers, and memory that is not there.
const SHORTAGES: [i32; 3] = [12, 105, 14];

fn config() -> Config {
    Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(4)
        .device_blocks(2)
        .disks(vec![DiskPath::with_blocks("simulated", 64)])
}

fn key(n: u8) -> BlockKey {
    BlockKey::new([n; 32])
}

fn payload(n: u8) -> Vec<u8> {
    vec![n; BLOCK_BYTES]
}

/// A cache over quick disks and a quick device, and blocks `0..16` on disk.
async fn open(config: Config) -> (Cache, Reactor, World) {
    let mut world = World::new(1, Vec::new());
    let latency = Duration::from_millis(1)..=Duration::from_millis(1);
    world.copy = SimCopy::new(1, CopyOptions { latency: latency.clone(), ..CopyOptions::default() });
    world.storage = Sim::new(1, sim::blank_files(&config), SimOptions { latency, ..SimOptions::default() });
    let Simulated { cache, reactor } = sim::open(config, &world).await.expect("blank files open");
    for n in 0..16 {
        cache.store(&key(n), None, &payload(n)).await.expect("a sound disk");
    }
    (cache, reactor, world)
}

async fn finish(cache: Cache, reactor: Reactor) {
    reactor.settle(Duration::from_secs(60)).await.expect("balanced");
    cache.close().await.expect("a sound disk");
    reactor.ended().await;
}

/// Memory of the test, for `blocks` blocks.
struct Memory(Vec<u8>);

impl Memory {
    fn new(blocks: usize) -> Self {
        // One block more, for the alignment.
        Memory(vec![0xee; (blocks + 1) * BLOCK_BYTES])
    }

    fn start(&mut self) -> *mut u8 {
        let skip = self.0.as_ptr().align_offset(BLOCK_BYTES);
        self.0.as_mut_ptr().wrapping_add(skip)
    }

    fn place(&mut self, block: usize) -> Vec<Segment> {
        vec![Segment { ptr: self.start().wrapping_add(block * BLOCK_BYTES), len: BLOCK_BYTES }]
    }

    fn register(&mut self, cache: &Cache) -> Region {
        let len = self.0.len() - BLOCK_BYTES;
        // SAFETY: each test keeps the memory for longer than its cache, and looks at it where no call is under way.
        let lent = unsafe { kvhoist::Memory::host(self.start(), len) };
        kvhoist::block_on(cache.register(lent)).expect("registered")
    }

    fn bytes(&mut self, block: usize) -> &[u8] {
        let skip = self.0.as_ptr().align_offset(BLOCK_BYTES);
        &self.0[skip + block * BLOCK_BYTES..][..BLOCK_BYTES]
    }
}

fn is_wrong(result: &Result<impl Sized, Error>, argument: &str, words: &str) -> bool {
    matches!(result, Err(Error::Argument { what, found, .. }) if *what == argument && found.contains(words))
}

#[test]
fn a_lease_is_read_by_the_cache_that_gave_it_and_by_no_other() {
    sim::block_on(async {
        let (owner, its_reactor, _) = open(config()).await;
        let (other, other_reactor, _) = open(config()).await;
        let (hostless, hostless_reactor, _) = open(config().device_blocks(0)).await;
        let lease = owner.fetch_to_device(&key(3)).await.expect("served").expect("on disk");
        // The other cache has a block of its own in the slot of the same number.
        let theirs = other.fetch_to_device(&key(4)).await.expect("served").expect("on disk");
        for cache in [&other, &hostless] {
            let read = cache.read_device(&lease, Vec::new()).await;
            assert!(is_wrong(&read, "lease", "another cache"), "{read:?}");
        }
        assert_eq!(owner.read_device(&lease, Vec::new()).await.expect("its own"), payload(3));
        assert_eq!(other.read_device(&theirs, Vec::new()).await.expect("its own"), payload(4));
        drop((lease, theirs));
        finish(owner, its_reactor).await;
        finish(other, other_reactor).await;
        finish(hostless, hostless_reactor).await;
    });
}

#[test]
fn a_region_is_pinned_and_given_back_by_the_cache_that_registered_it_and_by_no_other() {
    sim::block_on(async {
        let (owner, its_reactor, _) = open(config()).await;
        let (other, other_reactor, _) = open(config()).await;
        let mut memory = Memory::new(2);
        let region = memory.register(&owner);
        let (pinned, unregistered) =
            (kvhoist::internals::pin_region(&other, &region).await, other.unregister(&region).await);
        assert!(is_wrong(&pinned, "region", "another cache"), "{pinned:?}");
        assert!(is_wrong(&unregistered, "region", "another cache"), "{unregistered:?}");
        let loaded = owner.load_into(&[key(1)], &[memory.place(0)]).await.expect("it is registered as before");
        assert!(matches!(loaded[..], [Ok(true)]), "{loaded:?}");
        owner.unregister(&region).await.expect("its own");
        let pinned = kvhoist::internals::pin_region(&owner, &region).await;
        assert!(is_wrong(&pinned, "region", "unregistered"), "{pinned:?}");
        finish(owner, its_reactor).await;
        finish(other, other_reactor).await;
    });
}

#[test]
fn a_call_with_more_blocks_than_it_may_have_says_how_many_it_may_have() {
    sim::block_on(async {
        let (cache, reactor, _) = open(config().movements_max(3)).await;
        let mut memory = Memory::new(4);
        let region = memory.register(&cache);
        let (keys, places): (Vec<_>, Vec<_>) = (0..4).map(|n| (key(n), memory.place(n.into()))).unzip();
        let loaded = cache.load_into(&keys, &places).await;
        assert!(is_wrong(&loaded, "keys", "4"), "{loaded:?}");
        assert!(loaded.is_err_and(|error| error.to_string().contains("at most 3")));
        let loaded = cache.load_into(&keys[..3], &places[..3]).await.expect("within the limit");
        assert!(matches!(loaded[..], [Ok(true), Ok(true), Ok(true)]), "{loaded:?}");
        cache.unregister(&region).await.expect("its own");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_registration_that_is_dropped_while_it_pins_leaves_no_region() {
    sim::block_on(async {
        let (cache, reactor, _) = open(config()).await;
        let mut memory = Memory::new(1);
        let (place, len) = (memory.place(0), BLOCK_BYTES);
        // SAFETY: the memory outlives the cache, and nothing touches it while a call is under way.
        let lent = || unsafe { kvhoist::Memory::host(place[0].ptr, len) };
        // The reactor is a task of this thread: the first poll sends the request, and nobody has answered it.
        let mut register = Box::pin(cache.register(lent().pinned(true)));
        let mut context = Context::from_waker(Waker::noop());
        assert!(register.as_mut().poll(&mut context).is_pending(), "it waits for the reactor");
        drop(register);
        let loaded = cache.load_into(&[key(1)], std::slice::from_ref(&place)).await;
        assert!(is_wrong(&loaded, "segments", "in no registered region"), "{loaded:?}");
        let region = cache.register(lent()).await.expect("the range is free again");
        let loaded = cache.load_into(&[key(1)], &[place]).await.expect("registered");
        assert!(matches!(loaded[..], [Ok(true)]), "{loaded:?}");
        cache.unregister(&region).await.expect("its own");
        finish(cache, reactor).await;
    });
}

#[test]
fn memory_of_a_dropped_registration_may_be_unmapped_and_others_are_pinned_after_it() {
    // Dropped before the reactor has the request, and after its answer.
    for answered in [false, true] {
        sim::block_on(async {
            let (cache, reactor, world) = open(config()).await;
            let mut memory = Memory::new(1);
            // SAFETY: the memory outlives the cache, and nothing touches it while a call is under way.
            let lent = unsafe { kvhoist::Memory::host(memory.start(), BLOCK_BYTES) };
            let mut register = Box::pin(cache.register(lent.pinned(true)));
            let mut context = Context::from_waker(Waker::noop());
            assert!(register.as_mut().poll(&mut context).is_pending(), "it waits for the reactor");
            if answered {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            drop(register);
            tokio::time::sleep(Duration::from_millis(20)).await;
            let start = memory.start().addr();
            world.storage.unmap(start..start + BLOCK_BYTES);
            let mut other = Memory::new(1);
            // SAFETY: as above.
            let lent = unsafe { kvhoist::Memory::host(other.start(), BLOCK_BYTES) };
            let region = cache.register(lent.pinned(true)).await.expect("registered");
            assert!(region.is_pinned(), "the table has no entry of memory that is gone");
            let loaded = cache.load_into(&[key(1)], &[other.place(0)]).await.expect("registered");
            assert!(matches!(loaded[..], [Ok(true)]), "{loaded:?}");
            cache.unregister(&region).await.expect("its own");
            assert_eq!(world.storage.pins_refused(), 0);
            finish(cache, reactor).await;
        });
    }
}

#[test]
fn everyone_who_unregisters_a_region_waits_until_it_is_unused() {
    for bypass_host in [false, true] {
        sim::block_on(async {
            let (cache, reactor, world) = open(config().bypass_host(bypass_host)).await;
            let mut memory = Memory::new(1);
            let region = std::rc::Rc::new(memory.register(&cache));
            world.storage.script_next(OpKind::Read, Fault::Stall);
            let (loading, place) = (cache.clone(), memory.place(0));
            let load = tokio::task::spawn_local(async move { loading.load_into(&[key(0)], &[place]).await });
            while world.storage.in_flight() == 0 {
                tokio::task::yield_now().await;
            }
            // One of them leaves; that must not let the others go.
            let left = tokio::time::timeout(Duration::from_millis(1), cache.unregister(&region)).await;
            assert!(left.is_err(), "the first did not wait");
            let wait = || {
                let (cache, region) = (cache.clone(), std::rc::Rc::clone(&region));
                tokio::task::spawn_local(async move { cache.unregister(&region).await })
            };
            let waiters = [wait(), wait()];
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert!(waiters.iter().all(|waiter| !waiter.is_finished()), "somebody takes memory that is read into");
            world.storage.release();
            for waiter in waiters {
                waiter.await.expect("no panic").expect("its own");
            }
            // The memory is the test's again.
            assert_eq!(memory.bytes(0), payload(0));
            assert!(matches!(load.await.expect("no panic").expect("asked")[..], [Ok(true)]));
            finish(cache, reactor).await;
        });
    }
}

#[test]
fn a_lease_on_the_device_is_read_after_its_block_was_removed() {
    sim::block_on(async {
        let (cache, reactor, _) = open(config()).await;
        let lease = cache.fetch_to_device(&key(5)).await.expect("served").expect("on disk");
        assert!(cache.remove(&key(5)).await.expect("removed"));
        // Others want the device meanwhile.
        drop(cache.fetch_to_device(&key(6)).await.expect("served"));
        assert_eq!(cache.read_device(&lease, Vec::new()).await.expect("leased"), payload(5));
        drop(lease);
        finish(cache, reactor).await;
    });
}

#[test]
fn reads_of_device_blocks_are_bounded_and_all_end() {
    const MOVEMENTS: u64 = 8;
    sim::block_on(async {
        let config = config().movements_max(MOVEMENTS as u32);
        let (cache, reactor, world) = open(config).await;
        let lease = std::rc::Rc::new(cache.fetch_to_device(&key(7)).await.expect("served").expect("on disk"));
        let read = || {
            let (cache, lease) = (cache.clone(), std::rc::Rc::clone(&lease));
            tokio::task::spawn_local(async move { cache.read_device(&lease, Vec::new()).await })
        };
        let reads: Vec<_> = (0..1000).map(|_| read()).collect();
        // Some leave, before and after their turn.
        reads.iter().step_by(7).for_each(tokio::task::JoinHandle::abort);
        let mut most = 0;
        while reads.iter().any(|read| !read.is_finished()) {
            most = most.max(world.copy.in_flight());
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
        assert!((1..=MOVEMENTS).contains(&most), "{most} copies were under way");
        let mut ended = 0;
        for read in reads {
            if let Ok(result) = read.await {
                assert_eq!(result.expect("read"), payload(7));
                ended += 1;
            }
        }
        assert!(ended >= 850, "{ended} were not aborted");
        drop(lease);
        finish(cache, reactor).await;
    });
}

#[test]
fn a_read_that_the_machine_has_no_resources_for_costs_no_block() {
    for bypass_host in [false, true] {
        for errno in SHORTAGES {
            sim::block_on(async {
                let (cache, reactor, world) = open(config().bypass_host(bypass_host)).await;
                let mut memory = Memory::new(1);
                let region = memory.register(&cache);
                for read in 0..3 {
                    world.storage.script_next(OpKind::Read, Fault::Error(errno));
                    match read {
                        0 => drop(cache.fetch(&key(0)).await.expect_err("the read fails")),
                        1 => drop(cache.fetch_to_device(&key(0)).await.expect_err("the read fails")),
                        _ => drop(cache.load_into(&[key(0)], &[memory.place(0)]).await.expect("asked")),
                    }
                }
                assert_eq!(cache.stats().quarantined, 0, "errno {errno} says nothing of the disk");
                let lease = cache.fetch(&key(0)).await.expect("served").expect("the block is still there");
                assert_eq!(*lease, payload(0)[..]);
                drop(lease);
                cache.unregister(&region).await.expect("its own");
                finish(cache, reactor).await;
            });
        }
    }
}

fn look_ups(cache: &Cache) -> u64 {
    let stats = cache.stats();
    stats.misses + Tier::ALL.iter().map(|&tier| stats.tier(tier).hits).sum::<u64>()
}

#[test]
fn blocks_loaded_into_one_place_at_once_are_not_taken_for_damaged() {
    sim::block_on(async {
        let (cache, reactor, _) = open(config().bypass_host(true)).await;
        let mut memory = Memory::new(1);
        let region = memory.register(&cache);
        // The dummy page of an engine: what it holds afterwards is nobody's.
        let keys: Vec<_> = (0..12).map(key).collect();
        let places = vec![memory.place(0); keys.len()];
        let before = look_ups(&cache);
        let loaded = cache.load_into(&keys, &places).await.expect("asked");
        assert!(loaded.iter().all(|result| matches!(result, Ok(true))), "{loaded:?}");
        assert_eq!(look_ups(&cache) - before, keys.len() as u64, "a block that is read twice is looked up once");
        let stats = cache.stats();
        assert_eq!((stats.checksum_failures, stats.quarantined), (0, 0));
        assert_eq!(stats.tier(Tier::Disk).resident, 16, "no block was given up");
        cache.unregister(&region).await.expect("its own");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_damaged_block_can_be_stored_anew_while_another_reader_holds_its_slot() {
    sim::block_on(async {
        let config = config().bypass_host(true);
        let (cache, reactor, world) = open(config.clone()).await;
        world.storage.script_next(OpKind::Write, Fault::Lost);
        cache.store(&key(20), None, &payload(20)).await.expect("the disk lies");
        cache.close().await.expect("a sound disk");
        reactor.ended().await;
        let Simulated { cache, reactor } = sim::open(config, &world).await.expect("opens again");
        let mut memory = Memory::new(1);
        let region = memory.register(&cache);
        world.storage.script_next(OpKind::Read, Fault::Stall);
        let (loading, place) = (cache.clone(), memory.place(0));
        let load = tokio::task::spawn_local(async move { loading.load_into(&[key(20)], &[place]).await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(world.storage.stalled(), 1, "the other reader");
        assert!(cache.fetch(&key(20)).await.expect("served").is_none(), "the disk lost it");
        assert!(!cache.contains(&key(20)), "a miss, although its slot is held");
        cache.store(&key(20), None, &payload(20)).await.expect("a sound disk");
        world.storage.release();
        let loaded = load.await.expect("no panic").expect("asked");
        assert!(matches!(loaded[..], [Ok(true)]), "found damaged, and then in host memory: {loaded:?}");
        // Host memory evicts it: the disk serves the second copy.
        for n in 0..8 {
            drop(cache.fetch(&key(n)).await.expect("served").expect("on disk"));
        }
        let lease = cache.fetch(&key(20)).await.expect("served").expect("its store was acknowledged");
        assert_eq!(*lease, payload(20)[..]);
        drop(lease);
        assert_eq!((cache.stats().checksum_failures, cache.stats().quarantined), (1, 0), "an earlier run stored it");
        cache.unregister(&region).await.expect("its own");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_block_that_is_damaged_on_disk_is_found_out_on_the_way_to_a_callers_memory() {
    sim::block_on(async {
        let config = config().bypass_host(true).quarantine_max(0);
        let (cache, reactor, world) = open(config.clone()).await;
        world.storage.script_next(OpKind::Write, Fault::Lost);
        let stored = cache.store(&key(20), None, &payload(20)).await;
        cache.close().await.expect("a sound disk");
        reactor.ended().await;
        stored.expect("the disk lies");
        let Simulated { cache, reactor } = sim::open(config, &world).await.expect("opens again");
        let mut memory = Memory::new(1);
        let region = memory.register(&cache);
        let loaded = cache.load_into(&[key(20)], &[memory.place(0)]).await.expect("asked");
        assert!(matches!(loaded[..], [Ok(false)]), "{loaded:?}");
        let stats = cache.stats();
        let found = (stats.checksum_failures, stats.changed_memory, stats.quarantined, stats.disk_retired);
        assert_eq!(found, (1, 0, 0, None), "a power cut may have been it");
        cache.unregister(&region).await.expect("its own");
        finish(cache, reactor).await;
    });
}

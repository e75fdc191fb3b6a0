//! What leases hold back: the blocks that they are on, and no others.

mod scene;

use kvhoist::{Cache, DiskPath, Error, Eviction, Tier};
use kvhoist_simulation::sim::{self, Simulated, World};
use scene::{DEADLINE, config, elapsed, finish, key, open, payload, store};

/// Stores `blocks` as one chain.
async fn store_chain(cache: &Cache, blocks: std::ops::Range<u8>) {
    for n in blocks.clone() {
        let parent = (n > blocks.start).then(|| key(n - 1));
        cache.store(&key(n), parent.as_ref(), &payload(n)).await.expect("a sound disk");
    }
}

async fn lease(cache: &Cache, n: u8) -> Result<kvhoist::Lease, Error> {
    let lease = cache.fetch(&key(n)).await?.expect("it is resident");
    assert!(*lease == payload(n), "block {n} shows wrong bytes");
    Ok(lease)
}

#[test]
fn a_chain_longer_than_the_host_tier_is_read_while_each_block_is_held_until_the_next_is_there() {
    sim::block_on(async {
        for host_blocks in [2, 8] {
            let disks = vec![DiskPath::with_blocks("simulated", 32)];
            let (cache, reactor, _disk) = open(config().host_blocks(host_blocks).disks(disks)).await;
            store_chain(&cache, 0..32).await;
            let mut held = None;
            for n in 0..32 {
                held = Some(lease(&cache, n).await.unwrap_or_else(|error| panic!("block {n}: {error}")));
            }
            drop(held);
            finish(cache, reactor).await;
        }
    });
}

#[test]
fn one_lease_on_a_chains_tail_holds_back_no_other_slot() {
    sim::block_on(async {
        for disks in [config().disk.paths, Vec::new()] {
            let (cache, reactor, _disk) = open(config().disks(disks)).await;
            store_chain(&cache, 0..4).await;
            let tail = lease(&cache, 3).await.expect("in memory");
            for n in 100..103 {
                let (stored, took) = elapsed(store(&cache, n)).await;
                stored.unwrap_or_else(|error| panic!("block {n}: {error}"));
                assert!(took < DEADLINE / 4, "block {n} waited for {took:?}");
            }
            drop(tail);
            drop(lease(&cache, 3).await.expect("what was held stays, and can be read by its key"));
            finish(cache, reactor).await;
        }
    });
}

#[test]
fn a_device_out_of_service_keeps_no_block_beyond_its_last_lease() {
    sim::block_on(async {
        let config = config().disks(Vec::new()).device_blocks(2).eviction_policy(Eviction::Lru);
        let world = World::new(1, Vec::new());
        let Simulated { cache, reactor } = sim::open(config, &world).await.expect("there are no files");
        store(&cache, 14).await.expect("there is room");
        store(&cache, 15).await.expect("there is room");
        let leased = cache.fetch_to_device(&key(15)).await.expect("served").expect("in host memory");
        drop(cache.fetch_to_device(&key(14)).await.expect("served").expect("in host memory"));
        for n in 20..24 {
            store(&cache, n).await.expect("there is room");
        }
        assert_eq!(cache.len(), 6, "four blocks are in host memory, and only the device has blocks 14 and 15");
        world.copy.stop();
        let copied = cache.read_device(&leased, Vec::new()).await;
        assert!(copied.is_err() && cache.stats().device_retired.is_some(), "{copied:?}");
        assert!(!cache.contains(&key(14)), "it cannot be read any more");
        assert!(cache.fetch(&key(15)).await.expect("a miss").is_none(), "only the device has it");
        assert!(!cache.contains(&key(15)) && cache.keys().all(|found| found != key(15)), "nor is it named");
        assert_eq!((cache.match_len(&[key(15)]), cache.match_prefix(&[key(15)])), (0, vec![]));
        assert_eq!(cache.prefetch(&[key(15)]).expect("open"), 0, "there is nothing to prefetch");
        drop(leased);
        assert!(!cache.contains(&key(15)), "it cannot be read any more");
        assert_eq!((cache.len(), cache.stats().tier(Tier::Device).resident), (4, 0));
        finish(cache, reactor).await;
    });
}

#[test]
fn a_block_of_a_device_out_of_service_is_named_with_the_tier_that_serves_it() {
    sim::block_on(async {
        let config = config().device_blocks(2);
        let world = World::new(1, sim::blank_files(&config));
        let Simulated { cache, reactor } = sim::open(config, &world).await.expect("blank files open");
        for n in 0..2 {
            store(&cache, n).await.expect("a sound disk");
        }
        let leases = [cache.fetch_to_device(&key(0)).await, cache.fetch_to_device(&key(1)).await];
        for n in 20..24 {
            store(&cache, n).await.expect("a sound disk");
        }
        drop(cache.fetch(&key(1)).await.expect("served").expect("on the device and on disk"));
        let both = [key(0), key(1)];
        assert_eq!(cache.match_prefix(&both), [Tier::Device; 2]);
        world.copy.stop();
        let leased = leases[0].as_ref().expect("served").as_ref().expect("stored");
        assert!(cache.read_device(leased, Vec::new()).await.is_err() && cache.stats().device_retired.is_some());
        assert_eq!((cache.match_prefix(&both), cache.match_len(&both)), (vec![Tier::Disk, Tier::Host], 2));
        for wanted in both {
            assert!(cache.contains(&wanted) && cache.keys().any(|found| found == wanted));
            assert!(cache.fetch(&wanted).await.expect("served").is_some(), "what is named is served");
        }
        drop(leases);
        finish(cache, reactor).await;
    });
}

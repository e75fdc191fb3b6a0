//! What a close writes.

use kvhoist::{Cache, Config, DiskPath, internals::io::FileId};
use kvhoist_simulation::sim::{self, Reactor, Sim, Simulated, World};

use crate::scene::*;

/// Four pages of records.
fn four_pages() -> Config {
    config().disks(vec![DiskPath::with_blocks("simulated", 128)])
}

/// Opens the store that was closed on `disk`.
async fn open_again(disk: &Sim) -> (Cache, Reactor, Sim) {
    let world = World::new(4, vec![disk.contents(FileId(0))]);
    let Simulated { cache, reactor } = sim::open(four_pages(), &world).await.expect("a closed store opens");
    (cache, reactor, world.storage)
}

/// Closes the cache; returns how many pages of records that wrote.
async fn close(cache: Cache, reactor: Reactor) -> u64 {
    let before = cache.stats().record_writes;
    cache.close().await.expect("a sound disk");
    reactor.ended().await;
    cache.stats().record_writes - before
}

#[test]
fn a_close_writes_the_records_of_blocks_that_were_used_and_no_others() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(four_pages()).await;
        for n in 0..100 {
            store(&cache, n).await.expect("a sound disk");
        }
        close(cache, reactor).await;

        let (cache, reactor, disk) = open_again(&disk).await;
        assert_eq!(close(cache, reactor).await, 0, "nothing was used");

        let (cache, reactor, disk) = open_again(&disk).await;
        assert!(fetch(&cache, 0).await.expect("served"));
        assert_eq!(close(cache, reactor).await, 1, "one block was used");

        // The block that was used in the last run but one is still the last to be evicted.
        let (cache, reactor, _) = open_again(&disk).await;
        for n in 100..227 {
            store(&cache, n).await.expect("a sound disk");
        }
        assert_eq!(cache.stats().tier(kvhoist::Tier::Disk).resident, 128);
        for n in 1..100 {
            assert!(!fetch(&cache, n).await.expect("served"), "block {n} was used before block 0");
        }
        assert!(fetch(&cache, 0).await.expect("served"), "the last one that was used");
        finish(cache, reactor).await;
    });
}

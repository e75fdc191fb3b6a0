//! What leases hold back: the blocks that they are on, and no others.

mod scene;

use kvhoist::{Cache, DiskPath, Error};
use kvhoist_simulation::sim;
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

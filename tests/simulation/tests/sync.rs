//! What `sync` has answered for survives a power cut, whatever else was writing.

use std::time::Duration;

use kvhoist::{
    BlockKey, Config, DiskPath, Error, Tier, WritePolicy,
    internals::{block::OpKind, seams::locks_taken},
};
use kvhoist_simulation::sim::{self, Fault, FaultRates};

fn config(waiters_max: u32) -> Config {
    Config::default()
        .block_bytes(4096)
        .host_blocks(4)
        .disks(vec![DiskPath::with_blocks("simulated", 8)])
        .write_policy(WritePolicy::WriteBack)
        .waiters_max(waiters_max)
        // The second block of four is one too many: it is written back at once.
        .low_watermark(0.75)
        .high_watermark(1.0)
}

/// Stores blocks, syncs while write-backs are in flight, and cuts the power: what sync said, and how many are left.
fn stored_synced_and_cut(blocks: u8, waiters_max: u32) -> (Result<(), Error>, usize) {
    let world = sim::World::new(3, sim::blank_files(&config(waiters_max)));
    let synced = sim::block_on(async {
        let sim::Simulated { cache, .. } = sim::open(config(waiters_max), &world).await.expect("a new store");
        for block in 0..blocks {
            cache.store(&BlockKey::new([block; 32]), None, &[block; 4096]).await.expect("stored");
        }
        cache.sync().await
    });
    let mut after = sim::World::new(4, world.storage.crash());
    after.seed = world.seed;
    let left = sim::block_on(async {
        let sim::Simulated { cache, .. } = sim::open(config(waiters_max), &after).await.expect("a whole store");
        let mut left = 0;
        for block in 0..blocks {
            let key = BlockKey::new([block; 32]);
            let found = tokio::time::timeout(Duration::from_secs(60), cache.fetch(&key)).await;
            let found = found.expect("fetched in time");
            left += usize::from(found.expect("no read fails").is_some());
        }
        left
    });
    (synced, left)
}

#[test]
fn a_sync_writes_every_dirty_block_however_many_there_are() {
    const BLOCKS: u16 = 700;
    let config = config(65_536).host_blocks(1024).disks(vec![DiskPath::with_blocks("simulated", 1024)]);
    let config = config.low_watermark(0.1).high_watermark(0.2);
    let world = sim::World::new(3, sim::blank_files(&config));
    sim::block_on(async {
        let sim::Simulated { cache, .. } = sim::open(config, &world).await.expect("a new store");
        for block in 0..BLOCKS {
            let mut key = [7; 32];
            key[..2].copy_from_slice(&block.to_le_bytes());
            cache.store(&BlockKey::new(key), None, &[1; 4096]).await.expect("stored");
        }
        assert_eq!(cache.stats().dirty, u64::from(BLOCKS), "host memory has room for all");
        cache.sync().await.expect("nothing goes wrong");
        let stats = cache.stats();
        assert_eq!((stats.dirty, stats.tier(Tier::Disk).resident), (0, u64::from(BLOCKS)));
    });
}

/// The release says that a block need not be written, but the sync began while the block was there.
#[test]
fn a_block_that_is_released_after_a_sync_began_stays_until_the_sync_has_written_it() {
    const BLOCKS: u8 = 80;
    let config = config(65_536).host_blocks(u32::from(BLOCKS)).disks(vec![DiskPath::with_blocks("simulated", 256)]);
    let config = config.low_watermark(0.0).high_watermark(0.0);
    let world = sim::World::new(3, sim::blank_files(&config));
    let key = |block| BlockKey::new([block; 32]);
    sim::block_on(async {
        let sim::Simulated { cache, reactor } = sim::open(config.clone(), &world).await.expect("a new store");
        for block in 0..BLOCKS {
            cache.store(&key(block), None, &[block; 4096]).await.expect("stored");
        }
        assert_eq!(cache.stats().dirty, u64::from(BLOCKS), "nothing is written before the sync");
        world.storage.set_rates(FaultRates { stall: 1.0, ..FaultRates::default() });
        let syncing = tokio::task::spawn_local({
            let cache = cache.clone();
            async move { cache.sync().await }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        // The sync writes in the order of keys, and has not come to these.
        for block in BLOCKS - 8..BLOCKS {
            assert_eq!(cache.release(&[key(block)]), 1);
        }
        let storing = tokio::task::spawn_local({
            let cache = cache.clone();
            async move { cache.store(&key(200), None, &[200; 4096]).await }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        world.storage.set_rates(FaultRates::default());
        world.storage.release();
        syncing.await.expect("no panic").expect("a sound disk");
        storing.await.expect("no panic").expect("there is room by then");
        assert_eq!(cache.stats().released_unwritten, 0);
        let cut = sim::World::new(4, world.storage.crash());
        let sim::Simulated { cache: after, .. } = sim::open(config, &cut).await.expect("a whole store");
        for block in 0..BLOCKS {
            assert!(after.contains(&key(block)), "block {block} was synced");
        }
        cache.close().await.expect("closed");
        reactor.ended().await;
    });
}

/// A sync spares released blocks, which are written for a store that waits for a slot.
#[test]
fn a_store_does_not_wait_for_a_sync_because_blocks_were_released() {
    // The sync writes so many at a time.
    const FIRST: u8 = 64;
    const BLOCKS: u8 = 80;
    let config = config(65_536).host_blocks(u32::from(BLOCKS) + 1).disks(vec![DiskPath::with_blocks("simulated", 256)]);
    let config = config.low_watermark(0.0).high_watermark(0.0);
    let world = sim::World::new(5, sim::blank_files(&config));
    let key = |block| BlockKey::new([block; 32]);
    sim::block_on(async {
        let sim::Simulated { cache, reactor } = sim::open(config.clone(), &world).await.expect("a new store");
        let mut leases = Vec::new();
        for block in 0..BLOCKS {
            cache.store(&key(block), None, &[block; 4096]).await.expect("stored");
            if block < FIRST {
                leases.push(cache.fetch(&key(block)).await.expect("fetched"));
            }
        }
        world.storage.script_next(OpKind::Write, Fault::Stall);
        let syncing = tokio::task::spawn_local({
            let cache = cache.clone();
            async move { cache.sync().await }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        for block in FIRST..BLOCKS {
            assert_eq!(cache.release(&[key(block)]), 1);
        }
        for block in 200..204 {
            let (key, bytes) = (key(block), [block; 4096]);
            let stored = tokio::time::timeout(Duration::from_secs(1), cache.store(&key, None, &bytes)).await;
            stored.expect("not behind the sync").expect("stored");
            cache.release(&[key]);
        }
        assert!(!syncing.is_finished());
        assert_eq!(cache.stats().released_unwritten, 0);
        world.storage.release();
        syncing.await.expect("no panic").expect("a sound disk");
        drop(leases);
        cache.close().await.expect("closed");
        reactor.ended().await;
    });
}

#[test]
fn blocks_that_are_being_written_back_are_synced_too() {
    for waiters_max in [1, 2, 65_536] {
        for blocks in 1..=4 {
            let (synced, left) = stored_synced_and_cut(blocks, waiters_max);
            synced.expect("nothing went wrong");
            assert_eq!(left, usize::from(blocks), "{waiters_max} waiters at most");
        }
    }
}

/// Looks at the locks that the reactor takes between two turns of another task, one for each block.
#[test]
fn a_sync_lets_others_run_though_its_blocks_need_no_write_any_more() {
    const BLOCKS: u16 = 700;
    let config = config(65_536).host_blocks(1024).disks(vec![DiskPath::with_blocks("simulated", 1024)]);
    let config = config.low_watermark(0.0).high_watermark(0.0);
    let world = sim::World::new(3, sim::blank_files(&config));
    let key = |block: u16| {
        let mut key = [7; 32];
        key[..2].copy_from_slice(&block.to_be_bytes());
        BlockKey::new(key)
    };
    sim::block_on(async {
        let sim::Simulated { cache, reactor } = sim::open(config, &world).await.expect("a new store");
        for block in 0..BLOCKS {
            cache.store(&key(block), None, &[1; 4096]).await.expect("stored");
        }
        world.storage.script_next(OpKind::Write, Fault::Stall);
        let syncing = tokio::task::spawn_local({
            let cache = cache.clone();
            async move { cache.sync().await }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        // It has not come to these.
        for block in 100..BLOCKS {
            cache.remove(&key(block)).await.expect("removed");
        }
        assert!(!syncing.is_finished());
        world.storage.release();
        let mut locks_max = 0;
        while !syncing.is_finished() {
            let before = locks_taken();
            tokio::time::advance(Duration::from_millis(1)).await;
            locks_max = locks_max.max(locks_taken() - before);
        }
        syncing.await.expect("no panic").expect("a sound disk");
        assert!(locks_max < 200, "{locks_max} locks in one turn");
        cache.close().await.expect("closed");
        reactor.ended().await;
    });
}

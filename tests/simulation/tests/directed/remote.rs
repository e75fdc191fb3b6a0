//! Blocks beyond the node.

use std::{sync::Arc, time::Duration};

use kvhoist::{BlockKey, Cache, Config, RemotePolicy, internals::seams::locks_taken};
use kvhoist_simulation::sim::{self, RemoteRates, SimRemote};

use super::scene::{BLOCK_BYTES, config, finish, open};

const BLOCKS: u64 = 256;

fn key(n: u64) -> BlockKey {
    let mut bytes = [1; 32];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    BlockKey::new(bytes)
}

/// Settings of a cache over this store that has room for all blocks.
fn settings(store: &Arc<SimRemote>, policy: RemotePolicy) -> Config {
    let config = config().host_blocks(2 * BLOCKS as u32).disks(Vec::new()).deadline_ms(60_000);
    config.remote_store(Arc::clone(store) as _).remote_policy(policy)
}

/// Stores a chain, and waits until the remote store has it.
async fn write(store: &Arc<SimRemote>) {
    let (cache, reactor, _) = open(settings(store, RemotePolicy::Stored)).await;
    for n in 0..BLOCKS {
        let parent = n.checked_sub(1).map(key);
        cache.store(&key(n), parent.as_ref(), &vec![n as u8; BLOCK_BYTES]).await.expect("stored");
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    finish(cache, reactor).await;
}

/// The most locks of one turn until all blocks have come.
async fn locks_until_all_came(cache: &Cache) -> u64 {
    let mut locks_max = 0;
    while cache.len() < BLOCKS as usize {
        let before = locks_taken();
        tokio::time::advance(Duration::from_micros(100)).await;
        locks_max = locks_max.max(locks_taken() - before);
    }
    locks_max
}

/// The reactor takes slots for the blocks of one read, and makes them visible, in turns.
#[test]
fn a_read_of_many_blocks_lets_others_run() {
    sim::block_on(async {
        let object_bytes = BLOCKS * BLOCK_BYTES as u64;
        let store = SimRemote::new(1, RemoteRates::default(), Duration::from_millis(1), object_bytes);
        write(&store).await;
        let (cache, reactor, _) = open(settings(&store, RemotePolicy::Never)).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let requests = store.counts().requests;
        let keys: Vec<BlockKey> = (0..BLOCKS).map(key).collect();
        assert_eq!(cache.prefetch(&keys).expect("begun"), keys.len());
        let locks_max = locks_until_all_came(&cache).await;
        assert!(store.counts().requests - requests < 8, "few reads bring them");
        assert!(locks_max < 64, "{locks_max} locks in one turn");
        finish(cache, reactor).await;
    });
}

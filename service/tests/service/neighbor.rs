//! A client that works beside what a test does to others.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use kvhoist::block_on;

use crate::{
    common::Rng,
    node::{HANG, Node},
    pool_client::{BLOCKS, POOL_BLOCKS, PoolClient, is_away},
};

/// A client in a thread of this process that loads and stores until `end`. Every load finds all blocks, with their
/// bytes.
pub struct Neighbor {
    stop: Arc<AtomicBool>,
    loads: Arc<AtomicU64>,
    thread: thread::JoinHandle<()>,
}

impl Neighbor {
    /// Where `may_be_away`, calls that fail because the service is away are repeated; otherwise every error fails.
    pub fn start(socket: PathBuf, seed: u64, may_be_away: bool) -> Self {
        let (stop, loads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (told, counted) = (Arc::clone(&stop), Arc::clone(&loads));
        let thread = thread::spawn(move || {
            let pool_client = PoolClient::new(&socket);
            let mut rng = Rng(seed);
            while !told.load(Ordering::Relaxed) {
                let count = 1 + rng.below(POOL_BLOCKS);
                let first = rng.below(BLOCKS - count);
                let result = match rng.below(4) {
                    0 => pool_client.store(first, count).map(drop),
                    _ => pool_client.load(first, count).map(|there| {
                        assert!(there.into_iter().all(|there| there), "a block that was stored is gone");
                        counted.fetch_add(1, Ordering::Relaxed);
                    }),
                };
                if let Err(error) = result {
                    assert!(may_be_away && is_away(&error), "{error}");
                }
            }
            block_on(pool_client.client.unregister(&pool_client.region)).expect("unregistered");
        });
        Neighbor { stop, loads, thread }
    }

    /// Waits for a load that ends after now.
    pub fn wait_for_a_load(&self) {
        let (before, hang) = (self.loads.load(Ordering::Relaxed), Instant::now() + HANG);
        // One may be under way that began earlier.
        while self.loads.load(Ordering::Relaxed) < before + 2 {
            assert!(!self.thread.is_finished() && Instant::now() < hang, "the neighbor loads nothing");
            thread::yield_now();
        }
    }

    pub fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("right bytes, and no error");
    }
}

/// A service whose space has all blocks.
pub fn filled() -> Node {
    let node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    for first in (0..BLOCKS).step_by(POOL_BLOCKS as usize) {
        pool_client.store(first, POOL_BLOCKS).expect("a service").into_iter().for_each(|result| {
            assert!(result.expect("stored"));
        });
    }
    block_on(pool_client.client.close()).expect("closed");
    node.wait_for_clients(0);
    node
}

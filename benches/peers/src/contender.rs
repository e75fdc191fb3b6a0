//! What takes part in the comparison, and how it is driven.

use std::{
    fmt,
    future::Future,
    io,
    ops::AddAssign,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use tokio::task::JoinSet;

use kvhoist_bench_kit::measure::{Sample, Stopwatch};

/// Where a block was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// On disk: what is to be measured.
    Disk,
    /// In memory: an accident of random keys; not counted as bytes read.
    Memory,
    /// Nowhere, though it was stored and there is room for it.
    Lost,
}

/// A cache whose reads from disk are measured.
///
/// To add one: implement this beside [`crate::foyer_cache`], name it in [`crate::NAMES`], and open it in
/// [`crate::child::serve`].
pub trait Contender: Send + Sync + 'static {
    /// The name shown in tables.
    fn name(&self) -> &'static str;

    /// Stores the blocks of keys `0..blocks`, stamped by the kit's `pattern`, so that reads find them on disk.
    ///
    /// Resolves when nothing is left to be written, to the number of blocks that were lost when they were stored as
    /// fast as the cache's own interface takes them. Lost blocks must then be stored again: reads are not for free.
    fn prepare(&self, blocks: u64) -> impl Future<Output = io::Result<u64>> + Send;

    /// Reads one block through the cache's usual interface, and verifies its stamps.
    fn read(&self, key: u64) -> impl Future<Output = io::Result<Found>> + Send;
}

/// What a round, or many, found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Reads served from disk.
    pub disk: u64,
    /// Reads served from memory.
    pub memory: u64,
    /// Reads of blocks that had been there.
    pub lost: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.disk += other.disk;
        self.memory += other.memory;
        self.lost += other.lost;
    }
}

/// What became of one contender's blocks, over all rounds and fills.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// What its reads found, warm-up included.
    pub found: Tally,
    /// Blocks stored as fast as its interface takes them.
    pub filled: u64,
    /// How many of those were then missing.
    pub lost_in_fill: u64,
}

impl AddAssign for Outcome {
    fn add_assign(&mut self, other: Outcome) {
        self.found += other.found;
        self.filled += other.filled;
        self.lost_in_fill += other.lost_in_fill;
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { disk, memory, lost } = self.found;
        write!(f, "read {disk} from disk, {memory} from memory, {lost} lost; ")?;
        write!(f, "{} of {} lost while filling", self.lost_in_fill, self.filled)
    }
}

/// Reads `keys` with `depth` reads in flight, and measures it.
pub async fn drive<C: Contender>(
    contender: &Arc<C>,
    depth: usize,
    keys: Vec<u64>,
    block_bytes: usize,
) -> io::Result<(Sample, Tally)> {
    let keys = Arc::new(keys);
    let next = Arc::new(AtomicUsize::new(0));
    let found: Arc<[AtomicU64; 3]> = Arc::default();
    let watch = Stopwatch::start();
    let mut workers = JoinSet::new();
    for _ in 0..depth {
        let (contender, keys, next, found) = (contender.clone(), keys.clone(), next.clone(), found.clone());
        workers.spawn(async move {
            while let Some(&key) = keys.get(next.fetch_add(1, Relaxed)) {
                found[contender.read(key).await? as usize].fetch_add(1, Relaxed);
            }
            io::Result::Ok(())
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.map_err(io::Error::other)??;
    }
    let count = |place: Found| found[place as usize].load(Relaxed);
    let tally = Tally { disk: count(Found::Disk), memory: count(Found::Memory), lost: count(Found::Lost) };
    Ok((watch.stop(tally.disk * block_bytes as u64), tally))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Finds even keys on disk, multiples of four in memory, and fails at 99.
    struct Fake;

    impl Contender for Fake {
        fn name(&self) -> &'static str {
            "fake"
        }

        async fn prepare(&self, _blocks: u64) -> io::Result<u64> {
            Ok(0)
        }

        async fn read(&self, key: u64) -> io::Result<Found> {
            tokio::task::yield_now().await;
            match key {
                99 => Err(io::Error::other("key 99")),
                _ if key.is_multiple_of(4) => Ok(Found::Memory),
                _ if key.is_multiple_of(2) => Ok(Found::Disk),
                _ => Ok(Found::Lost),
            }
        }
    }

    #[tokio::test]
    async fn every_key_is_read_once_and_only_disk_reads_count_as_bytes() {
        for depth in [1, 7, 200] {
            let (sample, tally) = drive(&Arc::new(Fake), depth, (0..80).collect(), 4096).await.expect("no key 99");
            assert_eq!(tally, Tally { disk: 20, memory: 20, lost: 40 }, "depth {depth}");
            assert_eq!(sample.bytes, 20 * 4096);
        }
    }

    #[tokio::test]
    async fn a_failed_read_fails_the_round() {
        assert!(drive(&Arc::new(Fake), 4, (0..100).collect(), 4096).await.is_err());
    }
}

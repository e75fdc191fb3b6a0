//! foyer's hybrid cache: one block of memory, the rest on disk.

use std::{io, path::Path, sync::Arc};

use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder, HybridCachePolicy,
    IoEngineConfig, PsyncIoEngineConfig, RecoverMode, Source, UringIoEngineConfig,
};
use kvhoist_bench_kit::pattern::{stamp, verify};

use crate::contender::{Contender, Found};

/// How many times lost blocks are stored again before giving up.
const REFILLS_MAX: usize = 3;

/// Bytes stored between two waits when lost blocks are stored again: below every queue's limit.
const REFILL_BYTES: usize = 8 << 20;

/// Which of foyer's I/O engines serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoKind {
    /// `pread` on tokio's blocking threads.
    Psync,
    /// A thread that polls a ring.
    Uring,
}

/// foyer as a contender.
pub struct FoyerCache {
    cache: HybridCache<u64, Vec<u8>>,
    io: IoKind,
    block_bytes: usize,
}

impl FoyerCache {
    /// Opens an empty cache in `dir` with room for twice `blocks`, so that nothing has to be evicted.
    ///
    /// Direct I/O, no compression, no recovery. Everything not named here is foyer's default, except for two flushers
    /// and larger write buffers, so that fewer blocks are lost when they are stored at full speed.
    ///
    /// `io` is the engine with the reads in flight.
    pub async fn open(
        dir: &Path,
        (io, depth): (IoKind, usize),
        block_bytes: usize,
        blocks: u64,
    ) -> io::Result<FoyerCache> {
        let capacity = (2 * blocks as usize * block_bytes).max(1 << 30);
        let device = FsDeviceBuilder::new(dir).with_capacity(capacity).with_direct(true).build().map_err(other)?;
        let engine = BlockEngineConfig::new(device)
            .with_flushers(2)
            .with_buffer_pool_size(128 << 20)
            .with_submit_queue_size_threshold(256 << 20);
        let io_config: Box<dyn IoEngineConfig> = match io {
            IoKind::Psync => PsyncIoEngineConfig::new().boxed(),
            IoKind::Uring => UringIoEngineConfig::new().with_io_depth(depth.max(64)).boxed(),
        };
        let cache = HybridCacheBuilder::new()
            .with_policy(HybridCachePolicy::WriteOnInsertion)
            .with_flush_on_close(false)
            .memory(1) // one block: the default weight of an entry is 1
            .with_shards(1)
            .storage()
            .with_io_engine_config(io_config)
            .with_engine_config(engine)
            .with_recover_mode(RecoverMode::None)
            .build()
            .await
            .map_err(other)?;
        Ok(FoyerCache { cache, io, block_bytes })
    }

    fn store(&self, key: u64) {
        let mut block = vec![0; self.block_bytes];
        stamp(&mut block, key);
        self.cache.insert(key, block);
    }

    /// Keys that the disk does not have, once all writes have ended.
    async fn missing(&self, keys: impl IntoIterator<Item = u64>) -> Vec<u64> {
        self.cache.storage().wait().await;
        keys.into_iter().filter(|key| !self.cache.storage().may_contains(key)).collect()
    }
}

impl Contender for FoyerCache {
    fn name(&self) -> &'static str {
        match self.io {
            IoKind::Psync => "foyer-psync",
            IoKind::Uring => "foyer-uring",
        }
    }

    async fn prepare(&self, blocks: u64) -> io::Result<u64> {
        for key in 0..blocks {
            self.store(key);
            tokio::task::yield_now().await;
        }
        let mut missing = self.missing(0..blocks).await;
        let lost = missing.len() as u64;
        for _ in 0..REFILLS_MAX {
            for keys in missing.chunks((REFILL_BYTES / self.block_bytes).max(1)) {
                keys.iter().for_each(|&key| self.store(key));
                self.cache.storage().wait().await;
            }
            missing = self.missing(missing).await;
        }
        match missing.len() {
            0 => Ok(lost),
            left => Err(io::Error::other(format!(
                "{left} of {blocks} blocks still missing, stored {REFILLS_MAX} times again"
            ))),
        }
    }

    async fn read(&self, key: u64) -> io::Result<Found> {
        let Some(entry) = self.cache.get(&key).await.map_err(other)? else { return Ok(Found::Lost) };
        if entry.value().len() != self.block_bytes {
            let what = format!("block {key}: found {} bytes, expected {}", entry.value().len(), self.block_bytes);
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        verify(entry.value(), key)?;
        Ok(if entry.source() == Source::Disk { Found::Disk } else { Found::Memory })
    }
}

fn other(error: foyer::Error) -> io::Error {
    io::Error::other(error)
}

/// Opens foyer in a directory of its own.
pub async fn open(dir: &Path, io: (IoKind, usize), block_bytes: usize, blocks: u64) -> io::Result<Arc<FoyerCache>> {
    Ok(Arc::new(FoyerCache::open(dir, io, block_bytes, blocks).await?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvhoist_bench_kit::pattern::shuffled;

    use crate::contender::drive;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn every_block_is_read_back_from_disk() {
        for io in [IoKind::Psync, IoKind::Uring] {
            let dir = tempfile::tempdir_in(concat!(env!("CARGO_MANIFEST_DIR"), "/target")).expect("a directory");
            let cache = open(dir.path(), io, 128 << 10, 256).await.expect("opens");
            cache.prepare(256).await.expect("every block stored in the end");
            let (_, tally) = drive(&cache, 8, shuffled(1, 256).collect(), 128 << 10).await.expect("whole blocks");
            assert_eq!(tally.lost, 0, "{io:?}: {tally:?}");
            assert!(tally.disk > 240, "{io:?}: {tally:?}");
        }
    }
}

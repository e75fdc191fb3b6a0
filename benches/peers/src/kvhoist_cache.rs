//! kvhoist as a contender: as little host memory as the reads in flight need, so that reads come from disk.

use std::{io, path::Path, sync::Arc};

use kvhoist::{BlockKey, Cache, Config, DiskPath, Route};
use kvhoist_bench_kit::pattern;
use tokio::task::JoinSet;

use crate::contender::{Contender, Found};

/// Stores in flight while preparing.
const STORES: u64 = 32;

/// Fewest host slots.
const HOST_BLOCKS_MIN: u32 = 64;

/// A cache of `blocks` blocks on disk.
pub struct KvhoistCache(Cache);

/// Opens it in `dir`, for `depth` reads in flight: with twice as many host slots, far below the blocks stored.
pub async fn open(dir: &Path, depth: usize, block_bytes: usize, blocks: u64) -> io::Result<Arc<KvhoistCache>> {
    let blocks = u32::try_from(blocks).map_err(io::Error::other)?;
    let disks = vec![DiskPath::with_blocks(dir, blocks)];
    let host_blocks = HOST_BLOCKS_MIN.max(2 * depth as u32);
    let config = Config::default().block_bytes(block_bytes).host_blocks(host_blocks).disks(disks);
    Ok(Arc::new(KvhoistCache(Cache::open(config).await.map_err(io::Error::other)?)))
}

fn key_of(n: u64) -> BlockKey {
    let mut bytes = [0; 32];
    let mut rng = pattern::Rng::new(n);
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.next_u64().to_le_bytes()));
    BlockKey::new(bytes)
}

async fn store(cache: &Cache, n: u64) -> io::Result<()> {
    let mut block = cache.reserve_for_overwrite().await.map_err(io::Error::other)?;
    pattern::stamp(&mut block, n);
    block.commit(&key_of(n), None).await.map_err(io::Error::other)
}

impl Contender for KvhoistCache {
    fn name(&self) -> &'static str {
        "kvhoist"
    }

    async fn prepare(&self, blocks: u64) -> io::Result<u64> {
        let mut stores = JoinSet::new();
        for lane in 0..STORES {
            let cache = self.0.clone();
            stores.spawn(async move {
                for n in (lane..blocks).step_by(STORES as usize) {
                    store(&cache, n).await?;
                }
                io::Result::Ok(())
            });
        }
        while let Some(stored) = stores.join_next().await {
            stored.map_err(io::Error::other)??;
        }
        self.0.sync().await.map_err(io::Error::other)?;
        Ok((0..blocks).filter(|n| self.0.match_len(&[key_of(*n)]) == 0).count() as u64)
    }

    async fn read(&self, key: u64) -> io::Result<Found> {
        let Some(lease) = self.0.fetch(&key_of(key)).await.map_err(io::Error::other)? else {
            return Ok(Found::Lost);
        };
        pattern::verify(&lease, key)?;
        Ok(if lease.route() == Route::DiskToHost { Found::Disk } else { Found::Memory })
    }
}

//! The routes of blocks through the cache as contenders, each beside the bare ring loop of the same block size and
//! depth on the same places of the same file, in interleaved rounds: where a file lies can decide more than who moves
//! it.
//!
//! Every route verifies its data: what is read in every round, what was written or lies on the device after
//! them.

use std::{
    cell::{Cell, RefCell},
    collections::HashSet,
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
};

use kvhoist::{
    BlockKey, Cache, Config, DeviceKind, DiskPath, Segment, Tier, block_on, internals::disk::format::stripe::Stripe,
};
use tempfile::TempDir;

use crate::{
    cuda,
    drive::{check_on_device, each, fetch_stamped, key, measured, other, run_local, store_stamped, to_device},
    measure::{Entrant, Sample, Series, interleave_told},
    pattern::{shuffled, stamp, verify},
    peers::{self, Places},
    pool::{Home, Pool},
    ring::{BareRing, Op, Setup},
};
pub use crate::{report::Report, way::Way};

/// What is measured, and where.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Directory of the store and of the bare loop's file; both are gone afterwards.
    pub dir: PathBuf,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Blocks in flight.
    pub depth: usize,
    /// Bytes that a round moves: whole blocks, at least as many as are in flight.
    pub file_bytes: u64,
    /// Measured rounds.
    pub rounds: u64,
    /// [`Config::spin_us`] of the cache.
    pub spin_us: u32,
}

/// Blocks of one call where a route takes many: pages of one of SGLang's calls.
pub const CALL_BLOCKS: usize = 128;

/// A cold run needs this many times as many blocks as are in flight: what the round before left in the slots of host
/// and device, twice as many each, is read last, and the blocks before it must have pushed it out.
pub const COLD_DEPTHS: usize = 8;

/// Of a hundred blocks of a round as many must come from disk for it to count as cold.
const FROM_DISK_PERCENT_MIN: u64 = 95;

impl Shape {
    fn blocks(&self) -> u64 {
        self.file_bytes / self.block_bytes as u64
    }

    fn round_bytes(&self) -> u64 {
        self.blocks() * self.block_bytes as u64
    }

    /// Measures a route; `told` is called after every round of every contender, and its error ends the run.
    ///
    /// # Errors
    /// What failed, also a block with wrong bytes.
    pub fn measure(&self, way: Way, told: &mut dyn FnMut() -> io::Result<()>) -> io::Result<Report> {
        if self.blocks() < self.depth as u64 || !self.block_bytes.is_multiple_of(4096) {
            let what = format!("{} bytes in blocks of {}", self.file_bytes, self.block_bytes);
            return Err(other(format!("found {what}, expected as many as are in flight, of a multiple of 4096 bytes")));
        }
        let world = World::open(self, way)?;
        let (series, record_writes, from_disk) = match way {
            Way::DiskToHost | Way::DiskToDevice(_) | Way::DiskToPool => {
                let (series, from_disk) = world.reads(way, told)?;
                (series, None, Some(from_disk))
            }
            Way::HostToDisk | Way::DeviceToDisk(_) | Way::PoolToDisk => {
                let (series, pages) = world.writes(way, told)?;
                (series, Some(pages), None)
            }
        };
        block_on(world.cache.close()).map_err(other)?;
        let (dir, kib, depth) = (self.dir.display(), self.block_bytes >> 10, self.depth);
        let title = format!("{}, {dir}: {kib} KiB, {depth} in flight", way.name());
        Ok(Report { title, series, record_writes, from_disk })
    }
}

/// A cache over a store that goes with it.
struct World<'a> {
    shape: &'a Shape,
    cache: Cache,
    settings: Config,
    scratch: TempDir,
}

impl<'a> World<'a> {
    fn open(shape: &'a Shape, way: Way) -> io::Result<Self> {
        std::fs::create_dir_all(&shape.dir)?;
        let scratch = tempfile::tempdir_in(&shape.dir)?;
        let slots = shape.depth as u32 * 2;
        let settings = Config::default()
            .block_bytes(shape.block_bytes)
            .host_blocks(slots)
            .device_blocks(if way.device().is_some() { slots } else { 0 })
            .device(way.device().unwrap_or_default())
            .disks(vec![DiskPath::with_blocks(scratch.path(), shape.blocks() as u32)])
            .bypass_host(way.bypasses_host())
            .spin_us(shape.spin_us);
        let cache = block_on(Cache::open(settings.clone())).map_err(other)?;
        Ok(World { shape, cache, settings, scratch })
    }

    /// Runs `task` for every block of `order`, as many at a time as the shape wants.
    fn each<F: Future<Output = io::Result<()>> + 'static>(
        &self,
        order: impl Iterator<Item = u64> + 'static,
        task: impl Fn(Cache, u64) -> F + 'static,
    ) -> io::Result<()> {
        let cache = self.cache.clone();
        run_local(each(order, self.shape.depth, move |n| task(cache.clone(), n)))
    }

    /// Runs `call` for the blocks of `order`, [`CALL_BLOCKS`] at a time and one after the other.
    fn calls(
        &self,
        order: impl Iterator<Item = u64>,
        pool: &Pool,
        call: impl AsyncFn(&[BlockKey], &[Vec<Segment>]) -> Result<Vec<Result<bool, kvhoist::Error>>, kvhoist::Error>,
    ) -> io::Result<()> {
        let (order, blocks): (Vec<_>, _) = (order.collect(), self.shape.blocks());
        for part in order.chunks(CALL_BLOCKS) {
            let keys: Vec<_> = part.iter().map(|&n| key(n)).collect();
            let places: Vec<_> = part.iter().map(|&n| pool.place()(n % blocks)).collect();
            let results = block_on(call(&keys, &places)).map_err(other)?;
            results.into_iter().try_for_each(|result| match result {
                Ok(true) => Ok(()),
                Ok(false) => Err(other("a block is missing")),
                Err(error) => Err(other(error)),
            })?;
        }
        Ok(())
    }

    /// A pool in host memory, filled and stored from there directly: block `n` holds the stamps of `n`.
    fn stored_pool(&self, home: Home) -> io::Result<Pool> {
        let blocks = self.shape.blocks();
        let mut pool = Pool::open(&self.cache, blocks, self.shape.block_bytes, home)?;
        (0..blocks).for_each(|n| stamp(pool.block_mut(n), n));
        let store = async |keys: &[BlockKey], places: &[Vec<Segment>]| self.cache.store_from(keys, None, places).await;
        self.calls(0..blocks, &pool, store)?;
        Ok(pool)
    }

    /// A pool on a device, filled by the cache: block `n` holds the stamps of `n`.
    fn filled_pool(&self, home: Home) -> io::Result<Pool> {
        let pool = Pool::open(&self.cache, self.shape.blocks(), self.shape.block_bytes, home)?;
        let place = pool.place();
        self.each(0..self.shape.blocks(), move |cache, n| {
            let place = place(n);
            async move {
                store_stamped(cache.clone(), n).await?;
                let loaded = cache.load_into(&[key(n)], &[place]).await.map_err(other)?;
                loaded.into_iter().try_for_each(|result| result.map(drop)).map_err(other)
            }
        })?;
        Ok(pool)
    }

    /// The store's file, and where its blocks begin.
    fn data_file(&self) -> io::Result<(File, u64)> {
        let path = self.scratch.path().join("kvhoist.store");
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path)?;
        Ok((file, Stripe::new(&self.settings).locate(0).1))
    }

    /// Blocks that have come from disk since the cache was opened, whatever their route.
    fn blocks_read(&self) -> u64 {
        self.cache.stats().tier(Tier::Disk).bytes_out / self.shape.block_bytes as u64
    }

    fn check_cold(&self, from_disk: u64) -> io::Result<()> {
        let blocks = self.shape.blocks();
        if from_disk * 100 >= blocks * FROM_DISK_PERCENT_MIN {
            return Ok(());
        }
        let (depth, cold) = (self.shape.depth, self.shape.depth * COLD_DEPTHS);
        Err(other(format!(
            "found {from_disk} of {blocks} blocks read from disk, the others were still in memory; expected all of \
             them: move {cold} blocks at least with {depth} in flight"
        )))
    }

    /// Series, and the share of the cache's blocks that came from disk.
    fn reads(&self, way: Way, told: &mut dyn FnMut() -> io::Result<()>) -> io::Result<(Vec<Series>, f64)> {
        let Shape { block_bytes, depth, rounds, .. } = *self.shape;
        let blocks = self.shape.blocks();
        let pool = match way.pool() {
            Some(home) => Some(RefCell::new(self.stored_pool(home)?)),
            None => None,
        };
        if pool.is_none() {
            self.each(0..blocks, store_stamped)?;
        }
        block_on(self.cache.sync()).map_err(other)?;
        let (file, data_offset) = self.data_file()?;
        let ring = RefCell::new(BareRing::open(block_bytes, depth, Setup::Coop)?);
        let read = |round, on_block: &mut dyn FnMut(&[u8]) -> io::Result<()>| {
            let offsets = shuffled(round, blocks).map(|n| data_offset + n * block_bytes as u64);
            ring.borrow_mut().run(&file, Op::Read, offsets, |_, block| on_block(block))
        };
        // Which block is in which slot is the cache's business: the bare loop looks at as many places of each.
        let bare = Entrant::new("bare ring, to host", |round| read(round, &mut |block| peers::check_stamped(block)));
        let before: RefCell<Vec<u64>> = RefCell::new((0..blocks).collect());
        let counted = Cell::new((0, 0));
        let kvhoist = Entrant::new(format!("kvhoist, {}", way.name()), |round| {
            // An order of its own: the same one would find in the host's caches what the bare loop just read.
            let order = coldest_first(shuffled(!round, blocks), &before.borrow(), 4 * depth);
            before.borrow_mut().clone_from(&order);
            let (order, from_disk) = (order.into_iter(), self.blocks_read());
            let sample = self.read_round(way, pool.as_ref(), order)?;
            let from_disk = self.blocks_read() - from_disk;
            self.check_cold(from_disk)?;
            let (all_from_disk, all) = counted.get();
            counted.set((all_from_disk + from_disk, all + blocks));
            Ok(sample)
        });
        let mut entrants = vec![bare, kvhoist];
        let places = Places { file: &file, data_offset, block_bytes, blocks };
        if matches!(way, Way::DiskToHost | Way::DiskToPool) {
            // What every byte's verification costs, where nothing else is done.
            entrants.push(Entrant::new("bare ring that verifies, to host", |round| {
                read(round.rotate_left(32), &mut |block| {
                    std::hint::black_box(kvhoist::internals::checksum::checksum(block));
                    Ok(())
                })
            }));
            if depth == 1 {
                entrants.push(peers::pread_and_sum(places)?);
            }
        }
        if let Way::DiskToDevice(DeviceKind::Cuda) = way {
            entrants.push(cuda::pread_and_copy(places)?);
            #[cfg(feature = "cufile")]
            match crate::cufile::read(places) {
                Ok(peer) => entrants.push(peer),
                Err(why) => eprintln!("cuFileRead does not take part: {why}"),
            }
        }
        let series = interleave_told(rounds, &mut entrants, told)?;
        drop(entrants);
        if let Way::DiskToDevice(_) = way {
            self.each(0..blocks, check_on_device)?;
        }
        let (from_disk, all) = counted.get();
        Ok((series, from_disk as f64 / all as f64))
    }

    /// A round of the cache.
    fn read_round(&self, way: Way, pool: Option<&RefCell<Pool>>, order: std::vec::IntoIter<u64>) -> io::Result<Sample> {
        let round_bytes = self.shape.round_bytes();
        match (way, pool) {
            (_, Some(pool)) => {
                pool.borrow_mut().spoil();
                let pool = pool.borrow();
                let load = async |keys: &[BlockKey], places: &[Vec<Segment>]| self.cache.load_into(keys, places).await;
                let sample = measured(round_bytes, || self.calls(order, &pool, load))?;
                (0..self.shape.blocks()).try_for_each(|n| verify(pool.block(n), n))?;
                Ok(sample)
            }
            (Way::DiskToHost, _) => measured(round_bytes, || self.each(order, |cache, n| fetch_stamped(cache, n, n))),
            _ => measured(round_bytes, || self.each(order, to_device)),
        }
    }

    fn writes(&self, way: Way, told: &mut dyn FnMut() -> io::Result<()>) -> io::Result<(Vec<Series>, f64)> {
        let Shape { block_bytes, depth, rounds, .. } = *self.shape;
        let (blocks, round_bytes) = (self.shape.blocks(), self.shape.round_bytes());
        let pool = match way.pool() {
            Some(home @ Home::Host) => Some(self.stored_pool(home)?),
            Some(home @ Home::Device(_)) => Some(self.filled_pool(home)?),
            None => None,
        };
        if pool.is_none() {
            self.each(0..blocks, store_stamped)?;
        }
        block_on(self.cache.sync()).map_err(other)?;
        let (file, data_offset) = self.data_file()?;
        let mut ring = BareRing::open(block_bytes, depth, Setup::Coop)?;
        // What it writes over is of the round before, and never read again.
        let bare = Entrant::new("bare ring, from host", |_| {
            let offsets = (0..blocks).map(|n| data_offset + n * block_bytes as u64);
            ring.run(&file, Op::Write, offsets, |offset, block| {
                stamp(block, offset / block_bytes as u64);
                Ok(())
            })
        });
        let next = Cell::new(blocks);
        let write = || {
            let from = next.replace(next.get() + blocks);
            measured(round_bytes, || match &pool {
                None => self.each(from..from + blocks, store_stamped),
                Some(pool) if way.bypasses_host() => {
                    self.calls(from..from + blocks, pool, async |keys: &[BlockKey], places: &[Vec<Segment>]| {
                        self.cache.store_from(keys, None, places).await
                    })
                }
                Some(pool) => {
                    let place = pool.place();
                    self.each(from..from + blocks, move |cache, n| {
                        let place = place(n % blocks);
                        async move {
                            let stored = cache.store_from(&[key(n)], None, &[place]).await.map_err(other)?;
                            stored.into_iter().try_for_each(|result| result.map(drop)).map_err(other)
                        }
                    })
                }
            })
        };
        let kvhoist = Entrant::new(format!("kvhoist, {}", way.name()), |_| write());
        let series = interleave_told(rounds, &mut [bare, kvhoist], told)?;
        // The bare loop may have been the last. Every block of this round was acknowledged and nothing comes after it.
        write()?;
        let (from, of_pool) = (next.get() - blocks, pool.is_some());
        self.each(from..from + blocks, move |cache, n| fetch_stamped(cache, n, if of_pool { n % blocks } else { n }))?;
        let pages = self.cache.stats().record_writes as f64 / next.get() as f64;
        if let Some(pool) = pool {
            block_on(self.cache.unregister(&pool.region)).expect("its own region");
        }
        Ok((series, pages))
    }
}

/// The order with the last `recent` blocks of the order before it at its end.
fn coldest_first(order: impl Iterator<Item = u64>, before: &[u64], recent: usize) -> Vec<u64> {
    let recent: HashSet<u64> = before.iter().rev().take(recent).copied().collect();
    let (warm, mut cold): (Vec<u64>, Vec<u64>) = order.partition(|n| recent.contains(n));
    cold.extend(warm);
    cold
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measure(blocks: u64, depth: usize, way: Way) -> Option<io::Result<Report>> {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
        let shape = Shape {
            dir: dir.path().to_owned(),
            block_bytes: 16 << 10,
            depth,
            file_bytes: blocks * (16 << 10),
            rounds: 2,
            spin_us: 0,
        };
        let result = shape.measure(way, &mut || Ok(()));
        let missing = result.as_ref().is_err_and(|error| error.to_string().contains("io_uring"));
        if missing {
            println!("SKIPPED: no ring here");
        }
        (!missing).then_some(result)
    }

    const READS: [Way; 2] = [Way::DiskToHost, Way::DiskToDevice(DeviceKind::Simulated)];

    #[test]
    fn a_run_that_finds_its_blocks_in_memory_is_refused() {
        for way in READS {
            // As many blocks as there are slots.
            let Some(result) = measure(32, 16, way) else { return };
            let error = result.err().expect("nothing was read from disk").to_string();
            assert!(error.contains("blocks read from disk") && error.contains("128 blocks"), "{error}");
        }
    }

    #[test]
    fn a_cold_run_reads_every_block_from_disk() {
        for way in READS {
            let Some(result) = measure(16 * COLD_DEPTHS as u64, 16, way) else { return };
            assert_eq!(result.expect("measured").from_disk, Some(1.0), "{}", way.name());
        }
    }

    #[test]
    fn what_was_moved_last_comes_last() {
        assert_eq!(coldest_first([3, 0, 2, 1].into_iter(), &[1, 0, 2, 3], 2), [0, 1, 3, 2]);
    }
}

//! The routes of blocks through the cache as contenders, each beside the bare ring loop of the same block size and
//! depth on the same file (reads) or the same file system (writes), in interleaved rounds.
//!
//! Every route verifies its data: what is read within the measured rounds, what was written or lies on the device after
//! them.

use std::{
    cell::Cell,
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use kvhoist::{
    Cache, Config, DeviceKind, DiskPath, Segment, block_on,
    gpu::{DeviceBuffer, Gpu},
    tier::{device::DeviceMemory, disk::format::stripe::Stripe},
};
use tempfile::TempDir;

use crate::{
    drive::{check_on_device, each, fetch_stamped, key, measured, other, run_local, store_stamped, to_device},
    measure::{Entrant, Sample, Series, interleave_told, ratio, table},
    pattern::{shuffled, stamp},
    peers::{self, Places},
    ring::{BareRing, Op, Setup},
    scratch::{Scratch, Slab},
};

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

/// A route: where blocks come from and where they go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Cold blocks to host memory.
    DiskToHost,
    /// Cold blocks to the device.
    DiskToDevice(DeviceKind),
    /// Blocks from host memory, written through.
    HostToDisk,
    /// Blocks of a caller's pool on the device, written through.
    DeviceToDisk(DeviceKind),
}

/// What a route gave: the bare loop first, the cache second, others after them.
pub struct Report {
    /// Route, place, size and depth.
    pub title: String,
    /// Each contender's rounds.
    pub series: Vec<Series>,
    /// Record pages written per block stored, where blocks were stored.
    pub record_writes: Option<f64>,
}

impl Report {
    /// Throughput of the cache over the bare loop's: the median over rounds.
    pub fn over_bare(&self) -> f64 {
        ratio(&self.series[1], &self.series[0], Sample::mib_per_s)
    }

    /// The table as text.
    pub fn text(&self) -> String {
        let mut text = table(&self.title, &self.series);
        text += &format!("throughput of the bare loop: {:.3}; all blocks verified\n", self.over_bare());
        if let Some(pages) = self.record_writes {
            text += &format!("record pages written per block stored: {pages:.3}\n");
        }
        text
    }
}

impl Way {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Way::DiskToHost => "disk to host",
            Way::DiskToDevice(_) => "disk to device",
            Way::HostToDisk => "host to disk",
            Way::DeviceToDisk(_) => "device to disk",
        }
    }

    fn device(self) -> Option<DeviceKind> {
        match self {
            Way::DiskToDevice(device) | Way::DeviceToDisk(device) => Some(device),
            _ => None,
        }
    }
}

impl Shape {
    fn blocks(&self) -> u64 {
        self.file_bytes / self.block_bytes as u64
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
        let (series, record_writes) = match way {
            Way::DiskToHost | Way::DiskToDevice(_) => (world.reads(way, told)?, None),
            Way::HostToDisk | Way::DeviceToDisk(_) => {
                let (series, pages) = world.writes(way, told)?;
                (series, Some(pages))
            }
        };
        block_on(world.cache.close()).map_err(other)?;
        let (dir, kib, depth) = (self.dir.display(), self.block_bytes >> 10, self.depth);
        Ok(Report { title: format!("{}, {dir}: {kib} KiB, {depth} in flight", way.name()), series, record_writes })
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
        let settings = Config {
            block_bytes: shape.block_bytes,
            host_blocks: slots,
            device_blocks: if way.device().is_some() { slots } else { 0 },
            device: way.device().unwrap_or_default(),
            disks: vec![DiskPath { path: scratch.path().to_owned(), blocks: shape.blocks() as u32 }],
            spin_us: shape.spin_us,
            ..Config::default()
        };
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

    fn reads(&self, way: Way, told: &mut dyn FnMut() -> io::Result<()>) -> io::Result<Vec<Series>> {
        let Shape { block_bytes, depth, file_bytes, rounds, .. } = *self.shape;
        let blocks = self.shape.blocks();
        self.each(0..blocks, store_stamped)?;
        block_on(self.cache.sync()).map_err(other)?;
        let file = open_direct(&self.scratch.path().join("kvhoist.store"))?;
        let data_offset = Stripe::new(&self.settings).locate(0).1;
        let mut ring = BareRing::open(block_bytes, depth, Setup::Coop)?;
        let bare = Entrant::new("bare ring, to host", |round| {
            let offsets = shuffled(round, blocks).map(|n| data_offset + n * block_bytes as u64);
            // Which block is in which slot is the cache's business: the bare loop looks at as many places of each.
            ring.run(&file, Op::Read, offsets, |_, block| peers::check_stamped(block))
        });
        let kvhoist = Entrant::new(format!("kvhoist, {}", way.name()), |round| {
            // An order of its own: the same one would find in the host's caches what the bare loop just read.
            let order = shuffled(!round, blocks);
            measured(file_bytes, || match way {
                Way::DiskToHost => self.each(order, |cache, n| fetch_stamped(cache, n, n)),
                _ => self.each(order, to_device),
            })
        });
        let mut entrants = vec![bare, kvhoist];
        if let Way::DiskToDevice(DeviceKind::Cuda) = way {
            let places = Places { file: &file, data_offset, block_bytes, blocks };
            entrants.push(peers::pread_and_copy(places)?);
        }
        let series = interleave_told(rounds, &mut entrants, told)?;
        if let Way::DiskToDevice(_) = way {
            self.each(0..blocks, check_on_device)?;
        }
        Ok(series)
    }

    fn writes(&self, way: Way, told: &mut dyn FnMut() -> io::Result<()>) -> io::Result<(Vec<Series>, f64)> {
        let Shape { block_bytes, depth, file_bytes, rounds, .. } = *self.shape;
        let blocks = self.shape.blocks();
        let pool = match way.device() {
            Some(device) => Some(Pool::filled(self, device)?),
            None => None,
        };
        // Both files are written once before, so that no round pays for the file system's first allocation.
        let file = Scratch::filled(&self.shape.dir, block_bytes, blocks)?;
        if pool.is_none() {
            self.each(0..blocks, store_stamped)?;
        }
        block_on(self.cache.sync()).map_err(other)?;
        let mut ring = BareRing::open(block_bytes, depth, Setup::Coop)?;
        let bare = Entrant::new("bare ring, from host", |_| {
            let offsets = (0..blocks).map(|n| n * block_bytes as u64);
            ring.run(file.file(), Op::Write, offsets, |offset, block| {
                stamp(block, offset / block_bytes as u64);
                Ok(())
            })
        });
        let next = Cell::new(blocks);
        let kvhoist = Entrant::new(format!("kvhoist, {}", way.name()), |_| {
            let from = next.replace(next.get() + blocks);
            measured(file_bytes, || match &pool {
                None => self.each(from..from + blocks, store_stamped),
                Some(pool) => {
                    let place = pool.place();
                    self.each(from..from + blocks, move |cache, n| {
                        let place = place(n % blocks);
                        async move {
                            let stored = cache.store_from(&[key(n)], None, &place).await.map_err(other)?;
                            stored.into_iter().try_for_each(|result| result.map(drop)).map_err(other)
                        }
                    })
                }
            })
        });
        let series = interleave_told(rounds, &mut [bare, kvhoist], told)?;
        // Every block of the last round was acknowledged and nothing has come after it.
        let (from, of_pool) = (next.get() - blocks, pool.is_some());
        self.each(from..from + blocks, move |cache, n| fetch_stamped(cache, n, if of_pool { n % blocks } else { n }))?;
        let pages = self.cache.stats().record_writes as f64 / next.get() as f64;
        if let Some(pool) = pool {
            block_on(self.cache.unregister(pool.region));
        }
        Ok((series, pages))
    }
}

fn open_direct(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// A pool of the caller on the device, or in host memory that plays it: block `n` holds the stamps of `n`.
struct Pool {
    base: usize,
    block_bytes: usize,
    region: kvhoist::Region,
    _memory: Memory,
}

enum Memory {
    Device { _buffer: DeviceBuffer },
    Host { _slab: Slab },
}

impl Pool {
    fn filled(world: &World<'_>, device: DeviceKind) -> io::Result<Pool> {
        let (blocks, block_bytes) = (world.shape.blocks(), world.shape.block_bytes);
        let (base, memory) = if device == DeviceKind::Simulated {
            let mut slab = Slab::new(block_bytes, blocks as usize)?;
            (slab.block(0).as_mut_ptr(), Memory::Host { _slab: slab })
        } else {
            let buffer = Gpu::open(0).and_then(|gpu| DeviceBuffer::new(gpu, blocks as usize * block_bytes));
            let buffer = buffer.map_err(other)?;
            (buffer.base().as_ptr(), Memory::Device { _buffer: buffer })
        };
        // SAFETY: the pool outlives the cache's use of it (`unregister` in `writes`, or the end of the cache), and
        // nobody else knows it.
        let region = unsafe { world.cache.register_device(base, blocks as usize * block_bytes) }.map_err(other)?;
        let pool = Pool { base: base.expose_provenance(), block_bytes, region, _memory: memory };
        // What is in it: stamped blocks, brought there by the cache itself.
        let place = pool.place();
        world.each(0..blocks, move |cache, n| {
            let place = place(n);
            async move {
                store_stamped(cache.clone(), n).await?;
                let loaded = cache.load_into(&[key(n)], &place).await.map_err(other)?;
                loaded.into_iter().try_for_each(|result| result.map(drop)).map_err(other)
            }
        })?;
        Ok(pool)
    }

    /// Where block `n` lies, as `store_from` wants it.
    fn place(&self) -> impl Fn(u64) -> Vec<Vec<Segment>> + 'static {
        let (base, len) = (self.base, self.block_bytes);
        move |n| vec![vec![Segment { ptr: std::ptr::with_exposed_provenance_mut(base + n as usize * len), len }]]
    }
}

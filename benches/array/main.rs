//! The cache over an array of drives, beside threads that call `pread` and `pwrite` on the same places, in interleaved
//! rounds.
//!
//!     cargo bench --bench array -- [load|store|fetch|device|syscalls|reactor]... [--path PATH]... [--block-bytes N]...
//!                                  [--drive-mib N] [--drives N]... [--rounds N] [--workers N] [--read-mib N]
//!                                  [--write-mib N] [--tasks N]... [--csv FILE]
//!
//! A PATH is a block device, whose content is lost, or a directory; without one a temporary directory plays a single
//! drive. For each number of drives (1, 2, 4, .. up to all of them) and each block size, a table: threads alone,
//! threads that also take the checksum, threads that read into the places of the caller's pool as the cache does (the
//! others each have one buffer, which may stay in the processor's cache), and the cache with one caller and with four.
//! The ratios are those to threads with a buffer each, and, as a second ceiling, those to threads that move the same
//! memory as the cache. Every byte that the cache serves is verified by its checksum within the measured time, and by
//! stamps after it. Loads and fetches are also held against bare rings that checksum, one for each drive.
//!
//! `device` runs only by name: loads into a pool on a CUDA device, where each block has another place in each round.
//!
//! `syscalls` runs only by name: the system calls of all threads for each block of fetches by one thread, 1 and 32 at a
//! time, of loads and of stores. It needs root. `reactor` runs only by name: the time of the reactor's thread for each
//! block of loads and stores, which needs nothing beside the cache. `--csv` appends the medians to a file, which
//! docs/plots/draw.py draws.

mod calls;
mod contenders;
mod options;
mod reactor;

use std::{
    fs::{File, OpenOptions},
    io::{self, Seek, SeekFrom, Write},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use kvhoist::{
    Cache, Config, DeviceKind, DiskPath, Eviction, Region, Route, Segment, block_on,
    internals::{
        disk::format::stripe::Stripe,
        gpu::{DeviceBuffer, Gpu},
        memory::DeviceMemory,
    },
};
use kvhoist_bench_kit::{
    cuda,
    drive::{key, measured, other},
    measure::{Entrant, Sample, Series, Spread, interleave, ratio, table},
    pattern::{shuffled, stamp, verify},
    scratch::Slab,
};

use options::Options;

/// Blocks of one call: pages of one of SGLang's calls.
const CALL_BLOCKS: usize = 128;

/// Threads of the peers, and of those that also take the checksum.
const THREADS: [usize; 4] = [1, 4, 16, 32];
const THREADS_SUM: usize = 24;

/// Threads of the runtime whose tasks fetch.
const FETCHERS: usize = 16;

fn main() -> ExitCode {
    match Options::parse().and_then(|options| run(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("array: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> io::Result<()> {
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let mut paths = options.paths.clone();
    if paths.is_empty() {
        paths.push(scratch.path().to_owned());
    }
    let powers = (0..).map(|power| 1 << power).take_while(|&drives| drives <= paths.len());
    let wanted = if options.drives.is_empty() { powers.collect() } else { options.drives.clone() };
    for drives in wanted {
        if drives == 0 || drives > paths.len() {
            return Err(other(format!("found --drives {drives}, expected 1 to {}, the number of paths", paths.len())));
        }
        for &block_bytes in &options.block_bytes {
            for name in &options.names {
                Array::open(options, &paths[..drives], block_bytes, name == "device")?.measure(name, options)?;
            }
        }
    }
    Ok(())
}

/// What threads beside the cache do.
#[derive(Clone, Copy, Default)]
struct Peer {
    writes: bool,
    /// They also take the checksum.
    sums: bool,
    /// Into or from the blocks' places in the pool, and not one buffer a thread.
    into_pool: bool,
}

/// Where blocks lie in memory: block `n` in place `n + shift` of as many as there are blocks.
#[derive(Clone, Copy)]
struct Places {
    base: usize,
    shift: u64,
}

/// A cache over some drives, and a pool of the caller's with room for every block.
struct Array {
    cache: Cache,
    region: Option<Region>,
    pool: Mutex<Slab>,
    base: usize,
    block_bytes: usize,
    blocks: u64,
    /// Where each slot's block lies, for the peers.
    files: Vec<File>,
    places: Vec<(usize, u64)>,
    title: String,
}

impl Array {
    fn open(options: &Options, paths: &[PathBuf], block_bytes: usize, on_device: bool) -> io::Result<Array> {
        let slots = (options.drive_bytes / block_bytes as u64) as u32;
        for path in paths {
            wipe(path)?;
        }
        let defaults = Config::default();
        let settings = Config::default()
            .block_bytes(block_bytes)
            // Few beside the blocks: what is fetched comes from the drives.
            .host_blocks(
                (slots * paths.len() as u32 / 8)
                    .clamp(2 * options.tasks.iter().max().map_or(0, |&tasks| tasks as u32), 256)
                    .min(slots * paths.len() as u32 / 4),
            )
            .disks(paths.iter().map(|path| DiskPath::with_blocks(path.clone(), slots)).collect())
            .bypass_host(true)
            // As many slots as blocks: those stored last are to be found.
            .eviction_policy(Eviction::Lru)
            .workers(options.workers)
            .read_bytes_in_flight_max(options.read_bytes.unwrap_or(defaults.limits.read_bytes_in_flight_max))
            .write_bytes_in_flight_max(options.write_bytes.unwrap_or(defaults.limits.write_bytes_in_flight_max));
        let settings = match on_device {
            true => settings.device(DeviceKind::Cuda).device_blocks(1),
            false => settings,
        };
        let blocks = settings.disk_slots();
        let cache = block_on(Cache::open(settings.clone())).map_err(other)?;
        let mut pool = Slab::new(block_bytes, blocks as usize)?;
        let base = pool.block(0).as_mut_ptr();
        // SAFETY: the pool outlives the cache's use of it: `measure` unregisters the region before it drops either.
        let memory = unsafe { kvhoist::Memory::host(base, block_bytes * blocks as usize) };
        let region = block_on(cache.register(memory.pinned(true))).map_err(other)?;
        if !region.is_pinned() {
            eprintln!("the pool is no buffer of the ring: raise `ulimit -l`");
        }
        let stripe = Stripe::new(&settings);
        let places = (0..blocks as u32).map(|slot| stripe.locate(slot)).map(|(file, at)| (usize::from(file.0), at));
        let open = |path: &PathBuf| {
            let file = if path.is_dir() { path.join("kvhoist.store") } else { path.clone() };
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(file)
        };
        let drives = paths.len();
        Ok(Array {
            region: Some(region),
            base: base.expose_provenance(),
            pool: Mutex::new(pool),
            block_bytes,
            blocks,
            files: paths.iter().map(open).collect::<io::Result<_>>()?,
            places: places.collect(),
            title: format!(
                "{drives} drives, blocks of {} KiB, {} workers",
                block_bytes >> 10,
                settings.worker_threads()
            ),
            cache,
        })
    }

    fn measure(mut self, name: &str, options: &Options) -> io::Result<()> {
        let rounds = options.rounds;
        self.stamp_all();
        self.call(0..self.blocks, 1, 0, true, self.in_pool())?;
        block_on(self.cache.sync()).map_err(other)?;
        let series = match name {
            "load" => self.loads(rounds),
            "store" => self.stores(rounds),
            "device" => self.device_loads(rounds),
            "syscalls" => self.count_calls(rounds),
            "reactor" => self.time_reactor(rounds),
            _ => self.fetches(rounds, &options.tasks),
        }?;
        if let Some(csv) = &options.csv {
            self.append(csv, name, &series)?;
        }
        println!("{}", table(&format!("{name}, {}", self.title), &series));
        let (ours, peers): (Vec<_>, Vec<_>) = series.iter().partition(|series| series.name.starts_with("kvhoist"));
        let is_ceiling =
            |name: &str| name.contains("the pool") || name.contains("cuMemcpy") || name.starts_with("rings");
        let ceilings = peers.iter().enumerate().filter(|(at, peer)| *at == 0 || is_ceiling(&peer.name));
        for (_, ceiling) in ceilings {
            for ours in &ours {
                println!("{} over {}: {:.3}", ours.name, ceiling.name, ratio(ours, ceiling, Sample::mib_per_s));
            }
        }
        let stats = self.cache.stats();
        let routes = [Route::DiskToRegion, Route::RegionToDisk, Route::DiskToHost, Route::HostToCaller]
            .map(|route| (route, stats.route_blocks(route)));
        println!("blocks by route: {routes:?}; {} pieces of work done by workers\n", stats.work_done);
        let region = self.region.take().expect("unregistered once");
        block_on(self.cache.unregister(&region)).map_err(other)?;
        block_on(self.cache.close()).map_err(other)
    }

    fn ring_peers(&self) -> [Entrant<'_>; 2] {
        [self.rings("rings + checksum", false), self.rings("rings into a buffer a block + checksum", true)]
    }

    fn loads(&self, rounds: u64) -> io::Result<Vec<Series>> {
        let mut entrants = vec![self.threads("pread", *THREADS.last().expect("some"), Peer::default())];
        let fewer = THREADS[..THREADS.len() - 1].iter();
        entrants.extend(fewer.map(|&threads| self.threads("pread", threads, Peer::default())));
        let [sums, into_pool] = [Peer { sums: true, ..Peer::default() }, Peer { into_pool: true, ..Peer::default() }];
        entrants.push(self.threads("pread + checksum", THREADS_SUM, sums));
        entrants.push(self.threads("pread into the pool", *THREADS.last().expect("some"), into_pool));
        entrants.push(self.threads("pread into the pool + checksum", THREADS_SUM, Peer { sums: true, ..into_pool }));
        entrants.extend(self.ring_peers());
        entrants.extend([1, 4].map(|callers| {
            Entrant::new(format!("kvhoist load_into, {callers} callers"), move |round| {
                self.spoil();
                let order: Vec<u64> = shuffled(!round, self.blocks).collect();
                let sample = measured(self.bytes(), || self.call(order, callers, 0, false, self.in_pool()))?;
                self.check()?;
                Ok(sample)
            })
        }));
        interleave(rounds, &mut entrants)
    }

    fn stores(&self, rounds: u64) -> io::Result<Vec<Series>> {
        let next = &AtomicU64::new(self.blocks);
        let mut entrants =
            vec![self.threads("pwrite", *THREADS.last().expect("some"), Peer { writes: true, ..Peer::default() })];
        entrants.push(self.threads("pwrite", 4, Peer { writes: true, ..Peer::default() }));
        let from_pool = Peer { writes: true, into_pool: true, sums: false };
        entrants.push(self.threads("pwrite from the pool", *THREADS.last().expect("some"), from_pool));
        let sums = Peer { sums: true, ..from_pool };
        entrants.push(self.threads("checksum + pwrite from the pool", THREADS_SUM, sums));
        entrants.extend([1, 4].map(|callers| {
            Entrant::new(format!("kvhoist store_from, {callers} callers"), move |_| {
                let first = next.fetch_add(self.blocks, Ordering::Relaxed);
                measured(self.bytes(), || self.call(0..self.blocks, callers, first, true, self.in_pool()))
            })
        }));
        let series = interleave(rounds, &mut entrants)?;
        drop(entrants);
        self.spoil();
        let last = next.load(Ordering::Relaxed) - self.blocks;
        self.call(0..self.blocks, 1, last, false, self.in_pool())?;
        self.check()?;
        Ok(series)
    }

    /// Into memory of the device. Block `n` lies in another place each round, so what a load leaves out is found: the
    /// blocks of the last round are stored from there, and fetched.
    fn device_loads(&self, rounds: u64) -> io::Result<Vec<Series>> {
        let buffer = Gpu::open(0).and_then(|gpu| DeviceBuffer::new(gpu, self.bytes() as usize)).map_err(other)?;
        // SAFETY: the buffer outlives the cache's use of it (`unregister` below), and nothing else knows it.
        let memory = unsafe { kvhoist::Memory::device(buffer.base().as_ptr(), buffer.bytes()) };
        let region = block_on(self.cache.register(memory)).map_err(other)?;
        let (base, turn) = (buffer.base().as_ptr().expose_provenance(), &AtomicU64::new(0));
        let threads = *THREADS.last().expect("some");
        let mut entrants = vec![self.threads("pread", threads, Peer::default())];
        entrants.push(self.threads("pread into the pool", threads, Peer { into_pool: true, ..Peer::default() }));
        let place = |n: u64| (&self.files[self.places[n as usize].0], self.places[n as usize].1);
        for sums in [false, true] {
            entrants.push(cuda::pread_and_copy_of((self.blocks, self.block_bytes), sums, place)?);
        }
        entrants.extend([1, 4].map(|callers| {
            Entrant::new(format!("kvhoist load_into the device, {callers} callers"), move |round| {
                let order: Vec<u64> = shuffled(!round, self.blocks).collect();
                let places = Places { base, shift: turn.fetch_add(1, Ordering::Relaxed) + 1 };
                measured(self.bytes(), || self.call(order, callers, 0, false, places))
            })
        }));
        let series = interleave(rounds, &mut entrants)?;
        drop(entrants);
        let places = Places { base, shift: turn.load(Ordering::Relaxed) };
        self.call(0..self.blocks, 1, self.blocks, true, places)?;
        for n in 0..self.blocks {
            let lease = block_on(self.cache.fetch(&key(n + self.blocks))).map_err(other)?;
            verify(&lease.ok_or_else(|| other("a block is missing"))?, n)?;
        }
        block_on(self.cache.unregister(&region)).map_err(other)?;
        Ok(series)
    }

    fn fetches(&self, rounds: u64, tasks: &[usize]) -> io::Result<Vec<Series>> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(FETCHERS).build()?;
        let runtime = &runtime;
        let mut entrants = vec![self.threads("pread", 32, Peer::default())];
        let sums = Peer { sums: true, into_pool: true, writes: false };
        entrants.push(self.threads("pread into the pool + checksum", FETCHERS, sums));
        entrants.extend(self.ring_peers());
        entrants.extend(tasks.iter().map(|&tasks| {
            Entrant::new(format!("kvhoist fetch, {tasks} tasks"), move |round| {
                let order: std::sync::Arc<Vec<u64>> = std::sync::Arc::new(shuffled(!round, self.blocks).collect());
                let next = std::sync::Arc::new(AtomicUsize::new(0));
                measured(self.bytes(), || {
                    let task = || {
                        let (cache, order, next) = (self.cache.clone(), order.clone(), next.clone());
                        runtime.spawn(async move {
                            while let Some(&n) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                                let lease = cache.fetch(&key(n)).await.map_err(other)?;
                                verify(&lease.ok_or_else(|| other("a block is missing"))?, n)?;
                            }
                            Ok::<(), io::Error>(())
                        })
                    };
                    let tasks: Vec<_> = (0..tasks).map(|_| task()).collect();
                    tasks.into_iter().try_for_each(|task| runtime.block_on(task).map_err(other)?)
                })
            })
        }));
        interleave(rounds, &mut entrants)
    }

    /// Appends the medians to a table of comma-separated values.
    fn append(&self, path: &Path, name: &str, series: &[Series]) -> io::Result<()> {
        let mut file = OpenOptions::new().append(true).create(true).open(path)?;
        if file.metadata()?.len() == 0 {
            writeln!(file, "bench,drives,block_bytes,contender,mib_per_s,cpu_s_per_gib")?;
        }
        for Series { name: contender, samples } in series {
            let [speed, cost] =
                [Sample::mib_per_s, Sample::cpu_s_per_gib].map(|value| Spread::of(samples.iter().map(value)).median);
            let (drives, block_bytes) = (self.files.len(), self.block_bytes);
            writeln!(file, "{name},{drives},{block_bytes},\"{contender}\",{speed:.0},{cost:.3}")?;
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.blocks * self.block_bytes as u64
    }

    /// Each block's place in the caller's pool.
    fn in_pool(&self) -> Places {
        Places { base: self.base, shift: 0 }
    }

    fn place(&self, Places { base, shift }: Places, n: u64) -> Segment {
        let address = base + ((n + shift) % self.blocks) as usize * self.block_bytes;
        Segment { ptr: std::ptr::with_exposed_provenance_mut(address), len: self.block_bytes }
    }

    fn stamp_all(&self) {
        let mut pool = self.pool.lock().expect("no caller panicked");
        (0..self.blocks).for_each(|n| stamp(pool.block(n as usize), n));
    }

    /// Makes every block another: what a load leaves out is found then.
    fn spoil(&self) {
        let mut pool = self.pool.lock().expect("no caller panicked");
        (0..self.blocks).for_each(|n| stamp(pool.block(n as usize), !n));
    }

    fn check(&self) -> io::Result<()> {
        let mut pool = self.pool.lock().expect("no caller panicked");
        (0..self.blocks).try_for_each(|n| verify(pool.block(n as usize), n))
    }
}

/// Makes a device, or a directory, one without a store.
fn wipe(path: &PathBuf) -> io::Result<()> {
    if path.is_dir() {
        return match std::fs::remove_file(path.join("kvhoist.store")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
    }
    let device = OpenOptions::new().write(true).open(path)?;
    let bytes = (&device).seek(SeekFrom::End(0))?;
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: takes no pointers; the descriptor is open.
    match unsafe { libc::fallocate(device.as_raw_fd(), mode, 0, bytes as libc::off_t) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

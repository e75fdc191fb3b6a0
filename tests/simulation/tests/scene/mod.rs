//! A small cache over a quick simulated disk, for tests that make one thing happen.
#![allow(dead_code, reason = "every test file uses its own part of this")]

use std::{future::Future, time::Duration};

use kvhoist::{BlockKey, Cache, Config, DiskPath, Error, Memory, Region, Segment, WritePolicy, internals::io::FileId};
use kvhoist_simulation::sim::{self, CopyOptions, Reactor, Sim, SimCopy, SimOptions, Simulated, World};
use tokio::task::{JoinHandle, spawn_local};

pub const BLOCK_BYTES: usize = 4096;
pub const DEADLINE: Duration = Duration::from_millis(400);

pub fn config() -> Config {
    Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(4)
        .disks(vec![DiskPath::with_blocks("simulated", 16)])
        .deadline_ms(DEADLINE.as_millis() as u64)
        .disk_failures_max(3)
}

pub fn key(n: u8) -> BlockKey {
    BlockKey::new([n; 32])
}

pub fn payload(n: u8) -> Vec<u8> {
    vec![n; BLOCK_BYTES]
}

pub async fn store(cache: &Cache, n: u8) -> Result<(), Error> {
    cache.store(&key(n), None, &payload(n)).await
}

/// True if the block was found, and whole.
pub async fn fetch(cache: &Cache, n: u8) -> Result<bool, Error> {
    let found = cache.fetch(&key(n)).await?;
    assert!(found.iter().all(|lease| **lease == payload(n)), "block {n} shows wrong bytes");
    Ok(found.is_some())
}

/// Opens a cache over quick disks, and a quick device.
pub async fn open(config: Config) -> (Cache, Reactor, Sim) {
    open_with(config, 1, 1).await
}

/// Opens a cache over disks and a device that take so many milliseconds.
pub async fn open_with(config: Config, disk_ms: u64, copy_ms: u64) -> (Cache, Reactor, Sim) {
    let (cache, reactor, World { storage, .. }) = open_world(config, disk_ms, copy_ms).await;
    (cache, reactor, storage)
}

/// As [`open_with`], with the device too.
pub async fn open_world(config: Config, disk_ms: u64, copy_ms: u64) -> (Cache, Reactor, World) {
    open_seeded(config, disk_ms, copy_ms, 1).await
}

/// As [`open_world`], with a seed, which decides on the I/O threads.
pub async fn open_seeded(config: Config, disk_ms: u64, copy_ms: u64, seed: u64) -> (Cache, Reactor, World) {
    kvhoist_simulation::log::watch();
    let mut world = World::new(seed, Vec::new());
    world.deaths = 0.0;
    let latency = |ms| Duration::from_millis(ms)..=Duration::from_millis(ms);
    world.copy = SimCopy::new(1, CopyOptions { latency: latency(copy_ms), ..CopyOptions::default() });
    let options = SimOptions { latency: latency(disk_ms), ..SimOptions::default() };
    world.storage = Sim::new(1, sim::blank_files(&config), options);
    let Simulated { cache, reactor } = sim::open(config, &world).await.expect("blank files open");
    (cache, reactor, world)
}

/// Stores blocks `0..16`: all on disk, the last few in host memory too.
pub async fn fill(cache: &Cache) {
    for n in 0..16 {
        store(cache, n).await.expect("a sound disk");
    }
}

pub fn spawn_remove(cache: &Cache, n: u8) -> tokio::task::JoinHandle<Result<bool, Error>> {
    let cache = cache.clone();
    tokio::task::spawn_local(async move { cache.remove(&key(n)).await })
}

/// What a process that opens the store finds, where the one that has it now is killed at this instant.
pub async fn open_killed(config: Config, disk: &Sim) -> (Cache, Reactor, Sim) {
    let files = (0..config.disk.paths.len()).map(|n| disk.contents(FileId(n as u16))).collect();
    let world = World::new(2, files);
    let Simulated { cache, reactor } = sim::open(config, &world).await.expect("a killed store opens");
    (cache, reactor, world.storage)
}

/// Balances the books and closes.
pub async fn finish(cache: Cache, reactor: Reactor) {
    reactor.settle(Duration::from_secs(60)).await.expect("balanced");
    // What a failing disk did not take may make this an error.
    drop(cache.close().await);
    reactor.ended().await;
    reactor.settle(Duration::from_secs(60)).await.expect("balanced after the end");
}

pub async fn elapsed<T>(future: impl Future<Output = T>) -> (T, Duration) {
    let began = tokio::time::Instant::now();
    (future.await, began.elapsed())
}

pub fn on_time(took: Duration) -> bool {
    (DEADLINE..=DEADLINE * 3 / 2).contains(&took)
}

pub fn write_back() -> Config {
    config().write_policy(WritePolicy::WriteBack)
}

/// Runs a call on a handle of its own.
pub fn spawn<T: 'static, F: Future<Output = T> + 'static>(
    cache: &Cache,
    call: impl FnOnce(Cache) -> F + 'static,
) -> JoinHandle<T> {
    spawn_local(call(cache.clone()))
}

/// Registered memory that has one block, for transfers in place.
pub struct Pool {
    pub region: Region,
    /// The block's place, for a call.
    pub places: Vec<Vec<Segment>>,
    _memory: Vec<u8>,
}

/// Registers memory that holds block `n`.
pub async fn pool(cache: &Cache, n: u8) -> Pool {
    let mut memory = [payload(n), payload(n)].concat();
    let ptr = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(BLOCK_BYTES));
    // SAFETY: the tests unregister the region before they drop the memory, and nothing but the cache writes to it.
    let region = cache.register(unsafe { Memory::host(ptr, BLOCK_BYTES) }).await.expect("registered");
    Pool { region, places: vec![vec![Segment { ptr, len: BLOCK_BYTES }]], _memory: memory }
}

/// Lets everything run that the disk does not hold up.
pub async fn a_while() {
    tokio::time::sleep(Duration::from_millis(10)).await;
}

/// What the next start finds if the power fails now.
pub async fn open_after_power_cut(config: Config, disk: &Sim) -> (Cache, Reactor) {
    let world = World::new(3, disk.crash());
    let Simulated { cache, reactor } = sim::open(config, &world).await.expect("a store opens after a power cut");
    (cache, reactor)
}

/// How often the block is there after a power cut, of so many.
pub async fn found_after_power_cuts(config: &Config, disk: &Sim, n: u8) -> usize {
    let mut found = 0;
    for _ in 0..POWER_CUTS {
        let (later, reactor) = open_after_power_cut(config.clone(), disk).await;
        found += usize::from(fetch(&later, n).await.expect("served"));
        finish(later, reactor).await;
    }
    found
}

pub const POWER_CUTS: usize = 12;

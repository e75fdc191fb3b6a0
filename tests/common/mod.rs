//! What the integration tests share: stores in temporary directories, keys, payloads.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod layers;
pub mod remote_store;
pub mod skip;

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use kvhoist::{BlockKey, Cache, Config, DiskPath, Segment, StorageKind, WritePolicy, block_on};
use tempfile::TempDir;

pub const BLOCK_BYTES: usize = 16 << 10;

/// A directory on a real file system, so that direct I/O is what it is in production.
pub fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary directory")
}

/// The name of a test of the folder that `module`, one of its files, is part of, as its binary has it.
pub fn beside(module: &str, name: &str) -> String {
    let within: Vec<&str> = module.split("::").skip(1).collect();
    [&within[..within.len() - 1], &[name]].concat().join("::")
}

/// The `n`-th key of a test; all 32 bytes depend on `n`.
pub fn key(n: u64) -> BlockKey {
    let mut bytes = [0; 32];
    for (i, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&mix(n.wrapping_mul(4).wrapping_add(i as u64)).to_le_bytes());
    }
    BlockKey::new(bytes)
}

/// The block of the `n`-th key; every 8 bytes depend on `n` and on their place.
pub fn payload(n: u64, len: usize) -> Vec<u8> {
    let seed = mix(n);
    let mut bytes: Vec<u8> = (0..len.div_ceil(8) as u64).flat_map(|i| mix(seed ^ i).to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

pub fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A small generator for randomised tests; its seed is printed by those who use it.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// A seed from the environment, to replay a run, or a new one; printed either way.
pub fn seed() -> u64 {
    let seed = match std::env::var("KVHOIST_TEST_SEED") {
        Ok(text) => text.parse().expect("KVHOIST_TEST_SEED is a number"),
        Err(_) => std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64),
    };
    println!("replay with KVHOIST_TEST_SEED={seed}");
    seed
}

pub fn config(directory: &TempDir, storage: StorageKind, host_blocks: u32, disk_blocks: u32) -> Config {
    Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(host_blocks)
        .disks(vec![DiskPath::with_blocks(directory.path(), disk_blocks)])
        .storage(storage)
        .write_policy(WritePolicy::WriteThrough)
}

/// Writes a file that only its owner may use, as a store's file is.
pub fn write_private(path: &Path, bytes: impl AsRef<[u8]>) {
    std::fs::write(path, bytes).expect("written");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("chmod");
}

pub fn store_file(directory: &TempDir) -> PathBuf {
    directory.path().join("kvhoist.store")
}

/// Flips a bit in the middle of what is on disk of a block that begins with `payload`.
pub fn damage(directory: &TempDir, payload: &[u8]) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(store_file(directory)).expect("the store");
    let bytes = std::fs::read(store_file(directory)).expect("the store");
    let start = (0..bytes.len()).step_by(4096).find(|&at| bytes[at..].starts_with(payload)).expect("it is there");
    let at = start + payload.len() / 2 + 100;
    std::os::unix::fs::FileExt::write_all_at(&file, &[bytes[at] ^ 4], at as u64).expect("the store can be written");
}

/// Fetches and compares every byte; true if it was there.
pub async fn fetch_verified(cache: &Cache, n: u64) -> bool {
    match cache.fetch(&key(n)).await.expect("fetch") {
        None => false,
        Some(lease) => {
            assert!(*lease == payload(n, lease.len())[..], "wrong bytes for key {n} by {}", lease.route());
            true
        }
    }
}

pub async fn store(cache: &Cache, n: u64) {
    cache.store(&key(n), None, &payload(n, cache.config().block_bytes)).await.expect("store");
}

/// Lets a thread beside the test end, however the test does.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Places of blocks in a pool of the caller, layer by layer: four pieces each.
fn places(base: *mut u8, blocks: usize) -> Vec<Vec<Segment>> {
    let quarter = BLOCK_BYTES / 4;
    let place =
        |block: usize, part: usize| Segment { ptr: base.wrapping_add((part * blocks + block) * quarter), len: quarter };
    (0..blocks).map(|block| (0..4).map(|part| place(block, part)).collect()).collect()
}

/// Loads 16 blocks into a pool of the caller that begins at `base`, and stores them from there; each is right.
pub fn load_and_store(cache: &Cache, base: *mut u8) {
    let (keys, places): (Vec<_>, _) = ((0..16).map(key).collect(), places(base, 16));
    for n in 0..16 {
        block_on(store(cache, n));
    }
    let loaded = block_on(cache.load_into(&keys, &places)).expect("loads");
    assert!(loaded.into_iter().all(|result| result.expect("load")), "all were stored");
    for n in 0..16 {
        assert!(block_on(cache.remove(&key(n))).expect("remove"));
    }
    let stored = block_on(cache.store_from(&keys, None, &places)).expect("stores");
    assert!(stored.into_iter().all(|result| result.expect("store")), "all were stored");
    for n in 0..16 {
        assert!(block_on(fetch_verified(cache, n)), "block {n}");
        assert!(block_on(cache.remove(&key(n))).expect("remove"));
    }
}

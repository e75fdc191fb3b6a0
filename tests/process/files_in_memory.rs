//! Files in memory: the kernel makes each operation on them by blocking a thread. Workers make them by system calls of
//! their own. A ring would hand each operation to another thread, of the kernel's.

#[path = "../common/mod.rs"]
mod common;

use std::{collections::HashSet, fs};

use common::{config, key, payload, skip::skipped, store};
use kvhoist::{BlockKey, Cache, DirectIo, StorageKind, block_on};

const BLOCK: usize = 256 << 10;
const BLOCKS: u64 = 32;

/// Names of the threads of this process, by their ids.
fn threads() -> Vec<(String, String)> {
    let tasks = fs::read_dir("/proc/self/task").expect("a /proc").flatten();
    let named = |task: fs::DirEntry| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        Some((task.file_name().into_string().ok()?, name.trim().to_owned()))
    };
    tasks.filter_map(named).collect()
}

/// In a process of its own: the kernel names its threads after those that they work for.
#[test]
fn workers_read_and_write_them_without_threads_of_the_kernel() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return skipped("no /dev/shm") };
    let config = || {
        let config = config(&dir, StorageKind::Uring, BLOCKS as u32, BLOCKS as u32);
        config.block_bytes(BLOCK).workers(2).direct_io(DirectIo::Prefer)
    };
    let Ok(cache) = block_on(Cache::open(config())) else { return skipped("no io_uring") };
    block_on(async {
        for n in 0..BLOCKS {
            store(&cache, n).await;
        }
        cache.close().await.expect("close");
    });
    let cache = block_on(Cache::open(config())).expect("open again");
    let keys: Vec<BlockKey> = (0..BLOCKS).map(key).collect();
    let blocks = block_on(cache.fetch_many(&keys));
    for (n, block) in (0..).zip(blocks) {
        assert!(block.expect("read").expect("stored")[..] == payload(n, BLOCK)[..], "block {n}");
    }
    // How many depends on when each is found alone: the reactor reads those.
    assert!(cache.stats().work_done > 0, "no reads by workers");

    let threads = threads();
    let workers: HashSet<_> = threads.iter().filter(|(_, name)| name.starts_with("kvhoist-work")).collect();
    assert_eq!(workers.len(), 2, "{threads:?}");
    let helps = |name: &str| workers.iter().any(|(worker, _)| name == format!("iou-wrk-{worker}"));
    let of_kernel: Vec<_> = threads.iter().filter(|(_, name)| helps(name)).collect();
    assert!(of_kernel.is_empty(), "threads of the kernel that work for the workers: {of_kernel:?}");
    block_on(cache.close()).expect("close");
}

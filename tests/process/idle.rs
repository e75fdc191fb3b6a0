//! Idle costs no CPU: with nothing asked of it the reactor's thread is not scheduled at all.

#[path = "../common/mod.rs"]
mod common;

use std::{fs, path::PathBuf, time::Duration};

use common::{config, directory, fetch_verified, store};
use kvhoist::{Cache, StorageKind, block_on};

/// How often the threads of the cache have given up a processor so far.
fn switches() -> u64 {
    reactor_threads().iter().map(|thread| switches_of(thread)).sum()
}

fn reactor_threads() -> Vec<PathBuf> {
    let tasks = fs::read_dir("/proc/self/task").expect("a /proc").flatten().map(|entry| entry.path());
    tasks.filter(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name.starts_with("kvhoist"))).collect()
}

fn switches_of(task: &std::path::Path) -> u64 {
    let status = fs::read_to_string(task.join("status")).expect("a running thread");
    let counts = status.lines().filter(|line| line.contains("ctxt_switches"));
    counts.map(|line| line.split_whitespace().last().expect("a number").parse::<u64>().expect("a number")).sum()
}

/// Whether no thread of the cache runs, or waits for a processor.
fn all_sleep() -> bool {
    let sleeps = |task: &PathBuf| {
        let status = fs::read_to_string(task.join("status")).expect("a running thread");
        status.contains("State:\tS")
    };
    reactor_threads().iter().all(sleeps)
}

/// How long the threads of the cache have run so far.
fn running() -> Duration {
    let of = |task: &PathBuf| {
        let text = fs::read_to_string(task.join("schedstat")).expect("a running thread");
        text.split_whitespace().next().and_then(|nanos| nanos.parse::<u64>().ok()).expect("nanoseconds first")
    };
    Duration::from_nanos(reactor_threads().iter().map(of).sum())
}

#[test]
fn a_cache_with_nothing_to_do_is_not_scheduled() {
    // Spinning, it stays awake for a moment after the last movement, and no longer.
    for (storage, spin_us) in [(StorageKind::Uring, 0), (StorageKind::Blocking, 0), (StorageKind::Uring, 50)] {
        let dir = directory();
        let cache = block_on(Cache::open(config(&dir, storage, 4, 64).spin_us(spin_us))).expect("open");
        for n in 0..16 {
            block_on(store(&cache, n));
        }
        block_on(fetch_verified(&cache, 0));
        assert!(!reactor_threads().is_empty(), "the reactor has a name");
        // What the last calls left to do is done when the threads sleep, and nothing is left to wake them: two equal
        // looks in a row.
        let mut before = switches();
        loop {
            std::thread::sleep(Duration::from_millis(20));
            let now = switches();
            if now == before && all_sleep() {
                break;
            }
            before = now;
        }
        let busy = running();
        std::thread::sleep(Duration::from_millis(500));
        let busy = running() - busy;
        assert!(busy < Duration::from_millis(5), "{busy:?} of half a second of nothing to do");
        let woken = switches() - before;
        assert!(woken <= 2, "woken {woken} times in half a second of nothing to do");
        block_on(cache.close()).expect("close");
    }
}

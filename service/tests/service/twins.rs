//! Processes with a cache of their own over memory that another process shares, which are killed or replaced by another
//! program in the middle of loads. Who holds the lock of the store has the memory for itself.

use std::{
    fs::{self, File},
    io::Read,
    os::{
        fd::AsRawFd,
        unix::{fs::OpenOptionsExt, process::CommandExt},
    },
    path::Path,
    process::Command,
    time::Instant,
};

use kvhoist::{Cache, Config, DiskPath, Memory, SharedMemory, StorageKind, block_on};

use crate::{
    common::{self, Rng, key, seed},
    killed::{BLOCK_BYTES, BLOCKS, MINE, POOL_BYTES, a_moment, kills, overwritten_pages, places},
    node::{HANG, Process, say},
};

fn open(path: &Path, storage: StorageKind, workers: u32) -> Cache {
    let config = Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(8)
        .disks(vec![DiskPath::with_blocks(path, BLOCKS as u32)])
        .bypass_host(true)
        .read_bytes_in_flight_max(POOL_BYTES as u64)
        .workers(workers)
        .storage(storage);
    block_on(Cache::open(config)).expect("a cache")
}

/// Loads all blocks again and again, until another program takes its place when the standard input ends.
pub fn run(words: &[&str]) {
    let [memfd, path, storage, workers] = words else { panic!("{words:?}") };
    let memory = fs::OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC).open(memfd).expect("open");
    // SAFETY: a new mapping of a whole file, at an address of the kernel's choice.
    let start = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(std::ptr::null_mut(), POOL_BYTES, access, libc::MAP_SHARED, memory.as_raw_fd(), 0)
    };
    assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    let start = start.expose_provenance();
    let storage = if *storage == "uring" { StorageKind::Uring } else { StorageKind::Blocking };
    let cache = open(path.as_ref(), storage, workers.parse().expect("a number"));
    std::thread::spawn(move || {
        let start = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: it is mapped as long as this program runs, and read by nobody before that is over.
        let memory = unsafe { Memory::host(start, POOL_BYTES) };
        block_on(cache.register(memory)).expect("registered");
        let (keys, places): (Vec<_>, _) = ((0..BLOCKS).map(key).collect(), places(start));
        loop {
            let loaded = block_on(cache.load_into(&keys, &places)).expect("loads");
            assert!(loaded.iter().all(|result| matches!(result, Ok(true))), "{loaded:?}");
            say("loaded");
        }
    });
    std::io::stdin().read_to_end(&mut Vec::new()).expect("the end of the input");
    panic!("{}", Command::new("true").exec());
}

#[test]
fn the_lock_of_a_store_is_free_when_a_dead_process_writes_to_memory_no_longer() {
    let (mut rng, mut mine) = (Rng(seed()), vec![MINE; POOL_BYTES]);
    for (storage, workers) in [("uring", 0), ("uring", 8), ("blocking", 0)] {
        let store = common::directory();
        let cache = open(store.path(), StorageKind::Auto, 0);
        for n in 0..BLOCKS {
            block_on(cache.store(&key(n), None, &vec![n as u8; BLOCK_BYTES])).expect("stored");
        }
        block_on(cache.close()).expect("closed");
        let mut spoiled = Vec::new();
        for count in 0..kills() {
            let memory = SharedMemory::new(POOL_BYTES).expect("memory");
            let memfd = format!("/proc/{}/fd/{}", std::process::id(), memory.as_fd().as_raw_fd());
            let mut twin = Process::start(&format!("twin {memfd} {} {storage} {workers}", store.path().display()));
            assert_eq!(twin.word().as_deref(), Some("loaded"));
            a_moment(&mut rng);
            let replaced = count % 2 == 1;
            if replaced {
                twin.end_input();
            } else {
                twin.send_kill();
            }
            wait_for_lock(&common::store_file(&store));
            let pages = overwritten_pages(&memory, &mut mine);
            spoiled.extend((pages > 0).then_some(pages));
            if replaced { assert!(twin.wait().success()) } else { twin.kill() }
        }
        println!("{storage} {workers}: {} of {} deaths overwrote pages: {spoiled:?}", spoiled.len(), kills());
        assert!(spoiled.is_empty(), "a dead process wrote to memory after its lock was free");
    }
}

/// Waits until the lock can be had, and gives it back.
fn wait_for_lock(store: &Path) {
    let (file, hang) = (File::open(store).expect("the store"), Instant::now() + HANG);
    while file.try_lock().is_err() {
        assert!(Instant::now() < hang, "the lock is never free");
        std::thread::yield_now();
    }
}

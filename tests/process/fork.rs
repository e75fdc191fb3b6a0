//! A forked child that drops what it inherited of a cache harms neither its own memory nor its parent.

#[path = "../common/mod.rs"]
mod common;

use std::io;

use common::{BLOCK_BYTES, config, directory, fetch_verified, key, store};
use kvhoist::{Cache, Region, StorageKind, block_on, internals::io::AlignedBuf};

/// What there is to drop last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    Handle,
    Queue,
    Lease,
    DeviceLease,
    Reservation,
}

const ALL: [Last; 5] = [Last::Handle, Last::Queue, Last::Lease, Last::DeviceLease, Last::Reservation];

/// Something of a cache, a region, and where the memory of the cache lies.
struct Held {
    last: Option<Box<dyn std::any::Any>>,
    addresses: [usize; 2],
    region: Option<Region>,
    _memory: AlignedBuf,
}

fn open(dir: &tempfile::TempDir) -> Cache {
    let cache = block_on(Cache::open(config(dir, StorageKind::Auto, 8, 64).device_blocks(4)));
    let cache = cache.expect("open");
    (0..4).for_each(|n| block_on(store(&cache, n)));
    cache
}

fn hold(cache: Cache, last: Last) -> Held {
    let mut memory = AlignedBuf::zeroed(BLOCK_BYTES);
    // SAFETY: nothing is loaded into it.
    let lent = unsafe { kvhoist::Memory::host(memory.as_mut_ptr(), BLOCK_BYTES) };
    let region = kvhoist::block_on(cache.register(lent)).expect("registered");
    let lease = block_on(cache.fetch(&key(0))).expect("served").expect("stored");
    let device = block_on(cache.fetch_to_device(&key(1))).expect("served").expect("stored");
    let addresses = [lease.as_ptr().addr(), device.segments()[0].ptr.addr()].map(|address| address & !4095);
    let reservation = block_on(cache.reserve()).expect("a slot");
    let queue = cache.completion_queue(4).expect("a queue");
    let last: Box<dyn std::any::Any> = match last {
        Last::Handle => Box::new(cache),
        Last::Queue => Box::new(queue),
        Last::Lease => Box::new(lease),
        Last::DeviceLease => Box::new(device),
        Last::Reservation => Box::new(reservation),
    };
    Held { last: Some(last), addresses, region: Some(region), _memory: memory }
}

/// Puts memory of this process where its parent has the cache's, runs `drop_all`, and says whether it is still there.
fn keeps_its_own_memory(addresses: [usize; 2], drop_all: impl FnOnce()) -> bool {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    for address in addresses {
        let wanted = std::ptr::without_provenance_mut(address);
        // SAFETY: refused where anything is mapped.
        let got = unsafe { libc::mmap(wanted, 4096, protection, flags | libc::MAP_FIXED_NOREPLACE, -1, 0) };
        if got != wanted {
            return false;
        }
        // SAFETY: just mapped.
        unsafe { got.cast::<u64>().write(0x5eed) };
    }
    drop_all();
    addresses.into_iter().all(|address| {
        let mut residency = 0u8;
        // SAFETY: asks about a page, which need not be mapped, and has a place for the answer.
        let mapped = unsafe { libc::mincore(std::ptr::without_provenance_mut(address), 4096, &raw mut residency) } == 0;
        // SAFETY: this process has mapped it, and written there.
        mapped && unsafe { std::ptr::with_exposed_provenance::<u64>(address).read() } == 0x5eed
    })
}

/// Runs `child` in a forked child; true if it ended by itself and said yes.
fn forked(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child calls what a child of many threads may call, and allocates, which glibc allows it.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "{}", io::Error::last_os_error());
    if pid == 0 {
        // SAFETY: takes a number. A child that hangs is ended by the signal.
        unsafe { libc::alarm(60) };
        let said = child();
        // SAFETY: ends this process and runs nothing of the parent's.
        unsafe { libc::_exit(i32::from(!said)) };
    }
    let mut status = 0;
    // SAFETY: our own child, and a place for the answer.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

/// The parent has closed the cache: what the child drops is the last of it.
#[test]
fn a_forked_child_that_drops_the_last_of_a_cache_keeps_its_own_memory() {
    for last in ALL {
        let dir = directory();
        let cache = open(&dir);
        let mut held = hold(cache.clone(), last);
        block_on(cache.close()).expect("closed");
        drop(cache);
        let child = || {
            let (last, region) = (held.last.take(), held.region.take());
            keeps_its_own_memory(held.addresses, || drop((last, region)))
        };
        assert!(forked(child), "{last:?}");
        drop(held);
        block_on(open(&dir).close()).expect("the parent opens it again");
    }
}

/// The parent goes on with the cache while the child drops its copies.
#[test]
fn a_parent_goes_on_while_its_forked_child_drops_its_handles() {
    for last in ALL {
        let dir = directory();
        let cache = open(&dir);
        let mut held = hold(cache.clone(), last);
        let mut copy = Some(cache);
        let child = || {
            let (cache, last, region) = (copy.take(), held.last.take(), held.region.take());
            keeps_its_own_memory(held.addresses, || drop((cache, last, region)))
        };
        assert!(forked(child), "{last:?}");
        let cache = copy.expect("the child has taken its own");
        for n in 0..4 {
            assert!(block_on(fetch_verified(&cache, n)), "{last:?}: block {n}");
        }
        drop(held);
        block_on(cache.close()).expect("closed");
    }
}

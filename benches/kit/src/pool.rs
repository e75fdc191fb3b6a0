//! A pool of blocks of a caller's, as engines have one: in host memory or on a device, registered with a cache.

use std::io;

use kvhoist::{Cache, DeviceKind, Segment, block_on, internals::memory::DeviceMemory};

use crate::{cuda, drive::other, pattern::stamp, scratch::Slab};

/// Memory of a caller that blocks are loaded into and stored from.
pub struct Pool {
    base: usize,
    block_bytes: usize,
    /// Registered with the cache.
    pub region: kvhoist::Region,
    memory: Memory,
}

/// Where a pool lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Home {
    /// In host memory, as a buffer of the ring.
    Host,
    /// On a device, or in host memory that plays one.
    Device(DeviceKind),
}

enum Memory {
    Device { _memory: Box<dyn DeviceMemory> },
    Host { slab: Slab },
}

impl Pool {
    /// Room for `blocks` blocks, registered with `cache`.
    pub fn open(cache: &Cache, blocks: u64, block_bytes: usize, home: Home) -> io::Result<Pool> {
        let (base, memory) = if matches!(home, Home::Host | Home::Device(DeviceKind::Simulated)) {
            let mut slab = Slab::new(block_bytes, blocks as usize)?;
            (slab.block(0).as_mut_ptr(), Memory::Host { slab })
        } else {
            let memory = cuda::memory(blocks as usize * block_bytes)?;
            (memory.base().as_ptr(), Memory::Device { _memory: memory })
        };
        let bytes = blocks as usize * block_bytes;
        // SAFETY: the pool outlives the cache's use of it (its user unregisters it, or waits for the end of
        // the cache, unless a measurement fails), and nothing else knows it.
        let lent = unsafe {
            match home {
                Home::Host => kvhoist::Memory::host(base, bytes),
                Home::Device(_) => kvhoist::Memory::device(base, bytes),
            }
        };
        let region = block_on(cache.register(lent.pinned(home == Home::Host))).map_err(other)?;
        if home == Home::Host && !region.is_pinned() {
            eprintln!("the pool is no buffer of the ring: raise `ulimit -l`");
        }
        Ok(Pool { base: base.expose_provenance(), block_bytes, region, memory })
    }

    /// Where block `n` lies.
    pub fn place(&self) -> impl Fn(u64) -> Vec<Segment> + 'static {
        let (base, len) = (self.base, self.block_bytes);
        move |n| vec![Segment { ptr: std::ptr::with_exposed_provenance_mut(base + n as usize * len), len }]
    }

    /// Block `n` of a pool in host memory that nothing moves to or from.
    pub fn block(&self, n: u64) -> &[u8] {
        let Segment { ptr, len } = self.place()(n)[0];
        // SAFETY: within the pool, which is mapped and initialized, and no call on the cache is in flight.
        unsafe { std::slice::from_raw_parts(ptr, len) }
    }

    pub fn block_mut(&mut self, n: u64) -> &mut [u8] {
        let Segment { ptr, len } = self.place()(n)[0];
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(ptr, len) }
    }

    /// Makes every block of a pool in host memory another: what a load leaves out is found then.
    pub fn spoil(&mut self) {
        let Memory::Host { slab } = &self.memory else { return };
        (0..slab.count() as u64).for_each(|n| stamp(self.block_mut(n), !n));
    }
}

//! What moves the blocks of a round: threads with system calls, and callers of the cache.

use std::{
    io,
    os::unix::fs::FileExt,
    sync::{
        Barrier, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use kvhoist::{BlockKey, Segment, block_on, internals::checksum::checksum};
use kvhoist_bench_kit::{
    drive::{key, measured, other},
    measure::Entrant,
    pattern::shuffled,
    ring::{BareRing, Op, Setup},
    scratch::Slab,
};

use super::{Array, CALL_BLOCKS, Peer, Places};

/// Reads in flight of a bare ring.
const RING_DEPTH: usize = 32;

/// Buffers of a bare ring at most.
const RING_BUFFERS_MAX: usize = 1 << 14;

impl Array {
    /// A bare ring for each drive, with a thread that takes the checksums. It reads into as many buffers as it has
    /// reads in flight, which may stay in the processor's cache; `widely`, into one for each block, as far as it may
    /// have so many.
    pub fn rings(&self, name: &str, widely: bool) -> Entrant<'_> {
        Entrant::new(format!("{name}, {} threads", self.files.len()), move |round| {
            let mut drives: Vec<(_, Vec<u64>)> = self.files.iter().map(|file| (file, Vec::new())).collect();
            for n in shuffled(round ^ (1 << 33), self.blocks) {
                let (file, at) = self.places[n as usize];
                drives[file].1.push(at);
            }
            let ready = &Barrier::new(drives.len() + 1);
            let one = move |file, offsets: Vec<u64>| -> io::Result<()> {
                let buffers = if widely { offsets.len().clamp(RING_DEPTH, RING_BUFFERS_MAX) } else { RING_DEPTH };
                let ring = BareRing::open_over(self.block_bytes, RING_DEPTH, buffers, Setup::Defer);
                ready.wait();
                let sum = |_: u64, block: &mut [u8]| {
                    std::hint::black_box(checksum(block));
                    Ok(())
                };
                ring?.run(file, Op::Read, offsets, sum).map(drop)
            };
            thread::scope(|scope| {
                let running: Vec<_> =
                    drives.into_iter().map(|(file, offsets)| scope.spawn(move || one(file, offsets))).collect();
                ready.wait();
                measured(self.bytes(), || {
                    running.into_iter().try_for_each(|thread| thread.join().expect("a peer does not panic"))
                })
            })
        })
    }

    /// Threads that each move one block after the other, in a random order over all of them.
    pub fn threads(&self, name: &str, threads: usize, peer: Peer) -> Entrant<'_> {
        let slabs: Vec<_> = (0..threads).map(|_| Slab::new(self.block_bytes, 1).map(Mutex::new)).collect();
        Entrant::new(format!("{name}, {threads} threads"), move |round| {
            let order: Vec<u64> = shuffled(round ^ (1 << 32), self.blocks).collect();
            let next = AtomicUsize::new(0);
            let one = |slab: &io::Result<Mutex<Slab>>| -> io::Result<()> {
                let mut slab = slab.as_ref().map_err(other)?.lock().map_err(other)?;
                while let Some(&n) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let block = match peer.into_pool {
                        // SAFETY: the pool lives as long as `self`, and a round uses each of its places once.
                        true => unsafe {
                            std::slice::from_raw_parts_mut(self.place(self.in_pool(), n).ptr, self.block_bytes)
                        },
                        false => slab.block(0),
                    };
                    let (file, at) = self.places[n as usize];
                    if !peer.writes {
                        self.files[file].read_exact_at(block, at)?;
                    }
                    if peer.sums {
                        std::hint::black_box(checksum(block));
                    }
                    if peer.writes {
                        self.files[file].write_all_at(block, at)?;
                    }
                }
                Ok(())
            };
            measured(self.bytes(), || {
                thread::scope(|scope| {
                    let running: Vec<_> = slabs.iter().map(|slab| scope.spawn(|| one(slab))).collect();
                    running.into_iter().try_for_each(|thread| thread.join().expect("a peer does not panic"))
                })
            })
        })
    }

    /// Loads, or stores, the blocks `order`, [`CALL_BLOCKS`] a call, from `callers` threads. Block `n` has the key of
    /// `n + first`.
    pub fn call(
        &self,
        order: impl IntoIterator<Item = u64>,
        callers: usize,
        first: u64,
        stores: bool,
        at: Places,
    ) -> io::Result<()> {
        let order: Vec<u64> = order.into_iter().collect();
        let calls: Vec<&[u64]> = order.chunks(CALL_BLOCKS).collect();
        let next = AtomicUsize::new(0);
        let run = || -> io::Result<()> {
            while let Some(part) = calls.get(next.fetch_add(1, Ordering::Relaxed)) {
                let keys: Vec<BlockKey> = part.iter().map(|&n| key(n + first)).collect();
                let places: Vec<Vec<Segment>> = part.iter().map(|&n| vec![self.place(at, n)]).collect();
                let results = match stores {
                    true => block_on(self.cache.store_from(&keys, None, &places)),
                    false => block_on(self.cache.load_into(&keys, &places)),
                };
                for result in results.map_err(other)? {
                    if !result.map_err(other)? {
                        return Err(other("a block is missing"));
                    }
                }
            }
            Ok(())
        };
        thread::scope(|scope| {
            let running: Vec<_> = (0..callers).map(|_| scope.spawn(run)).collect();
            running.into_iter().try_for_each(|thread| thread.join().expect("a caller does not panic"))
        })
    }
}

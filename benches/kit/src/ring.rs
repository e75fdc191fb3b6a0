//! The bare ring loop: what the disk and the kernel give when nothing stands between them and the caller.
//!
//! Benches measure the cache against it, so it leaves out everything that a loop can do without: no runtime, no index,
//! no checksum, no allocation after start, buffers and file registered once, one system call per batch of completions.
//! It is the ceiling, not an engine: a short read is an error here, never resumed.

use std::{collections::VecDeque, fs::File, io, os::fd::AsRawFd};

use io_uring::{IoUring, opcode, squeue, types::Fixed};

use crate::{
    measure::{Sample, Stopwatch},
    scratch::Slab,
};

/// How the kernel hands completions over. Both variants declare a single issuer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setup {
    /// `COOP_TASKRUN`: completion work runs at the next system call, whichever it is.
    Coop,
    /// `DEFER_TASKRUN`: completion work runs only when the loop waits for completions.
    Defer,
}

impl Setup {
    /// Both, in the order in which benches print them.
    pub const ALL: [Setup; 2] = [Setup::Coop, Setup::Defer];

    /// The name shown in tables.
    pub fn name(self) -> &'static str {
        match self {
            Setup::Coop => "coop",
            Setup::Defer => "defer",
        }
    }
}

/// What the loop does at every offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Reads a block.
    Read,
    /// Writes a block.
    Write,
}

/// A ring with `depth` operations in flight, over buffers of `block_bytes` each that it uses in turn.
pub struct BareRing {
    // Field order is drop order: the ring goes before the memory it has registered.
    ring: IoUring,
    slab: Slab,
    depth: usize,
    places: usize,
    block_bytes: usize,
    registered: bool,
}

impl BareRing {
    /// Sets the ring up and registers its buffers, one for each operation in flight: the least memory, which may stay
    /// in the processor's cache.
    pub fn open(block_bytes: usize, depth: usize, setup: Setup) -> io::Result<BareRing> {
        Self::open_over(block_bytes, depth, depth, setup)
    }

    /// The same over `places` buffers: blocks that a caller keeps have a place each.
    pub fn open_over(block_bytes: usize, depth: usize, places: usize, setup: Setup) -> io::Result<BareRing> {
        let mut ring = Self::open_plain(block_bytes, depth, places, setup)?;
        // SAFETY: the buffers stay mapped until after the ring is closed (`BareRing`'s field order), and
        // the kernel keeps registered pages alive for operations that outlive even that.
        let registered = unsafe { ring.ring.submitter().register_buffers(&ring.slab.iovecs()) };
        registered.map_err(|error| {
            let what = format!("registering {places} buffers of {block_bytes} bytes: {error}");
            io::Error::new(error.kind(), format!("{what}; raise `ulimit -l` if that is what refuses it"))
        })?;
        ring.registered = true;
        Ok(ring)
    }

    /// The same with buffers that the kernel pins anew for each operation.
    pub fn open_plain(block_bytes: usize, depth: usize, places: usize, setup: Setup) -> io::Result<BareRing> {
        assert!((1..=4096).contains(&depth), "queue depth {depth}, expected 1 to 4096");
        assert!((depth..=16_384).contains(&places), "{places} buffers, expected {depth} to 16384");
        let mut builder = IoUring::builder();
        builder.setup_single_issuer();
        match setup {
            Setup::Coop => builder.setup_coop_taskrun(),
            Setup::Defer => builder.setup_defer_taskrun(),
        };
        let ring: IoUring = builder.build(depth as u32)?;
        let slab = Slab::new(block_bytes, places)?;
        Ok(BareRing { ring, slab, depth, places, block_bytes, registered: false })
    }

    /// Runs `op` at every offset, `depth` at a time, and measures it.
    ///
    /// `on_block` sees each block with its offset: before a write to fill it, after a read to check it. It runs inside
    /// the measured time, as it does for every contender. The first failure ends the run once the ring has drained.
    pub fn run(
        &mut self,
        file: &File,
        op: Op,
        offsets: impl IntoIterator<Item = u64>,
        mut on_block: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<Sample> {
        self.ring.submitter().register_files(&[file.as_raw_fd()])?;
        let watch = Stopwatch::start();
        let blocks = self.drive(op, &mut offsets.into_iter(), &mut on_block);
        let sample = blocks.map(|blocks| watch.stop(blocks * self.block_bytes as u64));
        self.ring.submitter().unregister_files()?;
        sample
    }

    /// Keeps the ring full until the offsets end, then drains it. Returns the number of blocks.
    fn drive(
        &mut self,
        op: Op,
        offsets: &mut dyn Iterator<Item = u64>,
        on_block: &mut dyn FnMut(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<u64> {
        let mut free: VecDeque<usize> = (0..self.places).collect();
        let mut offset_of = vec![0u64; self.places];
        let mut blocks = 0;
        let mut failure = None;
        loop {
            while failure.is_none() && self.places - free.len() < self.depth {
                let Some(offset) = offsets.next() else { break };
                let index = free.pop_front().expect("there are as many buffers as operations");
                offset_of[index] = offset;
                if let Err(error) = self.push(op, index, offset, on_block) {
                    free.push_back(index);
                    failure = Some(error);
                }
            }
            if free.len() == self.places {
                return failure.map_or(Ok(blocks), Err);
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The ring itself is broken. Registered pages outlive it, so leaving at once is safe.
                Err(error) => return Err(error),
            }
            for cqe in self.ring.completion() {
                let index = cqe.user_data() as usize;
                free.push_back(index);
                let block = self.slab.block(index);
                let done = check(cqe.result(), op, offset_of[index], self.block_bytes).and_then(|()| match op {
                    Op::Read => on_block(offset_of[index], block),
                    Op::Write => Ok(()),
                });
                match done {
                    Ok(()) => blocks += 1,
                    Err(error) => failure = failure.or(Some(error)),
                }
            }
        }
    }

    /// Queues one operation on buffer `index`, which must be free.
    fn push(
        &mut self,
        op: Op,
        index: usize,
        offset: u64,
        on_block: &mut dyn FnMut(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let block = self.slab.block(index);
        if op == Op::Write {
            on_block(offset, block)?;
        }
        let (ptr, len, buffer) = (block.as_mut_ptr(), block.len() as u32, index as u16);
        let sqe: squeue::Entry = match (op, self.registered) {
            (Op::Read, true) => opcode::ReadFixed::new(Fixed(0), ptr, len, buffer).offset(offset as _).build(),
            (Op::Write, true) => opcode::WriteFixed::new(Fixed(0), ptr, len, buffer).offset(offset as _).build(),
            (Op::Read, false) => opcode::Read::new(Fixed(0), ptr, len).offset(offset as _).build(),
            (Op::Write, false) => opcode::Write::new(Fixed(0), ptr, len).offset(offset as _).build(),
        };
        // SAFETY: the buffer lives as long as the ring, and is not touched again until
        // its completion puts `index` back on the free list in `drive`.
        unsafe { self.ring.submission().push(&sqe.user_data(index as u64)) }
            .expect("the ring has an entry for each operation in flight");
        Ok(())
    }
}

/// A completion is good when it moved the whole block.
fn check(result: i32, op: Op, offset: u64, block_bytes: usize) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::from_raw_os_error(-result));
    }
    if result as usize != block_bytes {
        return Err(io::Error::other(format!("{op:?} at {offset}: found {result} bytes, expected {block_bytes}")));
    }
    Ok(())
}

//! Buffers that direct I/O accepts, for bytes whose own memory it does not.
//!
//! A process keeps those that it needed at once: mapping and pinning one costs as much as reading it.

use std::sync::Arc;

use kvhoist::internals::memory::Mapping;

use crate::{Error, Memory, Result, cuda, memory::Copies, process::PerProcess};

/// Buffers are whole huge pages, if the system has them.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Buffers that nobody uses.
static IDLE: PerProcess<Vec<Buffers>> = PerProcess::new();

/// Memory that a thread of a transfer has, in two halves.
struct Buffers {
    copies: [Copies; 2],
    /// Dropped before the memory.
    _pinned: Option<cuda::Pinned>,
    memory: Memory,
    /// No fork makes it copy-on-write, so that drives and devices use the pages that this process sees.
    pages: Arc<Mapping>,
}

/// Two buffers of one thread, and what copies between each and a transfer's memory: one is read into while the other is
/// copied. Given back when they are dropped and the copies have ended.
pub(crate) struct Bounce(Option<Buffers>);

impl Bounce {
    /// Buffers of at least so many bytes each, pinned for the device of `memory`, for the calling thread.
    pub(crate) fn take(bytes: usize, memory: Memory) -> Result<Self> {
        let fits = |buffers: &Buffers| buffers.memory == memory && buffers.half() >= bytes;
        let mut idle = IDLE.lock();
        if let Some(at) = idle.iter().position(fits) {
            let found = Bounce(Some(idle.swap_remove(at)));
            drop(idle);
            found.copies(0).enter()?;
            return Ok(found);
        }
        // The longer ones serve for what it did: it would be idle for good.
        let too_short = idle.iter().position(|buffers| buffers.memory == memory).map(|at| idle.swap_remove(at));
        drop(idle);
        drop(too_short);
        let pages = Mapping::anonymous((2 * bytes).next_multiple_of(HUGE_PAGE_BYTES));
        let pages = Arc::new(pages.map_err(|error| Error::io("map", "bounce buffers", error))?);
        let pinned = match memory {
            Memory::Host => None,
            Memory::Cuda(ordinal) => Some(cuda::pin(ordinal, &pages)?),
        };
        let copies = [Copies::open(memory)?, Copies::open(memory)?];
        Ok(Bounce(Some(Buffers { copies, _pinned: pinned, memory, pages })))
    }

    fn buffers(&self) -> &Buffers {
        self.0.as_ref().expect("taken only by the drop")
    }

    /// What copies between one of the two buffers and the transfer's memory.
    pub(crate) fn copies(&self, turn: usize) -> &Copies {
        &self.buffers().copies[turn]
    }

    /// One of the two buffers, once its copies have ended; and what copies.
    pub(crate) fn idle(&mut self, turn: usize) -> Result<(&mut [u8], &Copies)> {
        self.copies(turn).finish()?;
        let buffers = self.buffers();
        let half = buffers.half();
        // SAFETY: a half of the mapping, which this value alone reads and writes; anonymous memory is initialized.
        let bytes = unsafe { std::slice::from_raw_parts_mut(buffers.pages.ptr().as_ptr().add(turn * half), half) };
        Ok((bytes, &buffers.copies[turn]))
    }
}

impl Buffers {
    /// Bytes of each of the two: whole pages.
    fn half(&self) -> usize {
        self.pages.len() / 2
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        let buffers = self.0.take().expect("taken here only");
        // A device that fails says nothing of copies under way: the buffers are nobody's then, and stay.
        match buffers.copies.iter().try_for_each(Copies::finish) {
            Ok(()) => IDLE.lock().push(buffers),
            Err(_) => std::mem::forget(buffers),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a child, which has buffers of its own: other tests take some too.
    #[test]
    fn buffers_that_are_too_short_make_room_for_longer_ones() {
        // A fork while another thread makes the process's first mapping would leave the child waiting for that thread.
        drop(Bounce::take(1 << 20, Memory::Host).expect("memory"));
        // SAFETY: the child does nothing but what is to be tried, and ends without the parent's handlers.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: takes a number. A child that hangs is ended by the alarm.
            unsafe { libc::alarm(20) };
            let is_right = std::panic::catch_unwind(|| {
                for mib in [1, 2, 4, 1] {
                    let both = [(); 2].map(|()| Bounce::take(mib << 20, Memory::Host).expect("memory"));
                    drop(both);
                }
                let count = IDLE.lock().iter().filter(|buffers| buffers.half() == 4 << 20).count();
                (count, IDLE.lock().len()) == (2, 2)
            });
            // SAFETY: an exit.
            unsafe { libc::_exit(i32::from(!is_right.unwrap_or(false))) };
        }
        let mut status = 0;
        // SAFETY: this process's child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child");
    }

    #[test]
    fn a_forked_child_has_no_part_of_a_buffer() {
        let mut bounce = Bounce::take(1 << 20, Memory::Host).expect("memory");
        bounce.idle(0).expect("idle").0.fill(1);
        let pages = Arc::clone(&bounce.buffers().pages);
        // SAFETY: the child does nothing but what is to be tried, and ends without the parent's handlers.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut is_there = 0;
            // SAFETY: the call looks at no memory, and writes one byte.
            let found = unsafe { libc::mincore(pages.ptr().as_ptr().cast(), 1, &raw mut is_there) };
            // SAFETY: an exit.
            unsafe { libc::_exit(found + 1) };
        }
        let mut status = 0;
        // SAFETY: this process's child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child");
    }
}

//! The ring of one I/O thread: whole transfers, several in flight, without a runtime.
//!
//! On the reactor's ring an operation costs a tokio-uring slot, a task wake-up and a poll, which bounds how many blocks
//! one thread can serve. Here it costs one ring entry: the thread starts transfers, sleeps in the kernel until one has
//! completed, and takes it from a list.
//!
//! A transfer in flight stays in the [`Ring`] until the kernel is done with it, even if the ring is dropped.

#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use io_uring::{IoUring, cqueue, opcode, types};
use rustix::event::{EventfdFlags, eventfd};
use slab::Slab;

use super::{
    transfer::{Completed, InFlight},
    uring::{entry, hold, probe},
};
use crate::{block::OpKind, shield::log};

/// Entries of a ring: more than can be queued between two submissions.
const ENTRIES: u32 = 128;

/// Largest number of reads in flight in a ring, and of writes.
pub(super) const TRANSFERS_MAX: usize = 32;

/// Calls of [`Ring::drop`] that the kernel may refuse one after the other before the ring is given up: a second.
const REFUSALS_MAX: u32 = 100;

/// How long a refused call is not repeated.
const REFUSED_FOR: Duration = Duration::from_millis(10);

/// User data of the read of the ring's eventfd; no slab index has this value.
const WAKE: u64 = u64::MAX;

/// Wakes the ring's thread from [`Ring::wait`]; usable from any thread.
#[derive(Clone)]
pub(super) struct WakeFd(Arc<OwnedFd>);

impl WakeFd {
    fn new() -> io::Result<Self> {
        Ok(WakeFd(Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?)))
    }

    /// Makes the current or next [`Ring::wait`] return.
    pub(super) fn wake(&self) {
        // Only 2^64 signals that were not read could make this wait.
        let _written = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }
}

/// A ring with its transfers in flight and those completed. `T` identifies the owner of a transfer.
pub(super) struct Ring<T> {
    ring: IoUring,
    wake_fd: WakeFd,
    /// A read of `wake_fd` is in flight. Its completion resets the descriptor without another system call.
    listens: bool,
    /// The target of that read: shared with the kernel until the read has completed.
    wake_count: Box<u64>,
    in_flight: Slab<InFlight<T>>,
    /// Reads and their bytes in flight, and writes and theirs.
    moving: [(usize, usize); 2],
    completed: VecDeque<Completed<T>>,
}

impl<T> Ring<T> {
    /// A ring for the calling thread. `held` is a file that the ring holds open until all of its transfers have ended,
    /// also when the process is killed.
    ///
    /// # Errors
    /// The kernel's error, with its cause and the fix, if it refuses rings, or to hold the file.
    pub(super) fn new(held: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        probe()?;
        let mut modern = IoUring::builder();
        modern.setup_single_issuer().setup_defer_taskrun();
        let ring = match modern.build(ENTRIES) {
            // Kernels before 6.1 have no deferred task work.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(ENTRIES)?,
            other => other?,
        };
        held.map_or(Ok(()), |file| hold(&ring, file))?;
        let (in_flight, completed) =
            (Slab::with_capacity(2 * TRANSFERS_MAX), VecDeque::with_capacity(2 * TRANSFERS_MAX));
        let (wake_fd, wake_count) = (WakeFd::new()?, Box::new(0));
        Ok(Ring { ring, wake_fd, listens: false, wake_count, in_flight, moving: [(0, 0); 2], completed })
    }

    pub(super) fn wake_fd(&self) -> WakeFd {
        self.wake_fd.clone()
    }

    /// Reads or writes in flight, and their bytes.
    pub(super) fn in_flight(&self, kind: OpKind) -> (usize, usize) {
        self.moving[usize::from(kind != OpKind::Read)]
    }

    /// Whether transfers wait to be taken.
    pub(super) fn has_completed(&self) -> bool {
        !self.completed.is_empty()
    }

    /// Takes the next completed transfer, in order of completion.
    pub(super) fn take_completed(&mut self) -> Option<Completed<T>> {
        self.completed.pop_front()
    }

    /// Starts a read or a write at the next [`poll`](Self::poll) or [`wait`](Self::wait). At most [`TRANSFERS_MAX`]
    /// reads and as many writes may be in flight.
    pub(super) fn start(&mut self, transfer: InFlight<T>) {
        let (count, bytes) = &mut self.moving[usize::from(transfer.parts.kind() != OpKind::Read)];
        (*count, *bytes) = (*count + 1, *bytes + transfer.parts.len());
        let at = self.in_flight.insert(transfer);
        self.submit(at);
    }

    /// Submits the started transfers and collects completions, without sleeping.
    pub(super) fn poll(&mut self) {
        let queued = self.ring.submission().len() as u32;
        if queued == 0 && self.in_flight.is_empty() {
            return;
        }
        // The kernel's `IORING_ENTER_GETEVENTS`: with deferred task work nothing completes without it.
        const GETEVENTS: u32 = 1;
        // SAFETY: every queued entry names memory and a descriptor that `in_flight` keeps until its completion.
        let entered = unsafe { self.ring.submitter().enter::<libc::sigset_t>(queued, 0, GETEVENTS, None) };
        self.reap(entered);
    }

    /// Submits and collects as [`poll`](Self::poll) does, and sleeps until a transfer completes or [`WakeFd::wake`] is
    /// called.
    pub(super) fn wait(&mut self) {
        if !self.listens {
            let fd = types::Fd(self.wake_fd.0.as_raw_fd());
            let wake_count = (&raw mut *self.wake_count).cast();
            let listen = opcode::Read::new(fd, wake_count, size_of::<u64>() as u32).build().user_data(WAKE);
            self.listens = self.push(&listen);
        }
        let entered = self.ring.submit_and_wait(1);
        self.reap(entered);
    }

    fn push(&mut self, entry: &io_uring::squeue::Entry) -> bool {
        // SAFETY: `in_flight` keeps the file and the memory of the entry until its completion; `drop` waits for the
        // read of `wake_fd`, whose descriptor and target belong to the ring.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    /// Queues the next operation of a transfer; if the ring is full, the transfer ends with an error.
    fn submit(&mut self, at: usize) {
        let InFlight { parts, file, .. } = &self.in_flight[at];
        let entry = entry(parts.kind(), file, parts.offset(), parts.rest(), None).user_data(at as u64);
        if !self.push(&entry) {
            self.end(at, Err(io::Error::other("the ring of an I/O thread is full")));
        }
    }

    fn end(&mut self, at: usize, result: io::Result<()>) {
        let ended = self.in_flight.remove(at);
        let (count, bytes) = &mut self.moving[usize::from(ended.parts.kind() != OpKind::Read)];
        (*count, *bytes) = (*count - 1, *bytes - ended.parts.len());
        self.completed.push_back(ended.complete(result));
    }

    fn reap(&mut self, entered: io::Result<usize>) {
        if let Some(error) = refusal(entered) {
            // Operations that were submitted continue; the next call submits the others.
            log(|| tracing::warn!(%error, "the ring of an I/O thread refused a call; retrying"));
            std::thread::sleep(REFUSED_FOR);
        }
        self.collect();
    }

    /// Collects completions.
    fn collect(&mut self) {
        loop {
            let Some(completion) = self.ring.completion().next() else { return };
            self.complete(&completion);
        }
    }

    fn complete(&mut self, completion: &cqueue::Entry) {
        if completion.user_data() == WAKE {
            self.listens = false;
            return;
        }
        let at = completion.user_data() as usize;
        let code = completion.result();
        let result = usize::try_from(code).map_err(|_| io::Error::from_raw_os_error(code.saturating_neg()));
        match self.in_flight[at].parts.account(result) {
            Some(ended) => self.end(at, ended),
            None => self.submit(at),
        }
    }
}

/// The error of a call that the kernel refused, if it is none that passes by itself.
fn refusal(entered: io::Result<usize>) -> Option<io::Error> {
    entered.err().filter(|error| !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)))
}

impl<T> Drop for Ring<T> {
    /// Waits for the kernel, which may still write to the memory of transfers in flight.
    ///
    /// A kernel that refuses every call does not tell when it is done. Then the transfers, with their memory, are as
    /// those of a drive that does not answer: they stay in flight for good.
    fn drop(&mut self) {
        // Completes the read of `wake_fd`.
        self.wake_fd.wake();
        let mut refused = 0;
        while self.listens || !self.in_flight.is_empty() {
            let entered = self.ring.submit_and_wait(1);
            self.collect();
            let Some(error) = refusal(entered) else {
                refused = 0;
                continue;
            };
            refused += 1;
            if refused == REFUSALS_MAX {
                let transfers = std::mem::take(&mut self.in_flight);
                let count = transfers.len();
                std::mem::forget((transfers, std::mem::take(&mut self.wake_count), self.wake_fd.clone()));
                log(|| tracing::error!(%error, count, "the kernel refuses a thread's ring; its transfers are lost"));
                return;
            }
            std::thread::sleep(REFUSED_FOR);
        }
    }
}

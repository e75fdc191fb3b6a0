//! A ring for one worker thread: complete transfers, several in flight, without a runtime.
//!
//! On the reactor's ring an operation costs a tokio-uring slot, a task wake-up and a poll, which bounds how many blocks
//! one thread can serve. On a [`Lane`] it costs one ring entry: the thread starts transfers, sleeps in the kernel until
//! one has completed, and takes it from a list.
//!
//! A transfer's memory and file stay in the lane until the kernel is done with them, even if the lane is dropped.

#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use io_uring::{IoUring, cqueue, opcode, types};
use rustix::event::{EventfdFlags, eventfd};
use slab::Slab;

use super::{entry, hold::hold, probe::probe};
use crate::{
    block::{FileId, OpKind},
    io::{blocking::call, check_offset, full::Progress},
    memory::Lent,
    shield::caught,
};

/// Entries of a lane's ring: more than can be queued between two submissions.
const ENTRIES: u32 = 128;

/// Largest number of reads in flight in a lane, and of writes.
pub(crate) const TRANSFERS_MAX: usize = 32;

/// Calls of [`Lane::drop`] that the kernel may refuse one after the other before the lane is given up: a second.
const REFUSALS_MAX: u32 = 100;

/// How long a refused call is not repeated.
const REFUSED_FOR: Duration = Duration::from_millis(10);

/// User data of the read of the bell's eventfd; no slab index has this value.
const BELL: u64 = u64::MAX;

/// A complete read or write.
pub struct Transfer {
    /// A read or a write.
    pub kind: OpKind,
    /// The file.
    pub file: Arc<File>,
    /// The file's id in errors.
    pub id: FileId,
    /// Made by a system call of the worker's ([`Storage::is_in_memory`](crate::io::Storage::is_in_memory)).
    pub is_in_memory: bool,
    /// Offset in the file.
    pub offset: u64,
    /// The memory.
    pub buf: Lent,
}

/// A completed transfer.
pub struct Completed<T> {
    /// The memory.
    pub buf: Lent,
    /// The result that [`read_full`](crate::io::read_full) or [`write_full`](crate::io::write_full) would give.
    pub result: io::Result<()>,
    /// The owner of the transfer.
    pub tag: T,
}

/// A transfer in flight. `buf` is declared before `tag`, and so dropped first: dropping the tag reports that the memory
/// is free.
struct InFlight<T> {
    /// Taken only while its range is changed.
    buf: Option<Lent>,
    file: Arc<File>,
    kind: OpKind,
    offset: u64,
    /// Bytes that the caller had skipped.
    skipped: usize,
    progress: Progress,
    tag: T,
}

impl Transfer {
    /// Makes the transfer by system calls, without a ring.
    pub(crate) fn make<T>(self, tag: T) -> Completed<T> {
        match InFlight::new(self, tag) {
            Ok(transfer) => transfer.make(),
            Err(refused) => refused,
        }
    }
}

impl<T> InFlight<T> {
    /// A transfer of which nothing is done yet; completed, where its offset is impossible.
    fn new(transfer: Transfer, tag: T) -> Result<Self, Completed<T>> {
        let Transfer { kind, file, id, is_in_memory: _, offset, buf } = transfer;
        if let Err(error) = check_offset(offset, buf.len()) {
            return Err(Completed { buf, result: Err(error), tag });
        }
        let (skipped, progress) = (buf.skipped(), Progress::new(kind, id, offset, &buf));
        Ok(InFlight { buf: Some(buf), file, kind, offset, skipped, progress, tag })
    }

    /// Makes the transfer by system calls.
    fn make(mut self) -> Completed<T> {
        let mut result = Ok(());
        while result.is_ok() && self.progress.done < self.progress.len {
            let buf = self.buf.take().expect("put back after every part").rewind();
            let buf = self.buf.insert(buf.skip(self.skipped + self.progress.done));
            let moved = call(self.kind, &self.file, self.offset + self.progress.done as u64, Some(buf));
            result = self.progress.account(moved);
        }
        let InFlight { buf, skipped, tag, .. } = self;
        let buf = buf.expect("put back after every part").rewind().skip(skipped);
        Completed { buf, result, tag }
    }
}

/// Wakes the lane's thread from [`Lane::wait`]; usable from any thread.
#[derive(Clone)]
pub(crate) struct Bell(Arc<OwnedFd>);

impl Bell {
    fn new() -> io::Result<Self> {
        Ok(Bell(Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?)))
    }

    /// Makes the current or next [`Lane::wait`] return.
    pub(crate) fn ring(&self) {
        // Only 2^64 signals that were not read could make this wait.
        let _written = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }
}

/// A ring with its transfers in flight and those completed. `T` identifies the owner of a transfer.
pub(crate) struct Lane<T> {
    ring: IoUring,
    bell: Bell,
    /// The ring has a read of the bell in flight. Its completion resets the bell without another system call.
    listens: bool,
    /// The target of that read: shared with the kernel until the read has completed.
    heard: Box<u64>,
    in_flight: Slab<InFlight<T>>,
    /// Reads and their bytes in flight, and writes and theirs.
    moving: [(usize, usize); 2],
    completed: VecDeque<Completed<T>>,
    /// Transfers to be made by system calls, each when it is taken as completed: its bytes are still in the processor's
    /// cache then.
    calls: VecDeque<InFlight<T>>,
}

impl<T> Lane<T> {
    /// A lane for the calling thread. `held` is a file that the ring holds open until all of its transfers have ended,
    /// also when the process is killed.
    ///
    /// # Errors
    /// The kernel's error, with its cause and the fix, if it refuses rings, or to hold the file.
    pub(crate) fn new(held: Option<BorrowedFd<'_>>) -> io::Result<Self> {
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
        let (bell, heard, calls) = (Bell::new()?, Box::new(0), VecDeque::new());
        Ok(Lane { ring, bell, listens: false, heard, in_flight, moving: [(0, 0); 2], completed, calls })
    }

    pub(crate) fn bell(&self) -> Bell {
        self.bell.clone()
    }

    /// Reads or writes in flight, and their bytes.
    pub(crate) fn in_flight(&self, kind: OpKind) -> (usize, usize) {
        self.moving[usize::from(kind == OpKind::Write)]
    }

    fn moving(&mut self, kind: OpKind) -> &mut (usize, usize) {
        &mut self.moving[usize::from(kind == OpKind::Write)]
    }

    fn moves(&mut self, transfer: &InFlight<T>) {
        let (count, bytes) = self.moving(transfer.kind);
        (*count, *bytes) = (*count + 1, *bytes + transfer.progress.len);
    }

    fn moved(&mut self, transfer: &InFlight<T>) {
        let (count, bytes) = self.moving(transfer.kind);
        (*count, *bytes) = (*count - 1, *bytes - transfer.progress.len);
    }

    /// Whether transfers wait that will be made by system calls.
    pub(crate) fn has_calls(&self) -> bool {
        !self.calls.is_empty()
    }

    /// Whether transfers wait to be taken.
    pub(crate) fn has_completed(&self) -> bool {
        !self.completed.is_empty() || self.has_calls()
    }

    /// Takes the next completed transfer, in order of completion; if there is none, makes one by system calls.
    pub(crate) fn take_completed(&mut self) -> Option<Completed<T>> {
        if self.completed.is_empty()
            && let Some(call) = self.calls.pop_front()
        {
            self.moved(&call);
            return Some(call.make());
        }
        self.completed.pop_front()
    }

    /// Starts a transfer at the next [`poll`](Self::poll) or [`wait`](Self::wait). At most [`TRANSFERS_MAX`] reads and
    /// as many writes may be in flight.
    pub(crate) fn start(&mut self, transfer: Transfer, tag: T) {
        let is_in_memory = transfer.is_in_memory;
        let transfer = match InFlight::new(transfer, tag) {
            Ok(transfer) => transfer,
            Err(refused) => return self.completed.push_back(refused),
        };
        self.moves(&transfer);
        if is_in_memory {
            return self.calls.push_back(transfer);
        }
        let at = self.in_flight.insert(transfer);
        self.submit(at);
    }

    /// Submits the started transfers and collects completions, without sleeping.
    pub(crate) fn poll(&mut self) {
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

    /// Submits and collects as [`poll`](Self::poll) does, and sleeps until a transfer completes or the bell rings.
    pub(crate) fn wait(&mut self) {
        if !self.listens {
            let fd = types::Fd(self.bell.0.as_raw_fd());
            let heard = (&raw mut *self.heard).cast();
            let listen = opcode::Read::new(fd, heard, size_of::<u64>() as u32).build().user_data(BELL);
            self.listens = self.push(&listen);
        }
        let entered = self.ring.submit_and_wait(1);
        self.reap(entered);
    }

    fn push(&mut self, entry: &io_uring::squeue::Entry) -> bool {
        // SAFETY: `in_flight` keeps the file and the memory of the entry until its completion; `drop` waits for the
        // read of the bell, whose descriptor and target belong to the lane.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    /// Queues the next operation of a transfer; if the ring is full, the transfer ends with an error.
    fn submit(&mut self, at: usize) {
        let in_flight = &self.in_flight[at];
        let buf = in_flight.buf.as_ref().expect("put back before it is submitted");
        let offset = in_flight.offset + in_flight.progress.done as u64;
        let entry = entry(in_flight.kind, &in_flight.file, offset, buf, None).user_data(at as u64);
        if !self.push(&entry) {
            self.end(at, Err(io::Error::other("the ring of a worker is full")));
        }
    }

    fn end(&mut self, at: usize, result: io::Result<()>) {
        let ended = self.in_flight.remove(at);
        self.moved(&ended);
        let InFlight { buf, skipped, tag, .. } = ended;
        let buf = buf.expect("put back before it ends").rewind().skip(skipped);
        self.completed.push_back(Completed { buf, result, tag });
    }

    fn reap(&mut self, entered: io::Result<usize>) {
        if let Some(error) = refusal(entered) {
            // Operations that were submitted continue; the next call submits the others.
            tracing::warn!(%error, "the ring of a worker refused a call; retrying");
            std::thread::sleep(REFUSED_FOR);
        }
        self.collect();
    }

    /// Collects completions.
    fn collect(&mut self) {
        let mut completions = [const { None::<cqueue::Entry> }; 2 * ENTRIES as usize];
        let mut count = 0;
        for (place, completion) in completions.iter_mut().zip(self.ring.completion()) {
            *place = Some(completion);
            count += 1;
        }
        for completion in completions.into_iter().take(count).flatten() {
            self.complete(&completion);
        }
    }

    fn complete(&mut self, completion: &cqueue::Entry) {
        if completion.user_data() == BELL {
            self.listens = false;
            return;
        }
        let at = completion.user_data() as usize;
        let code = completion.result();
        let result = usize::try_from(code).map_err(|_| io::Error::from_raw_os_error(code.saturating_neg()));
        let in_flight = &mut self.in_flight[at];
        if let Err(error) = in_flight.progress.account(result) {
            return self.end(at, Err(error));
        }
        if in_flight.progress.done == in_flight.progress.len {
            return self.end(at, Ok(()));
        }
        let buf = in_flight.buf.take().expect("put back when it was submitted");
        in_flight.buf = Some(buf.rewind().skip(in_flight.skipped + in_flight.progress.done));
        self.submit(at);
    }
}

/// The error of a call that the kernel refused, if it is none that passes by itself.
fn refusal(entered: io::Result<usize>) -> Option<io::Error> {
    entered.err().filter(|error| !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)))
}

impl<T> Drop for Lane<T> {
    /// Waits for the kernel, which may still write to the memory of transfers in flight.
    ///
    /// A kernel that refuses every call does not tell when it is done. Then the transfers, with their memory, are as
    /// those of a drive that does not answer: they stay in flight for good.
    fn drop(&mut self) {
        // Completes the read of the bell.
        self.bell.ring();
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
                std::mem::forget((transfers, std::mem::take(&mut self.heard), self.bell.clone()));
                // It may be dropped by a panic, and a subscriber may panic too.
                _ = caught(
                    || tracing::error!(%error, count, "the kernel refuses a worker's ring; its transfers are lost"),
                );
                return;
            }
            std::thread::sleep(REFUSED_FOR);
        }
    }
}

//! A ring of one worker thread: whole transfers, several under way, without a runtime.
//!
//! What the reactor's ring costs an operation, the tokio-uring slot, a task to wake, a future to poll, bounds how many
//! blocks one thread can serve. A [`Lane`] costs an entry of the ring: its thread starts transfers, sleeps in the
//! kernel until one has ended, and takes it from a list.
//!
//! A transfer's memory and file stay in the lane until the kernel is done with them, also where the lane is dropped.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use io_uring::{IoUring, cqueue, opcode, types};
use slab::Slab;

use super::{entry, probe::probe};
use crate::{
    block::{FileId, OpKind},
    io::{check_offset, full::Progress},
    memory::Lent,
};

/// Entries of a lane's ring: more than are ever asked for between two submissions.
const ENTRIES: u32 = 64;

/// Transfers that a lane has under way at most.
pub(crate) const TRANSFERS_MAX: usize = 32;

/// The completion of the watch on the bell. No place in the slab has this number.
const BELL: u64 = u64::MAX;

/// A whole read or write.
pub(crate) struct Transfer {
    pub(crate) kind: OpKind,
    pub(crate) file: Arc<File>,
    /// What errors call the file.
    pub(crate) id: FileId,
    pub(crate) offset: u64,
    pub(crate) buf: Lent,
}

/// A transfer that the kernel is done with.
pub(crate) struct Ended<T> {
    pub(crate) buf: Lent,
    /// As [`read_full`](crate::io::read_full) and [`write_full`](crate::io::write_full) say it.
    pub(crate) result: io::Result<()>,
    pub(crate) tag: T,
}

/// A transfer under way. The memory is dropped before the tag, which tells somebody that it was.
struct Flying<T> {
    /// `None` while it is looked at.
    buf: Option<Lent>,
    file: Arc<File>,
    kind: OpKind,
    offset: u64,
    /// Bytes of `buf` that the caller had skipped.
    skipped: usize,
    progress: Progress,
    tag: T,
}

/// Wakes a lane's thread out of [`Lane::wait`], from any thread.
#[derive(Clone)]
pub(crate) struct Bell(Arc<OwnedFd>);

impl Bell {
    fn new() -> io::Result<Self> {
        // SAFETY: takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor, which is nobody else's.
        Ok(Bell(Arc::new(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// The next [`Lane::wait`], or the one under way, returns.
    pub(crate) fn ring(&self) {
        let one = 1_u64;
        // SAFETY: `one` is 8 bytes. Where the counter is full the bell has been rung already.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
    }

    fn silence(&self) {
        let mut count = 0_u64;
        // SAFETY: `count` is 8 bytes; where nobody has rung nothing is written.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), size_of::<u64>()) };
    }
}

/// A ring, its transfers under way, and those that have ended. `T` says whose a transfer is.
pub(crate) struct Lane<T> {
    ring: IoUring,
    bell: Bell,
    /// The ring watches the bell.
    listens: bool,
    flying: Slab<Flying<T>>,
    /// Bytes of what is under way.
    bytes: usize,
    ended: VecDeque<Ended<T>>,
}

impl<T> Lane<T> {
    /// A lane of the thread that this is called on.
    ///
    /// # Errors
    /// What the kernel said, explained, where it refuses rings.
    pub(crate) fn new() -> io::Result<Self> {
        probe()?;
        let mut modern = IoUring::builder();
        modern.setup_single_issuer().setup_defer_taskrun();
        let ring = match modern.build(ENTRIES) {
            // Kernels before 6.1 know no deferred task work.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(ENTRIES)?,
            other => other?,
        };
        let (flying, ended) = (Slab::with_capacity(TRANSFERS_MAX), VecDeque::with_capacity(TRANSFERS_MAX));
        Ok(Lane { ring, bell: Bell::new()?, listens: false, flying, bytes: 0, ended })
    }

    pub(crate) fn bell(&self) -> Bell {
        self.bell.clone()
    }

    /// Transfers under way, and their bytes.
    pub(crate) fn under_way(&self) -> (usize, usize) {
        (self.flying.len(), self.bytes)
    }

    /// Transfers that have ended and were not taken.
    pub(crate) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Takes a transfer that has ended, in the order of their ends.
    pub(crate) fn take_ended(&mut self) -> Option<Ended<T>> {
        self.ended.pop_front()
    }

    /// Starts a transfer, with the next [`poll`](Self::poll) or [`wait`](Self::wait). At most [`TRANSFERS_MAX`] may be
    /// under way.
    pub(crate) fn start(&mut self, transfer: Transfer, tag: T) {
        let Transfer { kind, file, id, offset, buf } = transfer;
        if let Err(error) = check_offset(offset, buf.len()) {
            return self.ended.push_back(Ended { buf, result: Err(error), tag });
        }
        let (skipped, progress) = (buf.skipped(), Progress::new(kind, id, offset, &buf));
        self.bytes += buf.len();
        let at = self.flying.insert(Flying { buf: Some(buf), file, kind, offset, skipped, progress, tag });
        self.submit(at);
    }

    /// Hands the kernel what was started, and takes what it has done. Does not sleep.
    pub(crate) fn poll(&mut self) {
        let queued = self.ring.submission().len() as u32;
        // The kernel's `IORING_ENTER_GETEVENTS`: with deferred task work nothing completes without it.
        const GETEVENTS: u32 = 1;
        // SAFETY: every queued entry names memory and a descriptor that `flying` keeps until its completion.
        let entered = unsafe { self.ring.submitter().enter::<libc::sigset_t>(queued, 0, GETEVENTS, None) };
        self.reap(entered);
    }

    /// Likewise, and sleeps until something has ended or the bell rings.
    pub(crate) fn wait(&mut self) {
        if !self.listens {
            let fd = types::Fd(self.bell.0.as_raw_fd());
            let watch = opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(BELL);
            self.listens = self.push(&watch);
        }
        let entered = self.ring.submit_and_wait(1);
        self.reap(entered);
    }

    fn push(&mut self, entry: &io_uring::squeue::Entry) -> bool {
        // SAFETY: what the entry names is kept by `flying` until its completion; the watch on the bell names no memory.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    /// Queues the next operation of a transfer, or ends it where it cannot be queued.
    fn submit(&mut self, at: usize) {
        let flying = &self.flying[at];
        let buf = flying.buf.as_ref().expect("put back before it is submitted");
        let offset = flying.offset + flying.progress.done as u64;
        let entry = entry(flying.kind, &flying.file, offset, buf, None).user_data(at as u64);
        if !self.push(&entry) {
            self.end(at, Err(io::Error::other("the ring of a worker is full")));
        }
    }

    fn end(&mut self, at: usize, result: io::Result<()>) {
        let Flying { buf, skipped, progress, tag, .. } = self.flying.remove(at);
        self.bytes -= progress.len;
        let buf = buf.expect("put back before it ends").rewind().skip(skipped);
        self.ended.push_back(Ended { buf, result, tag });
    }

    fn reap(&mut self, entered: io::Result<usize>) {
        if let Err(error) = entered
            && !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
        {
            // What was submitted goes on; what was not is submitted by the next call.
            tracing::warn!(%error, "the ring of a worker refused a call; it is tried again");
            std::thread::sleep(Duration::from_millis(10));
        }
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
            return self.bell.silence();
        }
        let at = completion.user_data() as usize;
        let code = completion.result();
        let result = usize::try_from(code).map_err(|_| io::Error::from_raw_os_error(code.saturating_neg()));
        let flying = &mut self.flying[at];
        if let Err(error) = flying.progress.account(result) {
            return self.end(at, Err(error));
        }
        if flying.progress.done == flying.progress.len {
            return self.end(at, Ok(()));
        }
        let buf = flying.buf.take().expect("put back when it was submitted");
        flying.buf = Some(buf.rewind().skip(flying.skipped + flying.progress.done));
        self.submit(at);
    }
}

impl<T> Drop for Lane<T> {
    /// Waits for the kernel: it may be writing to the memory of what is under way.
    fn drop(&mut self) {
        while !self.flying.is_empty() {
            let entered = self.ring.submit_and_wait(1);
            self.reap(entered);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::fd::OwnedFd, ptr::NonNull, thread};

    use super::*;
    use crate::memory::AlignedBuf;

    /// A file of so many pages, each filled with its number.
    fn pages(count: u8) -> Arc<File> {
        let mut file = tempfile::tempfile().expect("a file");
        (0..count).for_each(|page| file.write_all(&[page; 4096]).expect("written"));
        Arc::new(file)
    }

    fn read(file: &Arc<File>, offset: u64, buf: Lent) -> Transfer {
        Transfer { kind: OpKind::Read, file: Arc::clone(file), id: FileId(0), offset, buf }
    }

    /// Waits for so many transfers, and gives them by their tags.
    fn ended<T: Ord + Copy>(lane: &mut Lane<T>, count: usize) -> Vec<Ended<T>> {
        let mut all = Vec::new();
        while all.len() < count {
            all.extend(std::iter::from_fn(|| lane.take_ended()));
            if all.len() < count {
                lane.wait();
            }
        }
        all.sort_by_key(|ended| ended.tag);
        all
    }

    #[test]
    fn many_transfers_end_each_with_its_own_bytes() {
        let file = pages(64);
        let mut lane = Lane::new().expect("a ring");
        for round in 0..2_u64 {
            for page in 0..TRANSFERS_MAX as u64 {
                lane.start(read(&file, (round * 32 + page) << 12, AlignedBuf::zeroed(4096).lend()), page);
            }
            lane.poll();
            for Ended { buf, result, tag } in ended(&mut lane, TRANSFERS_MAX) {
                result.expect("read");
                assert_eq!(*AlignedBuf::from_lent(buf), [(round * 32 + tag) as u8; 4096]);
            }
            assert_eq!(lane.under_way(), (0, 0));
        }
    }

    #[test]
    fn the_end_of_the_file_and_an_impossible_offset_are_errors_and_give_the_memory_back() {
        let file = pages(1);
        let mut lane = Lane::new().expect("a ring");
        lane.start(read(&file, 0, AlignedBuf::zeroed(8192).lend()), 0);
        lane.start(read(&file, u64::MAX, AlignedBuf::zeroed(4096).lend()), 1);
        let [short, nowhere] = ended(&mut lane, 2).try_into().map_err(|_| ()).expect("two");
        assert_eq!(short.result.expect_err("too long").kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(AlignedBuf::from_lent(short.buf)[..4096], [0; 4096]);
        assert_eq!(nowhere.result.expect_err("past all files").kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn what_comes_in_parts_is_read_to_its_end() {
        let (from, mut to) = io::pipe().expect("a pipe");
        let file = Arc::new(File::from(OwnedFd::from(from)));
        let mut lane = Lane::new().expect("a ring");
        // No multiple of a page: then it is resumed where it ended.
        lane.start(read(&file, 1, AlignedBuf::zeroed(8192).lend()), ());
        lane.poll();
        for part in 0..4_u8 {
            to.write_all(&[part; 2048]).expect("written");
            lane.wait();
        }
        let Ended { buf, result, .. } = lane.take_ended().expect("four parts are all of it");
        result.expect("read");
        let bytes = AlignedBuf::from_lent(buf);
        assert!((0..8192).all(|at| usize::from(bytes[at]) == at / 2048));
    }

    #[test]
    fn the_bell_wakes_a_lane_that_waits_and_one_that_is_about_to() {
        let mut lane = Lane::<()>::new().expect("a ring");
        let bell = lane.bell();
        bell.ring();
        lane.wait();
        let ringer = thread::spawn(move || bell.ring());
        lane.wait();
        ringer.join().expect("no panic");
    }

    #[test]
    fn a_lane_that_is_dropped_waits_for_the_kernel() {
        let (from, mut to) = io::pipe().expect("a pipe");
        let file = Arc::new(File::from(OwnedFd::from(from)));
        let memory = Arc::new([0_u8; 4096]);
        let start = NonNull::new(memory.as_ptr().cast_mut()).expect("not null");
        // SAFETY: the array lives as long as its owner, and is looked at when the lane is gone.
        let lent = unsafe { Lent::new(start, 4096, None, Arc::clone(&memory) as _) };
        let mut lane = Lane::new().expect("a ring");
        lane.start(read(&file, 1, lent), ());
        lane.poll();
        assert_eq!(Arc::strong_count(&memory), 2, "the lane has it");
        let writer = thread::spawn(move || to.write_all(&[7; 4096]));
        drop(lane);
        assert_eq!(Arc::strong_count(&memory), 1, "the lane has given it back");
        assert_eq!(*memory, [7; 4096], "and not before the kernel was done");
        writer.join().expect("no panic").expect("written");
    }
}

//! Huge pages for memory that a caller has mapped.
//!
//! A direct I/O request has one segment for each physically contiguous range and room for a few hundred: with scattered
//! 4 KiB pages, about a megabyte. In huge pages the same memory is read and written in larger requests, at less kernel
//! time each, and is also checksummed faster.

use std::{
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use tokio::sync::{Semaphore, oneshot};

use super::mapping::HUGE_PAGE_BYTES;
use crate::fork::Home;

/// The unit of [`Prefault`]. A system with larger pages refuses it.
const PAGE_BYTES: usize = 4096;

/// Bytes per system call. A call cannot be interrupted, and takes about a second for several gigabytes.
const CALL_BYTES: usize = 1 << 30;

/// Threads of this process that move memory at a time, however many regions are pinned at once: some for each GPU of a
/// node.
const THREADS_MAX: usize = 16;

/// Moves `len` bytes from `start` into huge pages, and advises huge pages for later first uses. Contents are kept. Runs
/// on a thread of its own: copying takes some 0.2 s per GiB.
///
/// # Errors
/// 16 such threads run already, for which nobody waits: small pages do as well. Why a part could not be moved: a device
/// has pinned its pages, the kernel is older than Linux 6.1 (which only uses huge pages for later first uses), or too
/// little memory is free.
///
/// # Cancel safety
/// The thread continues. Memory unmapped meanwhile is skipped; new memory mapped in its place may be moved too, which
/// is harmless.
pub async fn collapse(start: usize, len: usize) -> io::Result<()> {
    if whole_pages(start, len).next().is_none() {
        return Ok(());
    }
    on_thread(move || each(whole_pages(start, len), collapse_now)).await
}

/// Runs `work` on a thread, which counts until then, whether anybody waits for it or not.
async fn on_thread(work: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    let too_many = |_| {
        let text = format!("{THREADS_MAX} regions are being moved into huge pages, expected fewer at a time");
        io::Error::new(io::ErrorKind::ResourceBusy, text)
    };
    let permit = threads().try_acquire_owned().map_err(too_many)?;
    let (reply, receiver) = oneshot::channel();
    let run = move || {
        let ended = work();
        drop(permit);
        drop(reply.send(ended));
    };
    thread::Builder::new().name("kvhoist-huge".into()).spawn(run)?;
    receiver.await.unwrap_or_else(|_| Err(io::Error::other("the thread that collapses huge pages ended")))
}

/// A permit a thread. A forked child has none of its parent's threads, which would give them back.
fn threads() -> Arc<Semaphore> {
    static THREADS: Mutex<Option<(Home, Arc<Semaphore>)>> = Mutex::new(None);
    let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    if threads.as_ref().is_some_and(|(home, _)| !home.is_here()) {
        // A child does not drop what threads of its parent may have changed at the fork.
        std::mem::forget(threads.take());
    }
    let (_, permits) = threads.get_or_insert_with(|| (Home::here(), Arc::new(Semaphore::new(THREADS_MAX))));
    Arc::clone(permits)
}

/// Advises huge pages for the first uses of `len` bytes from `start` on: fewer page faults and fewer TLB misses.
/// A system may refuse the advice.
pub fn prefer(start: usize, len: usize) {
    whole_pages(start, len).for_each(|(start, len)| drop(advise(start, len, libc::MADV_HUGEPAGE)));
}

/// Memory of which any thread may make the next part present, so that its user finds it cleared.
#[derive(Debug)]
pub struct Prefault {
    next: AtomicUsize,
    end: usize,
}

impl Prefault {
    /// `len` bytes from `start`. Memory that is unmapped meanwhile is skipped; the pages of new memory in its place may
    /// be made present too, which is harmless.
    pub fn new(start: usize, len: usize) -> Self {
        Prefault { next: AtomicUsize::new(start), end: start.saturating_add(len) }
    }

    /// Makes the next so many bytes present. A system may refuse: before Linux 5.14, or where memory is short.
    pub fn next(&self, bytes: usize) {
        let start = self.next.fetch_add(bytes, Ordering::Relaxed);
        let (start, end) = (start / PAGE_BYTES * PAGE_BYTES, start.saturating_add(bytes).min(self.end));
        if start < end {
            drop(advise(start, end - start, libc::MADV_POPULATE_WRITE));
        }
    }
}

/// The huge pages that lie entirely within a range, in pieces of one call each.
fn whole_pages(start: usize, len: usize) -> impl Iterator<Item = (usize, usize)> {
    let end = (start + len) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    let first = start.checked_next_multiple_of(HUGE_PAGE_BYTES).unwrap_or(end);
    (first..end).step_by(CALL_BYTES).map(move |at| (at, CALL_BYTES.min(end - at)))
}

/// Calls `collapse` for every piece, continuing after errors; returns the first error.
fn each(
    pieces: impl Iterator<Item = (usize, usize)>,
    mut collapse: impl FnMut(usize, usize) -> io::Result<()>,
) -> io::Result<()> {
    let mut result = Ok(());
    for (start, len) in pieces {
        result = result.and(collapse(start, len));
    }
    result
}

fn collapse_now(start: usize, len: usize) -> io::Result<()> {
    // For pages touched later. Refused by kernels without huge pages, and for memory that already has its own.
    advise(start, len, libc::MADV_HUGEPAGE)?;
    // A page that is briefly busy is skipped; a second call moves most of those.
    advise(start, len, libc::MADV_COLLAPSE).or_else(|_| advise(start, len, libc::MADV_COLLAPSE))
}

fn advise(start: usize, len: usize, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: none of it changes the contents or the mapping of any memory; a range that is not mapped is refused.
    let refused = unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(start), len, advice) };
    if refused == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc,
        time::{Duration, Instant},
    };

    use futures_util::FutureExt;

    use super::*;

    const HANG: Duration = Duration::from_secs(20);

    #[test]
    fn only_whole_huge_pages_are_asked_for() {
        let page = HUGE_PAGE_BYTES;
        let pieces = |start, len| whole_pages(start, len).collect::<Vec<_>>();
        assert_eq!(pieces(4 * page, 2 * page), [(4 * page, 2 * page)]);
        assert_eq!(pieces(4 * page - 4096, 2 * page), [(4 * page, page)]);
        assert_eq!(pieces(4 * page + 4096, 2 * page), [(5 * page, page)]);
        assert_eq!(pieces(4 * page + 4096, 2 * page - 4097), []);
        assert_eq!(pieces(page, CALL_BYTES + page), [(page, CALL_BYTES), (page + CALL_BYTES, page)]);
        assert_eq!(pieces(page, 0), []);
    }

    #[test]
    fn a_range_without_a_whole_huge_page_takes_no_thread() {
        let collapsed = collapse(HUGE_PAGE_BYTES + 4096, 2 * HUGE_PAGE_BYTES - 4097);
        assert!(collapsed.now_or_never().is_some(), "it started a thread");
    }

    #[test]
    fn few_threads_move_memory_at_a_time_and_a_caller_that_gives_up_keeps_no_permit() {
        let mut ends = Vec::new();
        let mut call = || {
            let (end, ended) = mpsc::channel::<()>();
            ends.push(end);
            // Until the test lets go of the other end.
            Box::pin(on_thread(move || {
                assert!(ended.recv().is_err());
                Ok(())
            }))
        };
        let mut calls: Vec<_> = std::iter::repeat_with(&mut call).take(THREADS_MAX).collect();
        assert!(calls.iter_mut().all(|call| call.now_or_never().is_none()));
        let refused = call().now_or_never().expect("nobody waits").expect_err("all threads run").to_string();
        assert_eq!(refused, "16 regions are being moved into huge pages, expected fewer at a time");
        // Those that give up: their threads run on.
        calls.truncate(THREADS_MAX / 2);
        assert!(call().now_or_never().is_some_and(|refused| refused.is_err()));
        ends.clear();
        let began = Instant::now();
        while threads().available_permits() < THREADS_MAX {
            assert!(began.elapsed() < HANG, "a permit is not given back");
            thread::yield_now();
        }
        assert!(calls.into_iter().all(|call| call.now_or_never().is_some_and(|ended| ended.is_ok())));
    }

    #[test]
    fn a_piece_that_cannot_be_moved_does_not_stop_the_others() {
        let mut asked = Vec::new();
        let ended = each([(1, 1), (2, 1), (3, 1)].into_iter(), |start, _| {
            asked.push(start);
            if start == 1 { Err(io::Error::from_raw_os_error(libc::EAGAIN)) } else { Ok(()) }
        });
        assert_eq!((asked, ended.expect_err("the first").raw_os_error()), (vec![1, 2, 3], Some(libc::EAGAIN)));
    }

    #[test]
    fn memory_is_made_present_in_parts_and_no_further_than_its_end() {
        let pages = 64;
        let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory, at a place of the kernel's choice.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE_BYTES, read_write, private, -1, 0) };
        assert_ne!(memory, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        let present = || {
            let mut present = vec![0u8; pages];
            // SAFETY: the memory is mapped, and there is a byte for each page of it.
            let asked = unsafe { libc::mincore(memory, pages * PAGE_BYTES, present.as_mut_ptr()) };
            assert_eq!(asked, 0, "{}", io::Error::last_os_error());
            present.iter().filter(|page| **page & 1 == 1).count()
        };
        let prefault = Prefault::new(memory.addr() + 16, 10 * PAGE_BYTES - 16);
        assert_eq!(present(), 0);
        for expected in [4, 8, 10, 10] {
            prefault.next(4 * PAGE_BYTES - 16);
            assert_eq!(present(), expected);
        }
        // SAFETY: mapped above, and used no more.
        unsafe { libc::munmap(memory, pages * PAGE_BYTES) };
        Prefault::new(memory.addr(), PAGE_BYTES).next(PAGE_BYTES);
    }

    #[test]
    fn memory_that_is_not_mapped_is_an_error() {
        let error = collapse_now(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES).expect_err("the first pages are never mapped");
        assert!(matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EINVAL)), "{error}");
    }
}

//! Huge pages for memory that a caller has mapped.
//!
//! Direct I/O gives a drive one piece for each range of physical memory that lies together, and a request has room for
//! a few hundred: in pages of 4 KiB that happen to lie apart, a megabyte. Moved into huge pages, the same memory is
//! read and written in larger requests, takes less of the kernel's time for each, and is summed up faster, too.

use std::{io, thread};

use tokio::sync::oneshot;

use super::mapping::HUGE_PAGE_BYTES;

/// What is asked for in one call of the system: it cannot be interrupted, and takes a second for some gigabytes.
const CALL_BYTES: usize = 1 << 30;

/// Has the system back `len` bytes from `start` on by huge pages, and move into such what is there already. What they
/// hold stays. On a thread of its own: copying takes some 0.2 s a GiB.
///
/// # Errors
/// Why part of it could not be moved: pages that a device has pinned stay where they are, kernels before Linux 6.1
/// move nothing (and use huge pages for what is touched later), and too little memory may be free.
///
/// # Cancel safety
/// The thread goes on. Memory that is unmapped meanwhile is left out; what is mapped in its place may be moved as well,
/// which nobody notices.
pub(crate) async fn gather(start: usize, len: usize) -> io::Result<()> {
    if whole_pages(start, len).next().is_none() {
        return Ok(());
    }
    let (reply, receiver) = oneshot::channel();
    let all = move || drop(reply.send(each(whole_pages(start, len), gather_now)));
    thread::Builder::new().name("kvhoist-huge".into()).spawn(all)?;
    receiver.await.unwrap_or_else(|_| Err(io::Error::other("the thread that asks for huge pages ended")))
}

/// The huge pages that lie wholly within a range, in pieces for a call each.
fn whole_pages(start: usize, len: usize) -> impl Iterator<Item = (usize, usize)> {
    let end = (start + len) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    let first = start.checked_next_multiple_of(HUGE_PAGE_BYTES).unwrap_or(end);
    (first..end).step_by(CALL_BYTES).map(move |at| (at, CALL_BYTES.min(end - at)))
}

/// Does it for every piece, also after one that failed; the first error.
fn each(
    pieces: impl Iterator<Item = (usize, usize)>,
    mut gather: impl FnMut(usize, usize) -> io::Result<()>,
) -> io::Result<()> {
    let mut result = Ok(());
    for (start, len) in pieces {
        result = result.and(gather(start, len));
    }
    result
}

fn gather_now(start: usize, len: usize) -> io::Result<()> {
    // What is touched from now on. Refused by kernels without huge pages, and for memory that has its own.
    advise(start, len, libc::MADV_HUGEPAGE)?;
    // A page that is busy for a moment is left out: once more gets most of those.
    advise(start, len, libc::MADV_COLLAPSE).or_else(|_| advise(start, len, libc::MADV_COLLAPSE))
}

fn advise(start: usize, len: usize, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: neither advice changes what any memory of this process holds, or whether it is mapped; a range that is
    // not mapped is refused.
    let refused = unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(start), len, advice) };
    if refused == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let gathered = std::pin::pin!(gather(HUGE_PAGE_BYTES + 4096, 2 * HUGE_PAGE_BYTES - 4097));
        let polled = gathered.poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
        assert!(polled.is_ready(), "somebody else is at it");
    }

    #[test]
    fn a_piece_that_cannot_be_moved_keeps_no_other_from_it() {
        let mut asked = Vec::new();
        let ended = each([(1, 1), (2, 1), (3, 1)].into_iter(), |start, _| {
            asked.push(start);
            if start == 1 { Err(io::Error::from_raw_os_error(libc::EAGAIN)) } else { Ok(()) }
        });
        assert_eq!((asked, ended.expect_err("the first").raw_os_error()), (vec![1, 2, 3], Some(libc::EAGAIN)));
    }

    #[test]
    fn memory_that_is_not_mapped_is_an_error() {
        let error = gather_now(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES).expect_err("the first pages are never mapped");
        assert!(matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EINVAL)), "{error}");
    }
}

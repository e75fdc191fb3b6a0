//! A file that a ring holds open until all of its operations have ended.
//!
//! The kernel closes the descriptors of a killed process at once, and ends the process's rings by itself some time
//! later: it awaits their operations first. It closes the files that are registered with a ring after that, so who is
//! told of the end of such a file, as the peer of a socket is, knows that these operations are over.

use std::{
    fs, io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    path::Path,
};

use io_uring::{IoUring, cqueue, opcode, register::SKIP_FILE};
use tokio_uring::{OneshotOutputTransform, UnsubmittedOneshot};

/// `IORING_REGISTER_FILES` and `IORING_UNREGISTER_FILES` of the kernel's `linux/io_uring.h`.
const REGISTER_FILES: libc::c_uint = 2;
const UNREGISTER_FILES: libc::c_uint = 3;

/// Has a ring hold `file`. Once, on the thread that the ring belongs to.
pub(in crate::io) fn hold(ring: &IoUring, file: BorrowedFd<'_>) -> io::Result<()> {
    ring.submitter().register_files(&[file.as_raw_fd()])
}

/// Has the ring of this thread's runtime hold `file`.
///
/// tokio-uring names its ring to nobody, so it is found among the rings of this process. The kernel refuses those of
/// other threads, which have a single issuer too; and the ring itself is asked whether it has the file.
pub(super) fn hold_by_runtime(runtime: &tokio_uring::Runtime, file: BorrowedFd<'_>) -> io::Result<()> {
    let mut refused = io::Error::new(io::ErrorKind::NotFound, "/proc/self/fd: found no ring of this thread");
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let is_ring = fs::read_link(entry.path()).is_ok_and(|target| target == Path::new("anon_inode:[io_uring]"));
        let Some(ring) = entry.file_name().to_str().and_then(|name| name.parse().ok()).filter(|_| is_ring) else {
            continue;
        };
        if let Err(error) = register(ring, REGISTER_FILES, &[file.as_raw_fd()]) {
            refused = error;
        } else if runtime.block_on(has_a_file()) {
            return Ok(());
        } else {
            // A ring that is not of this crate.
            register(ring, UNREGISTER_FILES, &[])?;
        }
    }
    Err(refused)
}

fn register(ring: RawFd, opcode: libc::c_uint, files: &[RawFd]) -> io::Result<()> {
    let start = if files.is_empty() { std::ptr::null() } else { files.as_ptr() };
    let count = files.len() as libc::c_uint;
    // SAFETY: the kernel reads `files` during the call, and nothing for none of them. It refuses a descriptor that is
    // no ring.
    let refused = unsafe { libc::syscall(libc::SYS_io_uring_register, ring, opcode, start, count) };
    if refused < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether a file is registered with the ring of the runtime that this is called in: changes nothing of it.
async fn has_a_file() -> bool {
    let files = Box::new(SKIP_FILE);
    let entry = opcode::FilesUpdate::new(&raw const *files, 1).build();
    UnsubmittedOneshot::new(files, Updated, entry).submit().await == 1
}

/// The number of places in the table that were visited, or an error below 0.
struct Updated;

impl OneshotOutputTransform for Updated {
    type Output = i32;
    /// Read by the kernel until the completion.
    type StoredData = Box<RawFd>;

    fn transform_oneshot_output(self, _: Box<RawFd>, completion: cqueue::Entry) -> i32 {
        completion.result()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        os::{fd::AsFd, unix::net::UnixStream},
    };

    use super::*;
    use crate::io::{
        ring::Ring,
        uring::{probe, runtime},
    };

    /// A socket that nothing holds but what `make` returns, and its peer.
    fn held<T>(make: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>) -> Option<(T, UnixStream)> {
        if let Err(error) = probe() {
            println!("SKIPPED: {error}");
            return None;
        }
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let holder = make(ours.as_fd()).expect("held");
        drop(ours);
        theirs.set_nonblocking(true).expect("set");
        Some((holder, theirs))
    }

    fn is_open(mut peer: &UnixStream) -> bool {
        matches!(peer.read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// The kernel ends a ring by itself: waits for that.
    fn ends(mut peer: &UnixStream) {
        peer.set_nonblocking(false).expect("set");
        assert_eq!(peer.read(&mut [0]).expect("the end"), 0);
    }

    #[test]
    fn the_ring_of_a_runtime_holds_a_file_until_it_is_gone_beside_other_rings() {
        let others: Vec<_> = (0..2).filter_map(|_| runtime(4, None).ok()).collect();
        let Some((holder, peer)) = held(|file| runtime(4, Some(file))) else { return };
        assert!(is_open(&peer));
        drop(others);
        assert!(is_open(&peer));
        drop(holder);
        ends(&peer);
    }

    #[test]
    fn the_ring_of_a_worker_holds_a_file_until_it_is_gone() {
        let Some((holder, peer)) = held(|file| Ring::<()>::new(Some(file))) else { return };
        assert!(is_open(&peer));
        drop(holder);
        ends(&peer);
    }
}

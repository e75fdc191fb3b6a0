//! The kernel's own interface to verbs objects, past the library: what a test does to the queue pair and the regions of
//! an engine, behind its back. Commands and structures are those of the kernel's rdma/ib_user_verbs.h.

use std::{fs, fs::File, io::Write, os::fd::FromRawFd};

const DEREG_MR: u32 = 13;
const REQ_NOTIFY_CQ: u32 = 23;
const MODIFY_QP: u32 = 26;
const QP_STATE: u32 = 1;
const ERROR_STATE: u8 = 6;

/// Handles that objects of one process may have: small numbers, for all kinds together.
pub const HANDLES: std::ops::Range<u32> = 0..64;

/// The descriptors of this process that are verbs devices: one for each context.
fn contexts() -> Vec<File> {
    let entries = fs::read_dir("/proc/self/fd").expect("proc is mounted").filter_map(Result::ok);
    let is_verbs = |path: &std::path::Path| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("/dev/infiniband/uverbs"))
    };
    let own = |entry: fs::DirEntry| {
        let number: i32 = entry.file_name().to_str()?.parse().ok()?;
        is_verbs(&entry.path()).then_some(number)
    };
    entries
        .filter_map(own)
        .map(|number| {
            // SAFETY: takes a number; gives a new descriptor, which nothing else owns.
            let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
            assert!(copy >= 0, "{}", std::io::Error::last_os_error());
            // SAFETY: as above.
            unsafe { File::from_raw_fd(copy) }
        })
        .collect()
}

/// Gives a command to every context; in how many it did something.
fn command(number: u32, words: &[u32]) -> usize {
    let mut bytes = number.to_ne_bytes().to_vec();
    bytes.extend((words.len() as u16 + 2).to_ne_bytes());
    bytes.extend(0u16.to_ne_bytes());
    words.iter().for_each(|word| bytes.extend(word.to_ne_bytes()));
    contexts().iter().filter(|context| (&**context).write(&bytes).is_ok_and(|taken| taken == bytes.len())).count()
}

/// Takes a region away from the device, if this is the handle of one.
pub fn revoke(handle: u32) -> bool {
    command(DEREG_MR, &[handle]) > 0
}

/// Moves a queue pair to its error state, if this is the handle of one.
pub fn fail_queue_pair(handle: u32) -> bool {
    // Two addresses of 32 bytes, then the handle and the mask; the state is the first byte after five more words, and a
    // pair of half words.
    let mut words = [0u32; 28];
    (words[16], words[17]) = (handle, QP_STATE);
    words[24] = u32::from_ne_bytes([ERROR_STATE, 0, 0, 0]);
    command(MODIFY_QP, &words) > 0
}

/// Asks for an event with the next completion, if this is the handle of a completion queue.
pub fn arm(handle: u32) -> bool {
    command(REQ_NOTIFY_CQ, &[handle, 0]) > 0
}

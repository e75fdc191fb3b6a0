//! Checks whether the kernel and its configuration allow io_uring.

use std::{fs::File, io};

use io_uring::{IoUring, Probe, opcode};
use rustix::fs::fstatfs;

use crate::error::Error;

/// Makes a small ring and checks that it supports the operations in use.
///
/// # Errors
/// The system's error, with its likely cause and the fix; `Unsupported` if an operation is missing.
pub fn probe() -> io::Result<()> {
    let mut ring = IoUring::new(2).map_err(|error| explain(&error, setting()))?;
    let mut known = Probe::new();
    ring.submitter().register_probe(&mut known).map_err(|error| explain(&error, setting()))?;
    let needed = [
        ("READ", opcode::Read::CODE),
        ("WRITE", opcode::Write::CODE),
        ("READ_FIXED", opcode::ReadFixed::CODE),
        ("WRITE_FIXED", opcode::WriteFixed::CODE),
        ("FSYNC", opcode::Fsync::CODE),
        ("ASYNC_CANCEL", opcode::AsyncCancel::CODE),
    ];
    let missing: Vec<_> = needed.iter().filter(|(_, code)| !known.is_supported(*code)).map(|(name, _)| *name).collect();
    if missing.is_empty() {
        return enter(&mut ring).map_err(|error| explain(&error, setting()));
    }
    let text =
        format!("io_uring lacks {}: Linux 5.10 or later is needed, or the blocking storage engine", missing.join(", "));
    Err(io::Error::new(io::ErrorKind::Unsupported, text))
}

/// The error of `storage = uring` where there is no ring.
pub fn refused(error: &io::Error) -> Error {
    let found = format!("uring, and a system that refuses it ({error})");
    Error::config("storage", found, "a system with io_uring, or storage = auto or blocking")
}

/// Submits one empty operation: a seccomp filter may allow making a ring but block its use, and operations would never
/// complete.
fn enter(ring: &mut IoUring) -> io::Result<()> {
    // SAFETY: the operation touches no memory.
    unsafe { ring.submission().push(&opcode::Nop::new().build()) }.expect("a new ring has room for two");
    ring.submit_and_wait(1)?;
    match ring.completion().next() {
        Some(done) if done.result() == 0 => Ok(()),
        Some(done) => Err(io::Error::from_raw_os_error(-done.result())),
        None => Err(io::Error::other("an operation was submitted and never completed")),
    }
}

/// The sysctl `kernel.io_uring_disabled`, if it exists (Linux 6.6 and later).
fn setting() -> Option<u8> {
    std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok()?.trim().parse().ok()
}

fn explain(error: &io::Error, io_uring_disabled: Option<u8>) -> io::Error {
    let cause = match (error.raw_os_error(), io_uring_disabled) {
        (Some(libc::ENOSYS), _) => {
            "this kernel has no io_uring (Linux 5.10 or later is needed), or a seccomp filter hides it".into()
        }
        (Some(libc::EPERM | libc::EACCES), Some(disabled @ 1..)) => format!(
            "the sysctl kernel.io_uring_disabled is {disabled}, expected 0 (or 1 with this process in the group of \
             kernel.io_uring_group)"
        ),
        (Some(libc::EPERM | libc::EACCES), _) => {
            "a seccomp filter or security module forbids io_uring: containers need a profile that allows \
             io_uring_setup, io_uring_enter and io_uring_register"
                .into()
        }
        (Some(libc::ENOMEM), _) => {
            "the ring could not be locked in memory: raise RLIMIT_MEMLOCK (`ulimit -l`) or free memory".into()
        }
        (Some(libc::EMFILE | libc::ENFILE), _) => "no file descriptor is left: raise `ulimit -n`".into(),
        _ => String::from("an unexpected error of the kernel"),
    };
    io::Error::new(
        error.kind(),
        format!("io_uring is not available: {error}: {cause}; or use the blocking storage engine"),
    )
}

/// Whether `file` is a regular file in memory, by the type of its file system: tmpfs or ramfs. (Nodes of devices lie in
/// memory too.)
///
/// Other file systems whose I/O blocks a thread, as those of networks do, are not meant: a ring's threads keep more
/// operations in flight than there are workers.
pub(in crate::io) fn is_in_memory(file: &File) -> bool {
    /// `RAMFS_MAGIC` of the kernel's `linux/magic.h`.
    const RAMFS_MAGIC: u32 = 0x8584_58f6;
    if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
        return false;
    }
    let found = fstatfs(file).map(|found| found.f_type as u32);
    found.is_ok_and(|found| [libc::TMPFS_MAGIC as u32, RAMFS_MAGIC].contains(&found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_memory_are_in_memory() {
        assert!(is_in_memory(&tempfile::tempfile_in("/dev/shm").expect("a tmpfs")));
        // Its reads block a thread too.
        assert!(!is_in_memory(&File::open("/proc/self/mounts").expect("a /proc")));
        // A node in memory.
        assert!(!is_in_memory(&File::open("/dev/null").expect("a /dev")));
    }

    #[test]
    fn refusals_are_explained_by_their_cause() {
        let cases = [
            (libc::ENOSYS, None, "no io_uring"),
            (libc::EPERM, Some(2), "kernel.io_uring_disabled is 2"),
            (libc::EPERM, Some(0), "seccomp"),
            (libc::EPERM, None, "seccomp"),
            (libc::ENOMEM, Some(0), "RLIMIT_MEMLOCK"),
            (libc::EMFILE, Some(0), "ulimit -n"),
            (libc::EINVAL, Some(0), "unexpected"),
        ];
        for (code, disabled, expected) in cases {
            let error = io::Error::from_raw_os_error(code);
            let explained = explain(&error, disabled);
            assert_eq!(explained.kind(), error.kind());
            assert!(explained.to_string().contains(expected), "{explained}");
        }
    }
}

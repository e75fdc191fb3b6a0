//! Checks whether the kernel and its configuration allow io_uring.

use std::{fs::File, io, os::fd::AsRawFd};

use io_uring::{IoUring, Probe, opcode};

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

/// Whether the kernel makes every operation on `file` by blocking a thread: by the flag (`FMODE_NOWAIT`) that io_uring
/// looks at too. A kernel that knows no such flag counts as one that blocks no thread.
pub(super) fn is_blocking(file: &File) -> bool {
    let mut byte = 0_u8;
    let part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: one range of one byte, which nothing else uses; the descriptor is open while `file` lives. Without the
    // flag it fails before it reads.
    let read = unsafe { libc::preadv2(file.as_raw_fd(), &raw const part, 1, 0, libc::RWF_NOWAIT) };
    read < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP)
}

#[cfg(test)]
mod tests {
    use super::*;

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

//! A child that is forked during the process's first call.

use std::{
    io,
    sync::atomic::{AtomicI32, Ordering},
};

use kvhoist::internals::service::Home;
use libc::{c_int, pid_t};

/// The child, forked where the first call has begun and not ended; the parent's copy.
static CHILD: AtomicI32 = AtomicI32::new(0);

/// In place of the C library's: forks in its first call.
#[unsafe(no_mangle)]
extern "C" fn pthread_atfork(_: *const (), _: *const (), _: *const ()) -> c_int {
    if CHILD.load(Ordering::Relaxed) != 0 {
        return 0;
    }
    CHILD.store(-1, Ordering::Relaxed);
    // SAFETY: the child makes one call, which is allowed in the child of many threads, and ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: takes a number. A child that hangs is ended by the signal.
        unsafe { libc::alarm(60) };
        Home::here();
        // SAFETY: ends this process and runs nothing of the parent's.
        unsafe { libc::_exit(0) };
    }
    CHILD.store(pid, Ordering::Relaxed);
    0
}

#[test]
fn a_child_forked_during_the_first_call_does_not_wait_for_its_end() {
    assert!(Home::here().is_here());
    let pid: pid_t = CHILD.load(Ordering::Relaxed);
    assert!(pid > 0, "not forked: {pid}, {}", io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: our own child, and a place for the answer.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "its status is {status:#x}");
}

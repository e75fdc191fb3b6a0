//! Detects whether this process is a forked child of the one that made a value.
//!
//! A forked child has copies of this process's values, but not what they refer to: the reactor's thread, memory that is
//! not inherited, device state. At the address of the parent's memory the child may have memory of its own, and a lock
//! that another thread held during the fork stays locked. So a value dropped in a child is left as it is.

use std::{
    mem::ManuallyDrop,
    ops::Deref,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

use crate::panics::log;

/// Grows with each fork between the process that made the first value and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process that made a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Home(u32);

impl Home {
    /// This process. Costs one load after the first call.
    pub fn here() -> Self {
        // No `Once`: a child that is forked during the first call would wait for a thread that it does not have. Calls
        // at the same time add a handler each, and a fork is then counted several times, which changes no answer.
        static IS_WATCHED: AtomicBool = AtomicBool::new(false);
        if !IS_WATCHED.load(Ordering::Acquire) {
            // SAFETY: the handler only increments a counter, which is allowed in the forked child of a multithreaded
            // process.
            let refused = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
            IS_WATCHED.store(true, Ordering::Release);
            if refused != 0 {
                let error = std::io::Error::from_raw_os_error(refused);
                let advice = "a forked child must end without dropping caches";
                log(|| tracing::warn!(%error, "forks of this process cannot be detected: {advice}"));
            }
        }
        Home(FORKS.load(Ordering::Relaxed))
    }

    /// Another process, for tests of what a forked child does.
    pub fn elsewhere() -> Self {
        Home(u32::MAX)
    }

    /// False in a forked child of that process.
    #[inline]
    pub fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }
}

/// # Safety
/// None: it adds to an atomic, which is allowed in the forked child of a multithreaded process. Unsafe only by the type
/// that `pthread_atfork` needs.
unsafe extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A value that is dropped only in the process that made it, and leaked in a forked child.
pub struct HomeBound<T> {
    value: ManuallyDrop<T>,
    home: Home,
}

impl<T> HomeBound<T> {
    /// A value that this process made.
    pub fn new(value: T) -> Self {
        HomeBound { value: ManuallyDrop::new(value), home: Home::here() }
    }
}

impl<T> Deref for HomeBound<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for HomeBound<T> {
    fn drop(&mut self) {
        if self.home.is_here() {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

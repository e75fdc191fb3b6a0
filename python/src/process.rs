//! Values that belong to the process that made them.

use std::{
    mem::ManuallyDrop,
    sync::{
        Once,
        atomic::{AtomicU32, Ordering},
    },
};

use pyo3::prelude::*;

use crate::errors;

/// How often the line of processes that led to this one has forked, since the first value was made.
///
/// A load, where the number of the process would be a system call: more than a look-up takes.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// # Safety
/// None is needed: it adds to an atomic, which a forked child of many threads may do. Unsafe by its type only.
unsafe extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Counts the forks from now on.
fn watch_forks() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler is safe in the forked child of a process with many threads: it only counts.
        let refused = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
        if refused != 0 {
            let error = std::io::Error::from_raw_os_error(refused);
            tracing::warn!(%error, "forks of this process are not noticed: a forked child must not use its caches");
        }
    });
}

/// A value of the engine, whose threads, ring and mappings exist only in the process that made it.
///
/// A forked child has the memory of the value and nothing behind it: it can neither use it nor drop it. To drop it
/// would wait for threads that are not there, or unmap addresses where the child has put memory of its own since (the
/// engine's mappings are not inherited). There it goes with the process.
pub struct ProcessLocal<T> {
    forks: u32,
    value: ManuallyDrop<T>,
}

impl<T> ProcessLocal<T> {
    pub fn new(value: T) -> Self {
        watch_forks();
        ProcessLocal { forks: FORKS.load(Ordering::Relaxed), value: ManuallyDrop::new(value) }
    }

    /// The value; in a forked child an error.
    #[inline]
    pub fn get(&self, py: Python<'_>) -> PyResult<&T> {
        self.here().ok_or_else(|| errors::forked(py))
    }

    /// The value; `None` in a forked child.
    #[inline]
    pub fn here(&self) -> Option<&T> {
        (self.forks == FORKS.load(Ordering::Relaxed)).then_some(&*self.value)
    }
}

impl<T> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        if self.here().is_some() {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

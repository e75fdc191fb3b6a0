//! Whether this is the process that a value was made in.
//!
//! A forked child has copies of this process's values, and not what stands behind them: the reactor's thread, memory
//! that is not inherited, what a device knows of this process. Where the parent's memory lies a child may have memory
//! of its own, and a lock that another thread held at the fork is held for ever. So a value that is dropped in a child
//! is left as it is.

use std::{
    mem::ManuallyDrop,
    ops::Deref,
    sync::{
        Once,
        atomic::{AtomicU32, Ordering},
    },
};

/// How often the line of processes that led to this one has forked, since the first value was made.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process that a value was made in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Home(u32);

impl Home {
    /// This process. Costs a load, after the first time.
    pub(crate) fn here() -> Self {
        static WATCH: Once = Once::new();
        WATCH.call_once(|| {
            // SAFETY: the handler does what a forked child of many threads may do: it counts.
            let refused = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
            if refused != 0 {
                let error = std::io::Error::from_raw_os_error(refused);
                let advice = "a forked child must end without dropping caches";
                tracing::warn!(%error, "forks of this process are not noticed: {advice}");
            }
        });
        Home(FORKS.load(Ordering::Relaxed))
    }

    /// False in a forked child of that process.
    pub(crate) fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }
}

/// # Safety
/// None is needed: it adds to an atomic, which a forked child of many threads may do. Unsafe by its type only.
unsafe extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A value that is dropped in the process that made it, and left as it is in a forked child.
pub(crate) struct HomeBound<T> {
    value: ManuallyDrop<T>,
    home: Home,
}

impl<T> HomeBound<T> {
    pub(crate) fn new(value: T) -> Self {
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

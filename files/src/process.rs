//! Values that a forked child does not share with its parent.

use std::{
    process, ptr,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicPtr, Ordering},
    },
};

/// A value of which each process has its own, behind a lock: in a forked child that of the parent may stay locked, by a
/// thread that did not come along.
pub(crate) struct PerProcess<T>(AtomicPtr<Owned<T>>);

struct Owned<T> {
    process: u32,
    value: Mutex<T>,
}

impl<T: Default + Send> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        PerProcess(AtomicPtr::new(ptr::null_mut()))
    }

    /// This process's, which begins as the default. A forked child leaves its parent's as it is.
    pub(crate) fn lock(&'static self) -> MutexGuard<'static, T> {
        self.owned().value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn owned(&'static self) -> &'static Owned<T> {
        let (process, found) = (process::id(), self.0.load(Ordering::Acquire));
        // SAFETY: null, or put there below and never freed.
        if let Some(owned) = unsafe { found.as_ref() }.filter(|owned| owned.process == process) {
            return owned;
        }
        let made = Box::into_raw(Box::new(Owned { process, value: Mutex::default() }));
        match self.0.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: never freed from here on.
            Ok(_) => unsafe { &*made },
            Err(other) => {
                // SAFETY: nobody else has seen it.
                drop(unsafe { Box::from_raw(made) });
                // SAFETY: as above; another thread of this process has made it meanwhile.
                unsafe { &*other }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_a_process_share_the_value_and_a_forked_child_has_another_which_nobody_has_locked() {
        static COUNT: PerProcess<u32> = PerProcess::new();
        std::thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(|| *COUNT.lock() += 1))));
        let locked = COUNT.lock();
        assert_eq!(*locked, 8);
        // SAFETY: the child does nothing but what is to be tried, and ends without the parent's handlers.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: an alarm and an exit. A child that hangs is ended by the alarm.
            unsafe {
                libc::alarm(20);
                libc::_exit((*COUNT.lock()).cast_signed());
            }
        }
        let mut status = 0;
        // SAFETY: this process's child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child");
        drop(locked);
        assert_eq!(*COUNT.lock(), 8);
    }
}

//! The mutex of the shared state, which a model checker can replace.

#[cfg(test)]
mod modelled;

#[cfg(test)]
use modelled as primitives;
#[cfg(not(test))]
use std::sync as primitives;

use std::sync::TryLockError;

pub(crate) use primitives::MutexGuard;

/// Why a lock was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Another thread has it.
    Taken,
    /// An invariant is broken.
    Broken,
}

/// A mutex that a panic of its holder poisons for good.
pub(crate) struct Mutex<T>(primitives::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Mutex(primitives::Mutex::new(value))
    }

    /// Locks. A poisoned lock means that an invariant is broken: continuing could serve wrong bytes, so the panic
    /// propagates.
    #[inline(always)] // each hit pays for it
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.try_lock().unwrap_or_else(|_| self.wait())
    }

    #[cold]
    fn wait(&self) -> MutexGuard<'_, T> {
        // A model checker has every order without it.
        #[cfg(not(test))]
        if let Some(guard) = self.spin() {
            return guard;
        }
        self.lock_unless_poisoned().expect("an invariant broke under the index lock")
    }

    /// Tries for a few microseconds: the lock is held for less, and a thread that sleeps and is woken costs more.
    #[cfg(not(test))]
    fn spin(&self) -> Option<MutexGuard<'_, T>> {
        const ATTEMPTS: u32 = 24;
        const PAUSES: u32 = 4;
        for _ in 0..ATTEMPTS {
            if let Ok(guard) = self.try_lock() {
                return Some(guard);
            }
            for _ in 0..PAUSES {
                std::hint::spin_loop();
            }
        }
        None
    }

    /// Locks, unless another thread has the lock or an invariant is broken.
    #[inline]
    pub(crate) fn try_lock(&self) -> Result<MutexGuard<'_, T>, Refused> {
        self.0.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => Refused::Taken,
            TryLockError::Poisoned(_) => Refused::Broken,
        })
    }

    /// Locks; `None` if an invariant is broken.
    #[inline]
    pub(crate) fn lock_unless_poisoned(&self) -> Option<MutexGuard<'_, T>> {
        self.0.lock().ok()
    }
}

//! The one lock, so that a model checker can be put in its place.

#[cfg(test)]
mod modelled;

#[cfg(test)]
use modelled as primitives;
#[cfg(not(test))]
use std::sync as primitives;

pub(crate) use primitives::MutexGuard;

/// A mutex whose holders never panic, and so is never poisoned.
pub(crate) struct Mutex<T>(primitives::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Mutex(primitives::Mutex::new(value))
    }

    /// Locks. A poisoned lock means that an invariant broke under it: going on could serve wrong
    /// bytes, so the panic spreads.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("an invariant broke under the index lock")
    }
}

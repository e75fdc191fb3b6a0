//! The mutex of the shared state, which a model checker can replace.

#[cfg(test)]
mod modelled;

#[cfg(test)]
use modelled as primitives;
#[cfg(not(test))]
use std::sync as primitives;

pub(crate) use primitives::MutexGuard;

/// A mutex whose holders never panic, so that it is never poisoned.
pub(crate) struct Mutex<T>(primitives::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Mutex(primitives::Mutex::new(value))
    }

    /// Locks. A poisoned lock means that an invariant is broken: continuing could serve wrong bytes, so the panic
    /// propagates.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("an invariant broke under the index lock")
    }
}

//! For unit tests: inside an execution of a model, the model checker's mutex; anywhere else the standard library's.

use std::{
    ops::{Deref, DerefMut},
    sync::{LockResult, PoisonError, TryLockError, TryLockResult},
};

pub(crate) enum Mutex<T> {
    Real(std::sync::Mutex<T>),
    Modelled(shuttle::sync::Mutex<T>),
}

pub(crate) enum MutexGuard<'a, T> {
    Real(std::sync::MutexGuard<'a, T>),
    Modelled(shuttle::sync::MutexGuard<'a, T>),
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        match shuttle::current::try_get_current_task() {
            None => Mutex::Real(std::sync::Mutex::new(value)),
            Some(_) => Mutex::Modelled(shuttle::sync::Mutex::new(value)),
        }
    }

    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        match self {
            Mutex::Real(mutex) => wrap(mutex.lock(), MutexGuard::Real),
            Mutex::Modelled(mutex) => wrap(mutex.lock(), MutexGuard::Modelled),
        }
    }

    pub(crate) fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        match self {
            Mutex::Real(mutex) => try_wrap(mutex.try_lock(), MutexGuard::Real),
            Mutex::Modelled(mutex) => try_wrap(mutex.try_lock(), MutexGuard::Modelled),
        }
    }
}

fn try_wrap<G, M>(locked: TryLockResult<G>, guard: impl Fn(G) -> M) -> TryLockResult<M> {
    match locked {
        Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
        Err(TryLockError::Poisoned(poisoned)) => Ok(wrap(Err(poisoned), guard)?),
        Ok(inner) => Ok(guard(inner)),
    }
}

fn wrap<G, M>(locked: LockResult<G>, guard: impl Fn(G) -> M) -> LockResult<M> {
    match locked {
        Ok(inner) => Ok(guard(inner)),
        Err(poisoned) => Err(PoisonError::new(guard(poisoned.into_inner()))),
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        match self {
            MutexGuard::Real(guard) => guard,
            MutexGuard::Modelled(guard) => guard,
        }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            MutexGuard::Real(guard) => guard,
            MutexGuard::Modelled(guard) => guard,
        }
    }
}

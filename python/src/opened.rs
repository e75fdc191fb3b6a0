//! A cache that a process has opened, and the memory of the program that it uses.

use std::sync::{Arc, Mutex, MutexGuard, atomic::AtomicBool};

use kvhoist::Cache;
use pyo3::Python;

use crate::{blocks::Blocks, region::Registrations};

/// An open cache, in the process that opened it.
pub struct Opened {
    pub cache: Cache,
    pub registrations: Arc<Registrations>,
    /// Memory of calls that a signal interrupted, for as long as their movements use it. Used with the interpreter's
    /// lock only, and nothing of Python's is called under its own, for the collector of cycles.
    pub interrupted: Mutex<Vec<Blocks>>,
    /// Whether a caller of `close` has got its result.
    pub told: AtomicBool,
}

impl Opened {
    pub fn interrupted(&self) -> MutexGuard<'_, Vec<Blocks>> {
        self.interrupted.lock().expect("nothing panics under it")
    }

    /// Lets go of the memory of interrupted calls whose movements have ended.
    pub fn reap(&self) {
        let (ended, going_on) =
            std::mem::take(&mut *self.interrupted()).into_iter().partition(|blocks| blocks.region.is_unused());
        *self.interrupted() = going_on;
        drop::<Vec<Blocks>>(ended);
    }

    /// Waits until no movement uses the program's memory, and releases it.
    pub fn release(&self, py: Python<'_>) {
        self.registrations.clear(py);
        let interrupted = std::mem::take(&mut *self.interrupted());
        drop(interrupted);
    }
}

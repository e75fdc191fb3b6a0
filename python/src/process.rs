//! Values that belong to the process that made them.

use std::mem::ManuallyDrop;

use pyo3::prelude::*;

use crate::errors;

/// A value of the engine, whose threads, ring and mappings exist only in the process that made it.
///
/// A forked child has the memory of the value and nothing behind it: it can neither use it nor drop it. To drop it
/// would wait for threads that are not there, or unmap addresses where the child has put memory of its own since (the
/// engine's mappings are not inherited). There it goes with the process.
pub struct ProcessLocal<T> {
    process: u32,
    value: ManuallyDrop<T>,
}

impl<T> ProcessLocal<T> {
    pub fn new(value: T) -> Self {
        ProcessLocal { process: std::process::id(), value: ManuallyDrop::new(value) }
    }

    /// The value; in a forked child an error.
    pub fn get(&self, py: Python<'_>) -> PyResult<&T> {
        self.here().ok_or_else(|| errors::forked(py))
    }

    /// The value; `None` in a forked child.
    pub fn here(&self) -> Option<&T> {
        (self.process == std::process::id()).then_some(&*self.value)
    }
}

impl<T> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

//! The flag that an engine's polling task runs.

use std::cell::Cell;

/// Clears an engine's polling flag when its polling task ends, including when the runtime drops the task.
pub struct Polling<'a>(pub &'a Cell<bool>);

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

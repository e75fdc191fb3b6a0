//! x
mod bits;
pub mod format;
pub mod recovery;
pub mod slots;

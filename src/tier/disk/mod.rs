//! x
mod bits;
pub mod format;
pub mod slots;

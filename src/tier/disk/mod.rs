//! The disk tier: format, files, recovery, slots. No movement.

mod bits;
mod files;
pub mod format;
pub mod recovery;
pub mod slots;

pub use files::{StoreFile, open_files};
pub use format::stripe::PageId;
pub use recovery::{Counts, Recovered, RecoveredRecord, Take, recover};
pub use slots::DiskSlots;

//! The disk tier's data structures: format, files, recovery, slot table. No movement.

mod files;
pub mod format;
mod leftovers;
mod origin;
pub mod recovery;
pub mod slots;

pub use files::{FILE_NAME, ReadOnlyFile, StoreFile, cannot_open, open_files, open_read_only};
pub(crate) use files::{
    Unkept, cannot_change, check_one_name, check_writable, is_held, is_missing, open_files_unkept, random_uuid,
};
pub use format::stripe::PageId;
pub use origin::Origin;
pub use recovery::{Counts, Member, RecordSink, Recovered, RecoveredRecord, Threads, recover};
pub(crate) use recovery::{PageVisitor, RecordPages, read_tables};
pub use slots::DiskSlots;

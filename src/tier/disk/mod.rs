//! The disk tier's places: the format of a store, opening its files, recovery, and which slot holds
//! what.
//!
//! A **store** is one file or raw block device per configured path; each of them is a **member**.
//! [`files`] opens and locks them, [`recovery`] formats them or reads their records back,
//! [`slots`] keeps the books afterwards. [`format`](mod@format) says what every byte means, and is pure data:
//! no I/O, no threads, no clock.
//!
//! Nothing here moves a block; the mover does, with the offsets it gets from [`slots::DiskSlots`].

mod bits;
pub mod files;
pub mod format;
pub mod recovery;
pub mod slots;

pub use files::{StoreFile, StoreFiles};
pub use format::stripe::{PageId, Stripe};
pub use recovery::{Member, Recovered, RecoveredRecord, RecoveryCounts};
pub use slots::{DiskSlots, SlotMeta};

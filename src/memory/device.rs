//! Device memory, whichever engine provides it.

use std::ptr::NonNull;

use crate::block::Direction;

/// Every buffer of a pool begins at a multiple of this, as device allocations do.
pub const BUFFER_ALIGN: usize = 256;

/// Memory that a [`DevicePool`](crate::device::DevicePool) lies in: a device's own, or host memory that plays it.
///
/// # Safety
/// [`base`](Self::base) must be the start of one allocation of [`bytes`](Self::bytes) bytes that
/// copies in the two directions named here may read and write. Neither may change, and the
/// allocation must stay valid until the value is dropped.
pub unsafe trait DeviceMemory: Send + Sync + 'static {
    /// The name shown in metrics and by `kvhoist doctor`.
    fn kind(&self) -> &'static str;

    /// Its address, a multiple of [`BUFFER_ALIGN`]. The host may not be able to dereference it.
    fn base(&self) -> NonNull<u8>;

    /// Its length in bytes.
    fn bytes(&self) -> usize;

    /// Which way a copy from a host slot into this memory goes.
    fn promote_direction(&self) -> Direction;

    /// Which way a copy from this memory to a host slot goes.
    fn demote_direction(&self) -> Direction;
}

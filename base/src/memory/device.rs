//! The trait of device memory.

use std::ptr::NonNull;

use crate::block::Direction;

/// Alignment of every buffer of a pool, which is that of device allocations.
pub const BUFFER_ALIGN: usize = 256;

/// Memory of a `DevicePool`: a device's own, or host memory of a simulated device.
///
/// # Safety
/// [`base`](Self::base) must be the start of one allocation of [`bytes`](Self::bytes) bytes that copies in the two
/// directions below may read and write. Neither may change, and the allocation must stay valid until the value is
/// dropped.
pub unsafe trait DeviceMemory: Send + Sync + 'static {
    /// The name shown in metrics and by `kvhoist doctor`.
    fn kind(&self) -> &'static str;

    /// Address, a multiple of [`BUFFER_ALIGN`]. The host may not be able to dereference it.
    fn base(&self) -> NonNull<u8>;

    /// Length in bytes.
    fn bytes(&self) -> usize;

    /// Direction of copies from a host slot to this memory.
    fn promote_direction(&self) -> Direction;

    /// Direction of copies from this memory to a host slot.
    fn demote_direction(&self) -> Direction;
}

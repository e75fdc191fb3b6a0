//! A copy between memories, and its direction.

/// One contiguous copy.
#[derive(Debug, Clone, Copy)]
pub struct CopyOp {
    /// Source: a host or device address.
    pub src: *const u8,
    /// Destination: a host or device address.
    pub dst: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

// SAFETY: only addresses; the contract of the batch governs their use.
unsafe impl Send for CopyOp {}
// SAFETY: only addresses, as above.
unsafe impl Sync for CopyOp {}

/// Direction of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Host memory to host memory.
    HostToHost,
    /// Host memory to device memory.
    HostToDevice,
    /// Device memory to host memory.
    DeviceToHost,
}

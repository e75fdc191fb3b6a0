//! A copy from memory to memory, and its direction.

/// One contiguous copy.
#[derive(Debug, Clone, Copy)]
pub struct CopyOp {
    /// Where the bytes are: a host or a device address.
    pub src: *const u8,
    /// Where they go.
    pub dst: *mut u8,
    /// How many.
    pub len: usize,
}

// SAFETY: addresses only; what may be done with them is the batch's contract.
unsafe impl Send for CopyOp {}
// SAFETY: addresses only, as above.
unsafe impl Sync for CopyOp {}

/// Which way a batch goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Host memory to host memory.
    HostToHost,
    /// Host memory to device memory.
    HostToDevice,
    /// Device memory to host memory.
    DeviceToHost,
}

//! The types of transfers by libcufile that its callers make and match, also in a build without the engine.

use std::{
    any::Any,
    fs::File,
    sync::{Arc, atomic::AtomicI64},
    time::Duration,
};

use kvhoist_base::block::Segment;

use super::cuda::Gpu;
use crate::EngineMode;

/// Keeps memory and slots in place while libcufile may touch them.
pub type Owner = Box<dyn Any + Send>;

/// A contiguous part of a request: device memory and an offset in the file.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Where it begins in device memory.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: usize,
    /// Where it begins in the file.
    pub offset: u64,
}

// SAFETY: an address and two numbers; the contract of `Cufile::transfer` governs their use.
unsafe impl Send for Part {}

/// Result of a request.
pub enum Ended<O> {
    /// All bytes were transferred.
    Done(O),
    /// The transfer failed for this reason; the destination is undefined.
    Failed(O, String),
    /// libcufile did not complete the request in time, or its worker is gone. The request keeps what it owns.
    Stuck(String),
}

/// Consecutive segments of equal length in device memory.
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    /// The first segment.
    pub segment: Segment,
    /// Number of segments.
    pub count: usize,
}

/// What the engine needs to start.
pub struct Setup {
    /// The device.
    pub gpu: Arc<Gpu>,
    /// The store's files, in the storage's order.
    pub files: Vec<Arc<File>>,
    /// `Auto` requires a direct path, `On` accepts any.
    pub mode: EngineMode,
    /// Free device memory, and the range of each file to read into it.
    pub probe: Part,
    /// Reserves that memory for the self-test.
    pub probe_owner: Owner,
    /// The device memory of later requests.
    pub buffers: Vec<Buffer>,
    /// Keeps all of that memory mapped.
    pub keep: Arc<dyn Any + Send + Sync>,
    /// Time limit of any call.
    pub limit: Duration,
    /// Number of requests that libcufile has not completed in time.
    pub stuck: Arc<AtomicI64>,
}

/// Result of the self-test.
pub struct SelfTest {
    /// The path that reads take, with the counts that show it.
    pub evidence: String,
    /// True if all reads go from the drive to the device.
    pub direct: bool,
}

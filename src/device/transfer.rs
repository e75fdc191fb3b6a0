//! The types of transfers by libcufile that its callers make and match, also in a build without the engine.

#![cfg_attr(not(feature = "cufile"), expect(dead_code, reason = "only the engine reads most of the fields"))]

use std::{
    any::Any,
    fs::File,
    sync::{Arc, atomic::AtomicI64},
    time::Duration,
};

use super::cuda::Gpu;
use crate::{block::Segment, config::EngineMode};

/// Keeps memory and slots in place while libcufile may touch them.
pub(crate) type Owner = Box<dyn Any + Send>;

/// A contiguous part of a request: device memory and an offset in the file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    pub(crate) offset: u64,
}

// SAFETY: an address and two numbers; the contract of `Cufile::transfer` governs their use.
unsafe impl Send for Part {}

/// Result of a request.
pub(crate) enum Ended<O> {
    /// All bytes were transferred.
    Done(O),
    /// The transfer failed for this reason; the destination is undefined.
    Failed(O, String),
    /// libcufile did not complete the request in time, or its worker is gone. The request keeps what it owns.
    Stuck(String),
}

/// Consecutive segments of equal length in device memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Buffer {
    /// The first segment.
    pub(crate) segment: Segment,
    /// Number of segments.
    pub(crate) count: usize,
}

/// What the engine needs to start.
pub(crate) struct Setup {
    pub(crate) gpu: Arc<Gpu>,
    /// The store's files, in the storage's order.
    pub(crate) files: Vec<Arc<File>>,
    /// `Auto` requires a direct path, `On` accepts any.
    pub(crate) mode: EngineMode,
    /// Free device memory, and the range of each file to read into it.
    pub(crate) probe: Part,
    /// Reserves that memory for the self-test.
    pub(crate) probe_owner: Owner,
    /// The device memory of later requests.
    pub(crate) buffers: Vec<Buffer>,
    /// Keeps all of that memory mapped.
    pub(crate) keep: Arc<dyn Any + Send + Sync>,
    /// Time limit of any call.
    pub(crate) limit: Duration,
    /// Number of requests that libcufile has not completed in time.
    pub(crate) stuck: Arc<AtomicI64>,
}

/// Result of the self-test.
pub(crate) struct SelfTest {
    /// The path that reads take, with the counts that show it.
    pub(crate) evidence: String,
    /// True if all reads go from the drive to the device.
    pub(crate) direct: bool,
}

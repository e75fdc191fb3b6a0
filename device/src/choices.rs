//! Choices of whoever opens a device.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

/// How copies between host and device memory are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CopyMethod {
    /// One driver call per copy: uses the copy engines, which are fastest for megabytes.
    Loop,
    /// One driver call per batch of copies (CUDA 12.8).
    Batch,
    /// One launch of kvhoist's own kernel per batch: fastest for kilobytes, but occupies multiprocessors.
    Kernel,
}

impl CopyMethod {
    /// All methods.
    pub const ALL: [CopyMethod; 3] = [CopyMethod::Loop, CopyMethod::Batch, CopyMethod::Kernel];

    /// Name in settings and reports.
    pub fn name(self) -> &'static str {
        ["loop", "batch", "kernel"][self as usize]
    }
}

impl fmt::Display for CopyMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether an engine is used that not every machine has: an RDMA device (`DeviceConfig::gdr`), or
/// libcufile (`DeviceConfig::cufile`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineMode {
    /// If it passes its self-test when the cache is opened.
    Auto,
    /// Always, or an error when the cache is opened.
    On,
    /// Never. Its library is not loaded.
    Off,
}

/// Options of a [`CudaCopy`](crate::cuda::CudaCopy).
#[derive(Debug, Clone, Copy)]
pub struct CudaCopyOptions {
    /// Always use this method; `None`: the fastest by calibration.
    pub method: Option<CopyMethod>,
    /// Largest number of thread blocks of the copy kernel: it takes them from the inference engine's kernels.
    pub blocks_max: u32,
}

/// Options of a [`GdrCopy`](crate::gdr::GdrCopy).
#[derive(Debug, Clone)]
pub struct GdrOptions {
    /// Name of the RDMA device. `None`: the device nearest to the GPU.
    pub device: Option<String>,
    /// Largest number of work requests in flight; fewer if the device allows fewer.
    pub depth_max: u32,
    /// Largest number of callers' regions registered at a time; the least recently used one makes room.
    pub registered_max: usize,
    /// Copies have failed if nothing completes for this long. The device itself reports an error after half a second of
    /// retries.
    pub stuck_after: Duration,
}

impl Default for GdrOptions {
    fn default() -> Self {
        GdrOptions { device: None, depth_max: 4096, registered_max: 1024, stuck_after: Duration::from_secs(10) }
    }
}

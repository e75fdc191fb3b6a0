//! What a build without the cargo feature `cuda` has in place of the CUDA engine: types without values. The code that
//! uses the engine compiles as it is, and no device can be opened.

#![expect(missing_docs, reason = "said in the module that this one stands in for")]

use std::{sync::Arc, time::Duration};

use kvhoist_base::{
    error::{Error, Result},
    memory::{Arena, DeviceMemory},
};

use crate::{CopyBatch, CopyEngine, CudaCopyOptions, not_built};

/// A CUDA device: none in this build.
pub enum Gpu {}

/// The copy engine of a CUDA device.
#[derive(Clone)]
pub enum CudaCopy {}

impl CudaCopy {
    /// # Errors
    /// None: there is no device to call it with.
    pub fn new(gpu: &Arc<Gpu>, _arena: &Arc<Arena>, _options: CudaCopyOptions) -> Result<Self> {
        match **gpu {}
    }

    /// # Errors
    /// None: there is no value to call it on.
    pub fn beside(&self, _gpu: &Arc<Gpu>) -> Result<Self> {
        match *self {}
    }

    pub fn ordinal(&self) -> u32 {
        match *self {}
    }
}

pub fn device_of(_address: *const u8) -> Option<u32> {
    None
}

/// Semaphores of streams of a CUDA device.
pub enum Gates {}

/// Device memory of another process.
pub enum ImportedMemory {}

pub const IPC_HANDLE_BYTES: usize = 64;

/// A GPU: none in this build.
#[derive(Debug, Clone)]
pub struct Device {
    pub ordinal: u32,
    pub uuid: [u8; 16],
}

/// The GPUs of this machine: none that this build can use.
pub struct Discovery;

pub fn uuid_text(_uuid: &[u8; 16]) -> String {
    "unknown".into()
}

pub fn discover() -> Discovery {
    Discovery
}

impl Discovery {
    /// # Errors
    /// The feature's name.
    pub fn device_of(&self, _uuid: &[u8; 16]) -> std::result::Result<&Device, String> {
        Err(not_built("cuda"))
    }
}

/// Whether the machine has a CUDA device that this build can use.
pub fn has_device() -> bool {
    false
}

impl Gpu {
    /// # Errors
    /// [`Error::Unavailable`], which names the feature.
    pub fn open(_ordinal: u32) -> Result<Arc<Self>> {
        Err(Error::unavailable("device", not_built("cuda")))
    }

    pub fn device(&self) -> &Device {
        match *self {}
    }

    /// # Errors
    /// None: there is no value to call it on.
    pub fn export_memory(&self, _start: usize, _len: usize) -> Result<([u8; IPC_HANDLE_BYTES], u64)> {
        match *self {}
    }

    /// # Errors
    /// None: there is no value to call it on.
    pub fn import_memory(
        self: &Arc<Self>,
        _handle: &[u8; IPC_HANDLE_BYTES],
        _offset: u64,
        _len: u64,
    ) -> Result<ImportedMemory> {
        match **self {}
    }

    pub fn open_pool(
        self: &Arc<Self>,
        _options: CudaCopyOptions,
        _arena: &Arc<Arena>,
        _bytes: usize,
    ) -> Result<(Box<dyn DeviceMemory>, CudaCopy)> {
        match **self {}
    }
}

impl ImportedMemory {
    pub fn unmap(self) {
        match self {}
    }

    pub fn start(&self) -> *mut u8 {
        match *self {}
    }

    #[expect(clippy::len_without_is_empty, reason = "there is no value")]
    pub fn len(&self) -> usize {
        match *self {}
    }
}

impl CopyEngine for CudaCopy {
    fn name(&self) -> &'static str {
        match *self {}
    }

    async fn copy(&self, _batch: CopyBatch) -> (Result<()>, CopyBatch) {
        match *self {}
    }

    fn cost(&self, _batch: &CopyBatch) -> Duration {
        match *self {}
    }
}

impl Gates {
    pub fn pin(gpu: &Arc<Gpu>) {
        match **gpu {}
    }

    pub fn take(gpu: &Arc<Gpu>, _count: usize) -> Result<Gates> {
        match **gpu {}
    }

    pub fn open(&self, _at: usize, _poison: u32) {
        match *self {}
    }

    /// # Safety
    /// None: there is no value to call it on.
    pub unsafe fn wait(&self, _at: usize, _stream: usize) -> Result<()> {
        match *self {}
    }

    pub fn poison_address(&self, _at: usize) -> u64 {
        match *self {}
    }
}

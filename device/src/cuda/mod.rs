//! NVIDIA GPUs, through the CUDA driver library.
//!
//! The library is loaded at run time, so the same binary runs on machines without it. Neither building nor running
//! needs the CUDA toolkit. [`Device::all`] lists the GPUs.
//!
//! - [`Gpu`]: a device and its primary context, shared with all other users of the device in the process.
//! - [`DeviceBuffer`]: plain device memory, the [`DeviceMemory`](kvhoist_base::memory::DeviceMemory) of a pool.
//! - [`HostPin`]: host memory pinned for the device, for copies without the driver's bounce buffers.

mod checksum;
mod context;
pub mod copy;
mod discover;
mod dma_buf;
mod driver;
mod gates;
mod ipc;
mod memory;
mod module;
mod open;
mod polling;
mod stream;

pub(crate) use checksum::{ChecksumKernel, PIECE_MULTIPLE, PieceBuffer, Plan};
pub use context::Gpu;
pub use copy::CudaCopy;
pub use discover::{Device, Discovery, device_of, discover, uuid_text};
pub use dma_buf::WriteFlush;
pub use gates::Gates;
pub use ipc::{IPC_HANDLE_BYTES, ImportedMemory};
pub use memory::{DeviceBuffer, HostPin};
pub(crate) use module::{CopyKernel, Tile};
pub use open::has_device;
pub(super) use polling::Polling;
pub(crate) use stream::{BatchArrays, Event, Stream};

pub(crate) use driver::CudaError;

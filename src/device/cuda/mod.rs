//! NVIDIA GPUs, through the driver's own library.
//!
//! The library is looked for at run time: the same binary runs where there is none. Nothing here needs the CUDA
//! toolkit, neither to build nor to run; [`discover`] says what a machine has, and why not more.
//!
//! - [`Gpu`]: a device and its primary context, shared with whatever else in the process uses the device.
//! - [`DeviceBuffer`]: plain device memory, the [`DeviceMemory`](crate::memory::DeviceMemory) of a pool.
//! - [`HostPin`]: host memory made known to the device, so that it can be copied without a detour.

mod checksum;
mod context;
pub mod copy;
mod discover;
mod dma_buf;
mod driver;
mod gates;
mod memory;
mod module;
mod stream;

pub(crate) use checksum::{ChecksumKernel, PIECE_MULTIPLE, PieceBuffer, Plan};
pub use context::Gpu;
pub use discover::{Device, Discovery, discover};
pub use dma_buf::WriteFlush;
pub(crate) use gates::Gates;
pub use memory::{DeviceBuffer, HostPin};
pub(crate) use module::{CopyKernel, Tile};
pub use stream::StreamMark;
pub(crate) use stream::{BatchArrays, Event, Stream};

pub(crate) use driver::Fault;

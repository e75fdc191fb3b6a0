//! CRC-64/NVME of device memory, computed by the device.

mod kernel;
mod model;

pub(crate) use kernel::{ChecksumKernel, PieceBuffer};
pub(crate) use model::{PIECE_MULTIPLE, Plan};

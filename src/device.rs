//! The device tier: which engine copies what, and the processor as one of them. The engines are in `kvhoist-device`.

mod any;
mod memcpy;
pub(crate) mod open;

pub use any::AnyCopy;
pub use kvhoist_device::*;
pub use memcpy::Memcpy;
pub(crate) use open::{Opened, open};

use crate::error::{Error, Result};

/// Refuses device memory of another GPU than `gpu`: kernels of that one cannot reach it, nor the processor, where there
/// is none and the device is simulated.
pub fn check_device_of(address: *const u8, gpu: Option<&cuda::Gpu>) -> Result<()> {
    let ours = gpu.map(|gpu| gpu.device().ordinal);
    let Some(found) = cuda::device_of(address).filter(|&found| Some(found) != ours) else { return Ok(()) };
    let expected = match ours {
        Some(ours) => format!("memory of GPU {ours} (`device_ordinal`)"),
        None => "host memory: the device is simulated".into(),
    };
    Err(Error::argument("memory", format!("memory of GPU {found}"), expected))
}

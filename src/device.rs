//! The device tier: which engine copies what, and the processor as one of them. The engines are in `kvhoist-device`.

mod any;
mod memcpy;
pub(crate) mod open;

pub use any::AnyCopy;
pub use kvhoist_device::*;
pub use memcpy::Memcpy;
pub(crate) use open::{Opened, open};

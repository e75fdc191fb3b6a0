//! Memory for I/O and copies: aligned and lent buffers, the host arena, callers' memory and its guard, huge pages,
//! device memory, copies past the cache.

mod arena;
mod caller;
mod device;
mod guard;
pub(crate) mod huge;
mod lent;
mod mapping;
mod readable;
mod shared;
mod streaming;

pub use arena::Arena;
pub use caller::{Memory, MemoryKind};
pub use device::{BUFFER_ALIGN, DeviceMemory};
pub use guard::Guard;
#[cfg(test)]
pub(crate) use guard::tests::Memory as GuardedMemory;
pub use lent::{AlignedBuf, IoBuf, Lent};
pub(crate) use mapping::Mapping;
pub(crate) use readable::Readable;
pub use shared::SharedMemory;
pub(crate) use streaming::copy_past_cache;

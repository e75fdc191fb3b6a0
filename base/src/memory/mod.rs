//! Memory for I/O and copies: aligned and lent buffers, the host arena, callers' memory and its guard, huge pages,
//! device memory, copies past the cache, hints to the processor.

mod arena;
mod caller;
mod device;
mod guard;
#[cfg(test)]
mod guarded;
pub mod huge;
mod lent;
mod mapping;
mod prefetch;
mod shared;
mod streaming;

pub use arena::Arena;
pub use caller::{Memory, MemoryKind};
pub use device::{BUFFER_ALIGN, DeviceMemory};
pub use guard::Guard;
pub use lent::{AlignedBuf, IoBuf, Lent};
pub use mapping::Mapping;
pub use prefetch::prefetch;
pub use shared::SharedMemory;
pub use streaming::copy_past_cache;

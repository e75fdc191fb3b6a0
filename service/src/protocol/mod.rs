//! The bytes on the socket of a node's service: a handshake, then frames. Pure data, no I/O.
//!
//! docs/protocol.md shows the bytes. Nothing that a peer can send makes a decoder panic, or take more memory than the
//! bytes that were sent justify.

mod hello;
mod places;
mod reply;
mod request;
mod status;
mod table;
#[cfg(test)]
mod tests;
mod wire;

pub use hello::{Hello, Limits, MAGIC, VERSION_MAX, VERSION_MIN, Welcome};
pub use places::{BlockPlaces, Place};
pub use reply::{BlockResult, Failure, Reply};
pub use request::{Blocks, RegionKind, Request, SpaceDevice, Way};
pub use status::{ClientStatus, ServiceStatus, SpaceStatus};
pub(crate) use wire::set_id;
pub use wire::{
    FRAME_BYTES_MAX, HEADER_BYTES, Header, KEYS_MAX, Malformed, NAMESPACE_BYTES_MAX, PATH_BYTES_MAX, PLACES_MAX,
    TEXT_BYTES_MAX,
};

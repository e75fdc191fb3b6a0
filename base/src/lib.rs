//! What the crates of kvhoist share: blocks and their keys, the memory they lie in, checksums, errors.
//!
//! `kvhoist` exports what its users need; no promise of stability holds for the rest.

#[macro_use]
mod debug;

pub mod bits;
pub mod block;
pub mod checksum;
pub mod error;
pub mod fork;
pub mod memory;
pub mod panics;
pub mod runtime;

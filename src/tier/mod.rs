//! The places where blocks lie: host arena, device pool, disk slots.

pub mod arena;
pub mod device;
pub mod disk;
pub(crate) mod huge;
mod mapping;

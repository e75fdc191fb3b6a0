//! The places where blocks lie: host arena, device pool, disk slots.

pub mod device;
pub mod disk;

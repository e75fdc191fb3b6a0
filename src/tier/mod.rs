//! The places where blocks lie: the device pool.

pub mod device;

//! Places where blocks are kept.

pub mod disk;

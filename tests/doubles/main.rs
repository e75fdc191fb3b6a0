//! Engines for devices over doubles of their libraries, without a device.

#[path = "../common/mod.rs"]
mod common;

mod cuda;
#[cfg(feature = "cufile")]
mod cufile;
#[cfg(feature = "rdma")]
mod gdr;

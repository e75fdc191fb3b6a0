//! Engines for devices over doubles of their libraries, without a device.

#![expect(clippy::duplicate_mod, reason = "`apart` names tests by the module that has it")]

#[path = "../common/mod.rs"]
mod common;

mod cuda;
#[cfg(feature = "cufile")]
mod cufile;
#[cfg(feature = "rdma")]
mod gdr;

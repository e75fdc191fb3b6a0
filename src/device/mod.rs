//! Devices, and what moves bytes to and from them.

pub(crate) mod cufile;

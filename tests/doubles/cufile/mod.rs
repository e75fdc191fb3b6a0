//! The route between disk and device by libcufile, without a device: over doubles of the driver's library and of
//! libcufile (`libcufile.c`), whose transfers take effect late, and which can be told to misbehave in every way that is
//! known of the real one. Each test runs in processes of its own, because a process loads a library once.

#[path = "../../common/apart.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod apart;
use crate::common;
mod doubles;
mod regions;
mod routes;
mod trouble;

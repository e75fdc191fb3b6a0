//! Copies through an RDMA device, without one: over a double of libibverbs (`libibverbs.c`), which carries them for
//! real, late, and can be told to misbehave in every way that is known of devices; and over a device of software in a
//! guest. Each test runs in processes of its own, because a process loads a library once.

#[path = "../../common/apart.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod apart;
use crate::common;
#[path = "../../guest/machine.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod machine;

mod caches;
mod double;
mod engine;
mod foreign;
mod guest;
mod inside;
mod lifetimes;
mod opening;
mod rig;
mod scenes;
mod trouble;
mod uverbs;

//! Crashes of a whole machine, and of its disk: in a guest with a real NVMe driver, direct I/O and a ring.
//!
//! `KVHOIST_GUEST=1 cargo test -p kvhoist --test guest -- --nocapture` boots the guests. Each of them runs this same
//! program, which finds what to do in a file beside it.

#[path = "../common/mod.rs"]
mod common;
#[path = "../crash/mod.rs"]
mod crash;

mod dm;
mod faults;
mod host;
mod inside;
mod log;
mod machine;

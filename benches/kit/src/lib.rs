//! What benches measure with: [`ring`], the bare loop that is the machine's ceiling; [`measure`], rounds that are
//! fair on a noisy machine; [`pattern`], which blocks are touched and what is in them; [`routes`], the ways of blocks
//! through the cache as contenders beside that loop; [`peers`], other ways to the device, and [`cuda`], what they need;
//! [`drive`], what the contenders are driven by; [`syscalls`], how many system calls all of it makes.
//!
//! `kvhoist bench` and the benches of the library are thin on top of it. Not for use elsewhere.

#[cfg_attr(not(feature = "cuda"), path = "absent.rs")]
pub mod cuda;
#[cfg(feature = "cufile")]
mod cufile;
pub mod drive;
pub mod examples;
pub mod measure;
pub mod pattern;
pub mod peers;
mod pool;
mod report;
pub mod ring;
pub mod routes;
pub mod scratch;
pub mod syscalls;
mod way;

//! The workbench behind `kvhoist replay`: traces recorded by others and made ones, their replay through a cache with
//! every byte verified, Belady's bound, and plots. What it prints is the command's.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod belady;
pub mod curves;
mod engine;
pub mod generator;
pub mod palette;
pub mod payload;
pub mod plot;
mod tally;
pub mod ticks;
pub mod trace;
pub mod workload;

pub use engine::{Pace, ReplayError, replay};
pub use tally::{Outcome, RouteTally, Tally};

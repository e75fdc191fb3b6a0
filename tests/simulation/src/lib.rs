//! Whole caches in simulation. One seed decides the settings, the calls, the latencies, the faults, the crashes and
//! what each crash leaves; a model checks every answer, and the books are balanced at the end of each life.
//!
//! The same seed gives the same run, so a failing one is its own reproduction: `kvhoist-sim --seed N --verbose`.

mod call;
mod caller;
mod calls;
mod cancel;
mod chains;
mod computations;
mod compute;
mod context;
mod foreign;
mod life;
pub mod log;
mod many;
mod memory_calls;
mod model;
mod plan;
mod report;
mod run;
mod schedule;
mod service;
pub mod sim;
mod stranger;
mod submissions;
mod submit;
mod trial;
mod universe;

pub use plan::{LAYERED_SEEDS, STRAIGHT_SEEDS};
pub use report::Report;
pub use run::{Failure, run, run_bytes};
pub use service::{DEVICE_SEEDS, SERVICE_SEEDS};
pub use trial::{MEMORY_SEEDS, PROMPT_SEEDS, REMOTE_SEEDS, TRIAL_SEEDS};

//! The benches' own tools: the bare ring loop reads and writes what it says, and the measuring adds up.
//!
//! Cargo does not run the unit tests of benches without a harness, so they run from here.

#[path = "../benches/bare/mod.rs"]
mod bare;

//! What may go wrong, made to: dropped futures, damaged and foreign stores, crashes, faults of the machine.

#[path = "../common/mod.rs"]
mod common;

mod cancellation;
mod corruption;
mod crash_consistency;
mod machine;
mod store_refusals;

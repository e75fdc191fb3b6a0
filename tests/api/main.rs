//! The calls of a cache, as its callers see them, over real files.

#[path = "../common/mod.rs"]
mod common;

mod browse;
mod bypass_host;
mod cache;
mod compute;
mod concurrency;
mod counters;
mod earlier_runs;
mod hints;
mod keys;
mod layers;
mod lent;
mod out_of_service;
mod refusals;
mod remote;
mod remote_hangs;
mod remote_objects;
mod remote_removals;
mod remote_uploads;
mod uses;
mod workers;

//! Stores of the remote tier: S3 and what speaks its protocol, Redis and Valkey.
//!
//! [`open`] makes a [`RemoteStore`] of a URL. docs/remote.md is for operators.
//!
//! A store has threads and a runtime of its own, so its futures can be polled anywhere. No layer below repeats a failed
//! request: the cache has the deadlines and the retries.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod failure;
pub mod maintenance;
mod options;
mod place;
mod probe;
mod redis;
mod runtime;
mod s3;
mod tls;

use std::sync::Arc;

use kvhoist::remote::RemoteStore;

pub use options::OpenError;
use place::Place;
pub use probe::{PROBE_BYTES, Probe, ProbeError, probe};
use runtime::Runtime;

/// Opens the store that a URL names: `s3://bucket/prefix`, `redis://host:6379/0` or `rediss://host:6380/0` (TLS), with
/// parameters behind a question mark.
///
/// Asks the store nothing: one that cannot be reached is found by the first call. The credentials come from where the
/// tools of each store look for them: the variables, files and metadata services of AWS for S3; `REDISCLI_AUTH`, or the
/// file of the parameter `password_file`, for Redis.
///
/// # Errors
/// What is wrong with the URL, a parameter, or a file that one names. No text holds a credential.
///
/// ```
/// let store = kvhoist_remote::open("s3://cache/team-a?endpoint=http://127.0.0.1:9000&timeout_ms=2000")?;
/// assert_eq!(store.capabilities().scheme, "s3");
/// # Ok::<(), kvhoist_remote::OpenError>(())
/// ```
pub fn open(url: &str) -> Result<Arc<dyn RemoteStore>, OpenError> {
    let (place, options) = Place::parse(url)?;
    let runtime = Runtime::start(&options)?;
    Ok(match place {
        Place::S3 { bucket, prefix } => Arc::new(s3::S3::open(&bucket, &prefix, &options, runtime)?),
        Place::Redis(place) => Arc::new(redis::Redis::open(&place, &options, runtime)?),
    })
}

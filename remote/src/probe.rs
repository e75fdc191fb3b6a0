//! What a store does with all that the remote tier asks of it: for the doctor.

use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use kvhoist::remote::{Created, RemoteError, RemoteStore};

use crate::maintenance::PREFIX;

/// Bytes of the object that is written, read and deleted.
pub const PROBE_BYTES: u64 = 4 << 20;

/// What was measured. Times are of one request at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// Of a creation of [`PROBE_BYTES`].
    pub write: Duration,
    /// Of a read of [`PROBE_BYTES`].
    pub read: Duration,
    /// Of a read of one byte.
    pub first_byte: Duration,
    /// A second creation leaves the first object as it was.
    pub keeps_the_first: bool,
    /// How far this machine's clock and the store's are apart, where the store tells times.
    pub clocks_apart: Option<Duration>,
}

/// The request that failed, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{request}: {error}")]
pub struct ProbeError {
    /// What was asked for, such as `list`.
    pub request: &'static str,
    /// Why there is none of it.
    pub error: RemoteError,
}

/// Lists a store, and creates, reads and deletes an object of its own there, which no cache and no collection sees.
///
/// # Errors
/// The first request that failed.
pub async fn probe(store: &dyn RemoteStore) -> Result<Probe, ProbeError> {
    let failed = |request| move |error| ProbeError { request, error };
    let nonce = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let name = format!("{PREFIX}doctor/{}-{nonce}", std::process::id());
    let bytes: Bytes = (0..PROBE_BYTES).map(|at| (at.wrapping_mul(nonce as u64 | 1) >> 13) as u8).collect();
    store.list(&name, None).await.map_err(failed("list"))?;
    let began = Instant::now();
    store.create(&name, vec![bytes.clone()]).await.map_err(failed("create"))?;
    let write = began.elapsed();
    let measured = measure(store, &name, &bytes, write).await;
    // Also of a store that fails: nothing is left behind where it can be helped.
    let deleted = store.delete(&[name]).await.map_err(failed("delete"));
    measured.and_then(|probe| deleted.map(|()| probe))
}

/// What follows the creation.
async fn measure(store: &dyn RemoteStore, name: &str, bytes: &Bytes, write: Duration) -> Result<Probe, ProbeError> {
    let failed = |request| move |error| ProbeError { request, error };
    let now = SystemTime::now();
    let listed = store.list(name, None).await.map_err(failed("list"))?;
    let modified = listed.objects.iter().find(|object| object.name == *name).and_then(|object| object.modified);
    let apart = |time: SystemTime| time.duration_since(now).unwrap_or_else(|error| error.duration());
    let began = Instant::now();
    store.read(name, 0..1).await.map_err(failed("read"))?;
    let first_byte = began.elapsed();
    let again = store.create(name, vec![Bytes::from_static(b"another")]).await.map_err(failed("create again"))?;
    let began = Instant::now();
    let read = store.read(name, 0..PROBE_BYTES).await;
    let time = began.elapsed();
    let keeps_the_first = match read {
        Ok(read) => again == Created::Already && read == *bytes,
        // It is shorter now.
        Err(RemoteError::Invalid { .. }) => false,
        Err(error) => return Err(failed("read")(error)),
    };
    Ok(Probe { write, read: time, first_byte, keeps_the_first, clocks_apart: modified.map(apart) })
}

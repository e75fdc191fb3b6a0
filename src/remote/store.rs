//! What a cache asks of a store beyond the node.

use std::{ops::Range, pin::Pin, time::SystemTime};

use bytes::Bytes;

use super::ReadBuffer;

/// The future of a call to a [`RemoteStore`].
pub type RemoteFuture<T> = Pin<Box<dyn Future<Output = Result<T, RemoteError>> + Send>>;

/// A store beyond the node: named objects that are written once and read in ranges.
///
/// An implementation has its own runtime and threads: its futures are polled on any thread, under any runtime or none,
/// and do not block. A call begins when its future is polled first. A future that is dropped ends its call, or leaves
/// it to end by itself; it never leaves a part of an object.
///
/// Each call ends within a time that the implementation bounds, and repeats no failed request: the cache has deadlines
/// and retries.
pub trait RemoteStore: Send + Sync + 'static {
    /// What the store is good at. Asked for once.
    fn capabilities(&self) -> Capabilities;

    /// Fills the buffer with the bytes of an object from `start` on: as many as it has room for, exactly. The buffer is
    /// slots of the cache, which are free again where it is dropped.
    fn read_into(&self, object: &str, start: u64, buffer: ReadBuffer) -> RemoteFuture<ReadBuffer>;

    /// Several reads in one call: of each the object, where it starts, and its buffer; up to
    /// [`reads_per_call`](Capabilities::reads_per_call). Each answer is the buffer, [`RemoteError::NotFound`] or
    /// [`RemoteError::Invalid`]; another error ends the call.
    ///
    /// By default one read after the other.
    fn read_each(&self, reads: Vec<(String, u64, ReadBuffer)>) -> RemoteFuture<Vec<Result<ReadBuffer, RemoteError>>> {
        let reads: Vec<_> =
            reads.into_iter().map(|(object, start, buffer)| self.read_into(&object, start, buffer)).collect();
        Box::pin(async move {
            let mut answers = Vec::with_capacity(reads.len());
            for read in reads {
                answers.push(match read.await {
                    answer @ (Ok(_) | Err(RemoteError::NotFound | RemoteError::Invalid { .. })) => answer,
                    Err(error) => return Err(error),
                });
            }
            Ok(answers)
        })
    }

    /// The bytes of a range of an object.
    fn read(&self, object: &str, range: Range<u64>) -> RemoteFuture<Vec<u8>> {
        let bytes = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
        let read = self.read_into(object, range.start, ReadBuffer::new(bytes));
        Box::pin(async move { read.await?.into_bytes() })
    }

    /// Creates an object of these parts: whole, or not at all. An object that exists is never overwritten. Parts may be
    /// slots of the cache, which are not used for other blocks until all are dropped: keep none.
    fn create(&self, object: &str, parts: Vec<Bytes>) -> RemoteFuture<Created>;

    /// Objects whose names begin with `prefix`, in the order of their names, beginning behind `after`.
    fn list(&self, prefix: &str, after: Option<&str>) -> RemoteFuture<Page>;

    /// Deletes objects. One that does not exist counts as deleted.
    fn delete(&self, objects: &[String]) -> RemoteFuture<()>;
}

/// What a store beyond the node is good at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// The kind of store, as its URL begins: a label of metrics and of the doctor.
    pub scheme: &'static str,
    /// The bytes that an object should have: one block or less for a store of small values, 8 to 16 MiB where a request
    /// costs milliseconds.
    pub object_bytes: u64,
    /// The requests that should be in flight at a time.
    pub requests_in_flight: u32,
    /// Reads that one call should have at most: 1 for a store whose requests have one object each.
    pub reads_per_call: u32,
}

/// What became of a creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Created {
    /// The object is new.
    Now,
    /// An object of that name existed, and is unchanged.
    Already,
}

/// An object, as a listing has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// When it was created, by the store's clock, where the store says that.
    pub modified: Option<SystemTime>,
}

/// A part of a listing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Page {
    /// The objects, in the order of their names.
    pub objects: Vec<Object>,
    /// The name after which the next page begins; `None` behind the last.
    pub next: Option<String>,
}

/// Why a call to a store beyond the node failed. No text holds a credential, or what differs between failures of the
/// same cause, such as a time or the number of a request: the text is the label of a metric.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// There is no such object.
    #[error("found no such object")]
    NotFound,
    /// The store knows the caller and does not let it: keys, permissions, a bucket that does not exist. Repeating the
    /// call does not help.
    #[error("refused: {0}")]
    Refused(String),
    /// The store asks for fewer requests.
    #[error("throttled: {0}")]
    Throttled(String),
    /// The store was not reached, did not answer in time, or failed inside.
    #[error("unavailable: {0}")]
    Unavailable(String),
    /// What came is not what was asked for.
    #[error("found {found}, expected {expected}")]
    Invalid {
        /// What came.
        found: String,
        /// What was asked for.
        expected: String,
    },
}

//! [`Client`], the handle of callers.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

use tokio::sync::{OnceCell, oneshot};

use super::{
    bounce::{Bounce, Taken},
    line::Line,
    options::ClientOptions,
    order::{Call, Counted, What},
    places::Places,
    worker::{self, Worker},
};
use crate::{
    block::{BlockKey, Tier},
    error::{Error, Result, ServiceFault},
    fork::Home,
    service::protocol::{KEYS_MAX, NAMESPACE_BYTES_MAX, Reply, Request, SpaceStats},
    shield::shield,
};

/// The most calls of a client at a time, including those that wait for others.
const CALLS_MAX: usize = 4096;

/// A connection to a node's service, attached to one space: the calls of [`Cache`](crate::Cache) that move blocks, for
/// many processes over one store.
///
/// Cheap to clone; usable from any thread and any async runtime. While the service is away every call fails at once
/// with [`ServiceFault::Away`]; the client's thread connects again and registers all regions again.
/// Calls in flight when the connection is lost fail too; the service does not use their memory any longer.
///
/// Dropping the last handle closes it in the background; [`close`](Client::close) waits. A forked child cannot use it.
///
/// ```no_run
/// use std::sync::Arc;
/// use kvhoist::{BlockKey, RegisterOptions, Segment, service::{Client, ClientOptions, SharedMemory}};
///
/// # async fn run(key: BlockKey) -> Result<(), kvhoist::Error> {
/// let client = Client::connect("/run/kvhoist.sock", ClientOptions::new("llama-3-8b bf16", 1 << 20)).await?;
/// let pool = Arc::new(SharedMemory::new(64 << 20)?);
/// let region = client.register(&pool, RegisterOptions::default().pinned(true)).await?;
/// let place = vec![Segment { ptr: pool.as_ptr(), len: 1 << 20 }];
/// if client.load_into(&[key], &[place.clone()]).await?[0].as_ref().is_ok_and(|there| !there) {
///     pool.write(0, &[7; 1 << 20]);
///     client.store_from(&[key], None, &[place]).await?;
/// }
/// client.unregister(&region).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Client {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    /// Tells clients of this process apart.
    pub(super) id: u64,
    socket: PathBuf,
    pub(super) block_bytes: usize,
    line: Arc<Line>,
    pub(super) places: Places,
    /// For blocks in memory that the service does not have. Made for the first of them.
    pub(super) bounce: OnceCell<Bounce>,
    pub(super) bounce_bytes: usize,
    calls: Arc<AtomicUsize>,
    next_id: AtomicU64,
    pub(super) next_region: AtomicU32,
    home: Home,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The connection, and maybe its lock, is the parent's.
        if self.home.is_here() {
            let _closed_already = self.line.close(None);
        }
    }
}

/// Cancels a call that is dropped.
struct Given<'a> {
    inner: &'a Inner,
    id: Option<u64>,
}

impl Drop for Given<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id.filter(|_| self.inner.home.is_here()) {
            self.inner.line.forget(id);
        }
    }
}

impl Client {
    /// Connects to the service at `socket` and attaches to a space.
    ///
    /// # Errors
    /// [`Error::Service`]: [`ServiceFault::Away`] if no service answers, [`ServiceFault::Permission`],
    /// [`ServiceFault::Version`], [`ServiceFault::Capacity`] if too little is left for a new space.
    /// [`Error::Argument`] for a name or a block size that no space can have.
    ///
    /// # Cancel safety
    /// The connection is closed in the background.
    pub async fn connect(socket: impl Into<PathBuf>, options: ClientOptions) -> Result<Client> {
        let socket = socket.into();
        let ClientOptions { namespace, block_bytes, .. } = &options;
        if namespace.is_empty() || namespace.len() > NAMESPACE_BYTES_MAX || *block_bytes == 0 || *block_bytes > 1 << 30
        {
            return Err(Error::argument(
                "options",
                format!("a name of {} bytes and {block_bytes} bytes a block", namespace.len()),
                format!("1 to {NAMESPACE_BYTES_MAX} bytes, and 1 byte to 1 GiB"),
            ));
        }
        let (block_bytes, bounce_bytes) = (options.block_bytes, options.bounce_bytes);
        let line = Arc::new(Line::new(socket.display().to_string(), options.deadline));
        let worker = Worker { socket: socket.clone(), options, line: Arc::clone(&line) };
        let (first, connected) = oneshot::channel();
        let failed = |error| Error::io("start the thread of", "a client", error);
        thread::Builder::new().name("kvhoist-client".into()).spawn(move || run(worker, first)).map_err(failed)?;
        static NEXT_CLIENT: AtomicU64 = AtomicU64::new(0);
        let inner = Inner {
            id: NEXT_CLIENT.fetch_add(1, Ordering::Relaxed),
            socket,
            block_bytes,
            line,
            places: Places::default(),
            bounce: OnceCell::new(),
            bounce_bytes,
            calls: Arc::default(),
            next_id: AtomicU64::new(2),
            next_region: AtomicU32::new(1),
            home: Home::here(),
        };
        let client = Client { inner: Arc::new(inner) };
        shield(connected).await.unwrap_or(Err(Error::Closed))?;
        Ok(client)
    }

    /// The service's socket.
    pub fn socket(&self) -> &Path {
        &self.inner.socket
    }

    /// Bytes of every block.
    pub fn block_bytes(&self) -> usize {
        self.inner.block_bytes
    }

    /// Whether the service can be reached now. It may be gone by the next call.
    pub fn is_connected(&self) -> bool {
        self.inner.home.is_here() && self.inner.line.is_up()
    }

    /// The number of leading `keys` that are resident in some tier.
    ///
    /// # Errors
    /// [`Error::Service`].
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn match_len(&self, keys: &[BlockKey]) -> Result<usize> {
        let mut leading = 0;
        for keys in keys.chunks(KEYS_MAX) {
            let Reply::Count(count) = self.ask(Request::MatchLen { keys: keys.to_vec() }).await? else {
                return Err(worker::nonsense("a count was asked for"));
            };
            leading += count as usize;
            if (count as usize) < keys.len() {
                break;
            }
        }
        Ok(leading)
    }

    /// The fastest tier of each of the leading `keys` that are resident.
    ///
    /// # Errors
    /// As [`match_len`](Client::match_len).
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn match_prefix(&self, keys: &[BlockKey]) -> Result<Vec<Tier>> {
        let mut leading = Vec::new();
        for keys in keys.chunks(KEYS_MAX) {
            let Reply::Tiers(tiers) = self.ask(Request::MatchPrefix { keys: keys.to_vec() }).await? else {
                return Err(worker::nonsense("tiers were asked for"));
            };
            let all = tiers.len() == keys.len();
            leading.extend(tiers);
            if !all {
                break;
            }
        }
        Ok(leading)
    }

    /// Which of `keys` are resident, whatever comes before them.
    ///
    /// # Errors
    /// As [`match_len`](Client::match_len).
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn contains(&self, keys: &[BlockKey]) -> Result<Vec<bool>> {
        let mut there = Vec::with_capacity(keys.len());
        for keys in keys.chunks(KEYS_MAX) {
            match self.ask(Request::Contains { keys: keys.to_vec() }).await? {
                Reply::Flags(flags) if flags.len() == keys.len() => there.extend(flags),
                other => return Err(unexpected(&other)),
            }
        }
        Ok(there)
    }

    /// Starts to bring blocks into the service's host memory; how many movements it started.
    ///
    /// # Errors
    /// As [`match_len`](Client::match_len).
    ///
    /// # Cancel safety
    /// The blocks are brought all the same, if the request was sent.
    pub async fn prefetch(&self, keys: &[BlockKey]) -> Result<usize> {
        let mut started = 0;
        for keys in keys.chunks(KEYS_MAX) {
            match self.ask(Request::Prefetch { keys: keys.to_vec() }).await? {
                Reply::Count(count) => started += count as usize,
                other => return Err(unexpected(&other)),
            }
        }
        Ok(started)
    }

    /// Counts a use of every resident block of a chain, as [`Cache::touch`](crate::Cache::touch).
    ///
    /// # Errors
    /// As [`match_len`](Client::match_len).
    ///
    /// # Cancel safety
    /// The uses are counted all the same, if the request was sent.
    pub async fn touch(&self, keys: &[BlockKey]) -> Result<()> {
        for keys in keys.chunks(KEYS_MAX) {
            self.ask(Request::Touch { keys: keys.to_vec() }).await?;
        }
        Ok(())
    }

    /// Forgets a block in every tier, for all clients of the space; true if it was resident.
    ///
    /// # Errors
    /// As [`Cache::remove`](crate::Cache::remove), as [`Error::Service`].
    ///
    /// # Cancel safety
    /// The block may be forgotten all the same.
    pub async fn remove(&self, key: &BlockKey) -> Result<bool> {
        self.remove_one(key, false).await
    }

    /// As [`remove`](Client::remove), and flushes: the removal survives a power cut too.
    ///
    /// # Errors
    /// As [`remove`](Client::remove).
    ///
    /// # Cancel safety
    /// As [`remove`](Client::remove).
    pub async fn remove_durably(&self, key: &BlockKey) -> Result<bool> {
        self.remove_one(key, true).await
    }

    async fn remove_one(&self, key: &BlockKey, durable: bool) -> Result<bool> {
        match self.ask(Request::Remove { durable, keys: vec![*key] }).await? {
            Reply::Results(mut results) if results.len() == 1 => results.remove(0).map_err(Error::from),
            other => Err(unexpected(&other)),
        }
    }

    /// Resolves when all that was stored in the space before it, by any client, is written and flushed.
    ///
    /// # Errors
    /// As [`Cache::sync`](crate::Cache::sync), as [`Error::Service`].
    ///
    /// # Cancel safety
    /// The writes and the flush go on.
    pub async fn sync(&self) -> Result<()> {
        self.ask(Request::Sync).await.map(drop)
    }

    /// The space's figures for all clients, since the service opened it.
    ///
    /// # Errors
    /// [`Error::Service`].
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn stats(&self) -> Result<SpaceStats> {
        match self.ask(Request::Stats).await? {
            Reply::Stats(stats) => Ok(*stats),
            other => Err(unexpected(&other)),
        }
    }

    /// Hangs up, and resolves when the service uses none of this client's memory any longer. Calls fail from then on.
    ///
    /// # Errors
    /// [`Error::Closed`] if it is closed already.
    ///
    /// # Cancel safety
    /// From the first poll on it goes on.
    pub async fn close(&self) -> Result<()> {
        let (ended, end) = oneshot::channel();
        if !self.inner.home.is_here() {
            return Err(Error::Closed);
        }
        self.inner.line.close(Some(ended))?;
        shield(end).await.map_err(|_| Error::Closed)
    }

    pub(super) async fn ask(&self, request: Request) -> Result<Reply> {
        self.call(request, What::Plain, None).await
    }

    /// One request. The service has `slots` of the bounce buffer until it has replied, or the connection is lost.
    pub(super) async fn call(&self, request: Request, what: What, slots: Option<Arc<Taken>>) -> Result<Reply> {
        let inner = &*self.inner;
        if !inner.home.is_here() {
            return Err(Error::Closed);
        }
        let Some(counted) = Counted::new(&inner.calls, CALLS_MAX) else {
            let text = format!("busy: {CALLS_MAX} calls of this client are under way; wait for some of them");
            return Err(Error::service(ServiceFault::Busy, text));
        };
        let id = inner.next_id.fetch_add(2, Ordering::Relaxed);
        let (reply, receiver) = oneshot::channel();
        let call = Call { id, frame: request.encode(id), what, reply, keeps: (counted, slots) };
        inner.line.begin(call)?;
        let mut given = Given { inner, id: Some(id) };
        let answer = shield(receiver).await.unwrap_or(Err(Error::Closed));
        given.id = None;
        answer
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("socket", &self.inner.socket).finish_non_exhaustive()
    }
}

/// The client's thread.
fn run(worker: Worker, first: oneshot::Sender<Result<()>>) {
    match tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build() {
        Ok(runtime) => runtime.block_on(worker.run(first)),
        Err(error) => drop(first.send(Err(Error::io("start the runtime of", "a client", error)))),
    }
}

pub(super) fn unexpected(reply: &Reply) -> Error {
    worker::nonsense(&format!("{reply:?} is not what was asked for"))
}

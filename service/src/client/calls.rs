//! [`Client`], the handle of callers.

use std::{
    future::poll_fn,
    io,
    path::{Path, PathBuf},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    task::Poll,
    thread,
};

use kvhoist::{
    DeviceKind,
    internals::service::{Gates, Gpu, Home, HomeBound, shield},
};
use tokio::{
    net::UnixStream,
    sync::{OnceCell, oneshot},
};

use super::{
    bounce::{Bounce, Taken},
    line::Line,
    options::ClientOptions,
    order::{Answer, Call, Counted, What},
    places::Places,
    worker::{self, Dial, Worker},
};
use crate::{
    error::{Error, Result, ServiceFault},
    protocol::{NAMESPACE_BYTES_MAX, Reply, Request, SpaceDevice},
    wire::{Dialed, Wire},
};

/// The most calls of a client at a time, including those that wait for others.
const CALLS_MAX: usize = 4096;

/// A connection to a node's service, attached to one space: the calls of [`Cache`](kvhoist::Cache) that move blocks,
/// for many processes over one store.
///
/// Cheap to clone; usable from any thread and any async runtime. While the service is away every call fails at once
/// with [`ServiceFault::Away`]; the client's thread connects again and registers all regions again.
/// Calls in flight when the connection is lost fail too; the service does not use their memory any longer.
///
/// Dropping the last handle closes it in the background; [`close`](Client::close) waits. A forked child cannot use it.
///
/// ```no_run
/// use std::sync::Arc;
/// use kvhoist::{BlockKey, Memory, Segment, SharedMemory};
/// use kvhoist_service::{Client, ClientOptions};
///
/// # async fn run(key: BlockKey) -> Result<(), kvhoist::Error> {
/// let client = Client::connect("/run/kvhoist.sock", ClientOptions::new("llama-3-8b bf16", 1 << 20)).await?;
/// let pool = Arc::new(SharedMemory::new(64 << 20)?);
/// // SAFETY: nobody touches a block of it while the block is on its way.
/// let lent = unsafe { Memory::shared(Arc::clone(&pool)) };
/// let region = client.register(lent.pinned(true)).await?;
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
    socket: PathBuf,
    pub(super) block_bytes: usize,
    line: Arc<Line>,
    pub(super) places: Arc<Places>,
    pub(super) device: Option<DeviceKind>,
    /// The CUDA device.
    pub(super) gpu: HomeBound<Option<Arc<Gpu>>>,
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
    /// [`Error::Service`]: [`ServiceFault::Away`] if no service answers, [`ServiceFault::Timeout`] if it accepts no
    /// connection until the [`deadline`](ClientOptions::deadline), [`ServiceFault::Permission`],
    /// [`ServiceFault::Version`], [`ServiceFault::Capacity`] if too little is left for a new space.
    /// [`Error::Argument`] for a name or a block size that no space can have. [`Error::Unavailable`] without the CUDA
    /// device of the options; [`Error::Io`] if the client's thread cannot be started.
    ///
    /// # Cancel safety
    /// The connection is closed in the background.
    ///
    /// ```
    /// # let dir = tempfile::tempdir().expect("a directory");
    /// # let socket = dir.path().join("socket");
    /// # kvhoist::block_on(async {
    /// use kvhoist_service::{Client, ClientOptions, Server, ServerConfig};
    ///
    /// // A process of its own as a rule: `kvhoist serve`.
    /// let mut config = ServerConfig::new(&socket);
    /// config.host_bytes = 1 << 20;
    /// let server = Server::start(config)?;
    ///
    /// let client = Client::connect(&socket, ClientOptions::new("llama-3-8b bf16", 4096)).await?;
    /// assert!(client.is_connected());
    /// # client.close().await }).expect("the example runs");
    /// ```
    pub async fn connect(socket: impl Into<PathBuf>, options: ClientOptions) -> Result<Client> {
        let socket = socket.into();
        let path = socket.clone();
        let dial = async move || Ok(Arc::new(Dialed::new(UnixStream::connect(&path).await?)) as Arc<dyn Wire>);
        let on_thread = |worker, first| {
            let run = move || run(worker, first);
            thread::Builder::new().name("kvhoist-client".into()).spawn(run).map(drop).map_err(not_started)
        };
        Client::start(socket, options, dial, on_thread).await
    }

    /// Connects by `dial`. `run` runs the client's worker, on a thread or in a task.
    pub(crate) async fn start<D: Dial>(
        socket: PathBuf,
        options: ClientOptions,
        dial: D,
        run: impl FnOnce(Worker<D>, oneshot::Sender<Result<()>>) -> Result<()>,
    ) -> Result<Client> {
        let ClientOptions { namespace, block_bytes, .. } = &options;
        if namespace.is_empty() || namespace.len() > NAMESPACE_BYTES_MAX || *block_bytes == 0 || *block_bytes > 1 << 30
        {
            return Err(Error::argument(
                "options",
                format!("a name of {} bytes and {block_bytes} bytes a block", namespace.len()),
                format!("1 to {NAMESPACE_BYTES_MAX} bytes, and 1 byte to 1 GiB"),
            ));
        }
        let (block_bytes, bounce_bytes, device) = (options.block_bytes, options.bounce_bytes, options.device);
        let (space_device, gpu) = match device {
            None => (SpaceDevice::None, None),
            Some(DeviceKind::Simulated) => (SpaceDevice::Simulated, None),
            Some(DeviceKind::Cuda) => {
                let gpu = Gpu::open(options.device_ordinal)?;
                Gates::pin(&gpu);
                (SpaceDevice::Cuda(gpu.device().uuid), Some(gpu))
            }
            Some(other) => return Err(Error::argument("device", format!("{other:?}"), "Cuda, Simulated or none")),
        };
        let line = Arc::new(Line::new(socket.display().to_string(), options.deadline, options.give_up));
        let places = Arc::<Places>::default();
        let worker = Worker {
            socket: socket.clone(),
            options,
            device: space_device,
            line: Arc::clone(&line),
            places: Arc::clone(&places),
            dial,
        };
        let (first, connected) = oneshot::channel();
        run(worker, first)?;
        let inner = Inner {
            socket,
            block_bytes,
            line,
            places,
            device,
            gpu: HomeBound::new(gpu),
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
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_client(async |client| {
    /// println!("blocks of {}", client.socket().display());
    /// # Ok(()) });
    /// ```
    pub fn socket(&self) -> &Path {
        &self.inner.socket
    }

    /// Bytes of every block.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_client(async |client| {
    /// assert_eq!(client.block_bytes(), 4096);
    /// # Ok(()) });
    /// ```
    pub fn block_bytes(&self) -> usize {
        self.inner.block_bytes
    }

    /// Whether the service can be reached now. It may be gone by the next call.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_client(async |client| {
    /// if !client.is_connected() {
    ///     println!("calls fail at once until {} is back", client.socket().display());
    /// }
    /// # Ok(()) });
    /// ```
    pub fn is_connected(&self) -> bool {
        self.inner.home.is_here() && self.inner.line.is_up()
    }

    /// Hangs up, and resolves when the service uses none of this client's memory any longer. Calls fail from then on.
    ///
    /// # Errors
    /// [`Error::Closed`] if it is closed already. [`Error::Service`] with [`ServiceFault::Abandoned`] if the service
    /// has not let go of the memory in time ([`give_up`](ClientOptions::give_up)), and from then on: the client is
    /// closed, and its memory may be read and written for as long as the service lives.
    ///
    /// # Cancel safety
    /// From the first poll on it goes on.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_client(async |client| {
    /// client.close().await?;
    /// assert!(client.close().await.is_err(), "it is closed already");
    /// # Ok(()) });
    /// ```
    pub async fn close(&self) -> Result<()> {
        let (ended, end) = oneshot::channel();
        if !self.inner.home.is_here() {
            return Err(Error::Closed);
        }
        self.inner.line.close(Some(ended))?;
        shield(end).await.unwrap_or(Err(Error::Closed))
    }

    pub(super) async fn ask(&self, request: Request) -> Result<Reply> {
        self.call(request, What::Plain, None).await
    }

    /// One request. The service has `slots` of the bounce buffer until it has replied, or the connection is lost.
    pub(super) async fn call(&self, request: Request, what: What, slots: Option<Arc<Taken>>) -> Result<Reply> {
        self.begin(|id| request.encode(id), request.is_write(), what, slots).await
    }

    /// One request, and its id.
    pub(super) async fn call_with_id(&self, request: Request) -> Result<(u64, Reply)> {
        /// Lets go of what the request holds, if its reply is not taken.
        struct Untaken<'a>(&'a Client, Option<u64>);
        impl Drop for Untaken<'_> {
            fn drop(&mut self) {
                self.1.iter().for_each(|id| self.0.let_go(*id));
            }
        }
        let mut untaken = Untaken(self, None);
        let id = &mut untaken.1;
        let reply =
            self.begin(|number| request.encode(*id.insert(number)), request.is_write(), What::Plain, None).await?;
        Ok((untaken.1.take().unwrap_or_default(), reply))
    }

    /// Lets go of what a request that was answered holds. It needs no service: one that is away has let go of it.
    pub(super) fn let_go(&self, request: u64) {
        if self.inner.home.is_here() {
            self.inner.line.say(&Request::LetGo { hold: request });
        }
    }

    /// The output of `wait`, unless the deadline comes first or the connection is lost.
    pub(super) async fn in_time<T>(&self, wait: impl Future<Output = Result<T>>) -> Result<T> {
        let (mut wait, mut late) = (pin!(wait), pin!(self.begin(|_| Vec::new(), false, What::Wait, None)));
        poll_fn(|context| match wait.as_mut().poll(context) {
            // The first poll sets the timer.
            Poll::Pending => late.as_mut().poll(context).map(|ended| Err(ended.err().unwrap_or(Error::Closed))),
            ended => ended,
        })
        .await
    }

    /// Begins a call, whose end `answer` gets, also that it cannot begin; returns its id.
    pub(super) fn begin_for(
        &self,
        answer: Answer,
        frame: impl FnOnce(u64) -> Vec<u8>,
        is_write: bool,
        what: What,
        slots: Option<Arc<Taken>>,
    ) -> Result<u64> {
        let inner = &*self.inner;
        if !inner.home.is_here() {
            return Err(Error::Closed);
        }
        let Some(counted) = Counted::new(&inner.calls, CALLS_MAX) else {
            let text = format!("busy: {CALLS_MAX} calls of this client are under way; wait for some of them");
            let error = Error::service(ServiceFault::Busy, text);
            answer.send(Err(error.clone()));
            return Err(error);
        };
        let id = inner.next_id.fetch_add(2, Ordering::Relaxed);
        inner.line.begin(Call { id, frame: frame(id), is_write, what, reply: answer, keeps: (counted, slots) })?;
        Ok(id)
    }

    /// Begins a call with the frame of its id, and waits for its end.
    async fn begin(
        &self,
        frame: impl FnOnce(u64) -> Vec<u8>,
        is_write: bool,
        what: What,
        slots: Option<Arc<Taken>>,
    ) -> Result<Reply> {
        let inner = &*self.inner;
        let (reply, receiver) = oneshot::channel();
        let id = self.begin_for(Answer::Caller(reply), frame, is_write, what, slots)?;
        let mut given = Given { inner, id: Some(id) };
        let answer = shield(receiver).await.unwrap_or(Err(Error::Closed));
        given.id = None;
        answer
    }
}

debug_fields!(Client, client => socket: client.inner.socket);

/// The client's thread.
fn run(worker: Worker<impl Dial>, first: oneshot::Sender<Result<()>>) {
    match tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build() {
        Ok(runtime) => runtime.block_on(worker.run(first)),
        Err(error) => drop(first.send(Err(Error::io("start the runtime of", "a client", error)))),
    }
}

/// The error of a client whose thread the system does not start.
pub(crate) fn not_started(error: io::Error) -> Error {
    Error::io("start the thread of", "a client", error)
}

pub(super) fn unexpected(reply: &Reply) -> Error {
    worker::nonsense(&format!("{reply:?} is not what was asked for"))
}

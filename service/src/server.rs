//! The service: a thread that listens and admits clients.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    fs,
    future::pending,
    io,
    os::unix::net::UnixListener as StdListener,
    path::{Path, PathBuf},
    pin::pin,
    rc::Rc,
    sync::{Arc, Mutex, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

use tokio::{
    net::UnixListener,
    sync::watch,
    task::{JoinSet, LocalSet, spawn_local},
    time::{Instant, sleep_until},
};

use super::{
    accepted::{Accepted, Aside, Listener},
    config::ServerConfig,
    folders,
    late_close::LateClose,
    lock::ServiceLock,
    peers::{Peer, admit, group_number},
    place::{Place, Places},
    protocol::Failure,
    report::{Ask, Asked, ServiceReport},
    seldom::Seldom,
    session,
    socket::{self, no_socket},
    spaces::Spaces,
    state::ServiceState,
    system::Machine,
    wire::Wire,
};
use crate::error::{Error, Result, ServiceFault};

/// Who has asked whether a service is there finds it for this long, or a tenth of the time that it lingers.
const GRACE_MAX: Duration = Duration::from_secs(10);

/// The pause after a connection for which the system has no descriptor.
const NO_DESCRIPTOR: Duration = Duration::from_millis(100);

/// A running service: one process that owns the drives, for many clients ([`Client`](super::Client)).
///
/// It runs on a thread of its own and on the threads of its spaces' caches. Dropping it drains it in the background.
pub struct Server {
    draining: watch::Sender<bool>,
    ask: Ask,
    thread: Mutex<Option<JoinHandle<Result<()>>>>,
    socket: PathBuf,
    places: Places,
}

impl Server {
    /// Starts to listen at [`ServerConfig::socket`]. A socket that no service listens at is replaced.
    ///
    /// # Errors
    /// [`Error::Config`] names a wrong setting; [`Error::Store`] if another service has the socket or the paths, or
    /// a space's file cannot be understood; [`Error::Io`].
    pub fn start(config: ServerConfig) -> Result<Server> {
        config.validate()?;
        let made = folders::prepare(&config)?;
        // Held for the life of the service, and released by the kernel however it ends. Dropped before the folders:
        // their files are in these.
        let (mut locks, mut trouble) = (Vec::new(), None);
        let of_socket = config.socket.with_added_extension("lock");
        locks.extend(ServiceLock::take(of_socket, &config.socket, &config.socket, true)?);
        // In one order: of two services that start with the same paths one has them.
        for path in config.paths.iter().collect::<BTreeSet<_>>() {
            // The first path has the files of all spaces. Without another one no space can be opened, and clients are
            // told why; the rest is served.
            let needed = Some(path) == config.paths.first();
            let lock = ServiceLock::take(path.join("kvhoist-service.lock"), path, &config.socket, needed)?;
            if lock.is_none() {
                let path = path.display();
                tracing::warn!(%path, "a read-only file system: no space can be opened until it is writable");
                trouble = Some(format!("{path}: found a read-only file system, expected a writable one: remount it"));
            }
            locks.extend(lock);
        }
        let mut places = Places::of(&config.paths);
        let (draining, drained) = watch::channel(false);
        let (ask, asked) = Ask::channel();
        let (started, starts) = mpsc::channel();
        let socket = config.socket.clone();
        let run = move || {
            let mut locks = locks;
            run(config, drained, asked, &started, (&mut locks, trouble))
        };
        let failed = |error| Error::io("start the thread of", "the service", error);
        let thread = thread::Builder::new().name("kvhoist-service".into()).spawn(run).map_err(failed)?;
        match starts.recv() {
            Ok(place) => {
                made.keep();
                places.add(socket.clone(), place);
                Ok(Server { draining, ask, thread: Mutex::new(Some(thread)), socket, places })
            }
            // The thread has ended before it listened, with the reason.
            Err(mpsc::RecvError) => Err(joined(thread).err().unwrap_or(Error::Closed)),
        }
    }

    /// Takes no more connections and requests. The service ends when all requests are answered, and all that was
    /// stored is written and flushed.
    pub fn drain(&self) {
        self.draining.send_replace(true);
    }

    /// Waits for the end of the service, which [`drain`](Self::drain) begins. Blocks the thread.
    ///
    /// # Errors
    /// The first error of a space's [`Cache::close`](kvhoist::Cache::close). A second call is Ok.
    pub fn wait(&self) -> Result<()> {
        let thread = self.thread.lock().expect("nothing panics under it").take();
        thread.map_or(Ok(()), joined)
    }

    /// The state of the service, its open spaces and its clients. Blocks the thread until the service's own thread
    /// answers, a millisecond as a rule; must not be called in an asynchronous task.
    ///
    /// # Errors
    /// [`Error::Closed`] after the end of the service.
    #[doc(hidden)]
    pub fn report(&self) -> Result<ServiceReport> {
        self.ask.report()?.blocking_recv().map_err(|_| Error::Closed)
    }

    /// Its socket, or a folder of it, that was deleted or replaced since it began to listen: nobody will find it.
    #[doc(hidden)]
    pub fn lost(&self) -> Option<&Path> {
        self.places.lost()
    }

    /// The socket that it listens at.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.drain();
    }
}

debug_fields!(Server, server => socket: server.socket);

fn joined(thread: JoinHandle<Result<()>>) -> Result<()> {
    thread.join().unwrap_or_else(|_| {
        let reason = "its thread panicked; the log has where".to_owned();
        Err(Error::unavailable("service", reason))
    })
}

/// Listens, replacing the socket of a service that is gone. The caller holds the lock.
fn listen(config: &ServerConfig, group: Option<u32>) -> Result<(StdListener, Place)> {
    let path = &config.socket;
    match fs::symlink_metadata(path) {
        Ok(found) => {
            if let Some(other) = no_socket(&found) {
                return Err(Error::store(path, other, "nothing, or a service's socket", "name another place"));
            }
            fs::remove_file(path).map_err(|error| Error::io("remove", path, error))?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(Error::io("stat", path, error)),
    }
    // A user that is named need not be in the group: the kernel's word on each peer decides.
    let mode = match group {
        _ if !config.uids.is_empty() => 0o666,
        Some(_) => 0o660,
        None => 0o600,
    };
    socket::listen(path, mode, group)
}

/// The service's thread.
fn run(
    mut config: ServerConfig,
    drained: watch::Receiver<bool>,
    asked: Asked,
    started: &mpsc::Sender<Place>,
    (locks, trouble): (&mut [ServiceLock], Option<String>),
) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|error| Error::io("start the runtime of", "the service", error))?;
    let socket = config.socket.clone();
    let group = config.socket_group.as_deref().map(group_number).transpose()?;
    let aside = Aside::start().map_err(|error| Error::io("start a thread of", "the service", error))?;
    let late_close = LateClose::new(Arc::clone(&aside));
    let mut late_close = late_close.map_err(|error| Error::io("make a pair of sockets for", "the service", error))?;
    config.cache.disk.rings_hold = Some(late_close.held());
    let spaces = Spaces::load(config.clone(), Rc::new(Machine::start()?))?;
    trouble.into_iter().for_each(|trouble| spaces.has_trouble(trouble));
    let (listener, place) = listen(&config, group)?;
    let (spaces_known, disk, host_memory) = (spaces.count(), config.capacity_bytes, config.host_bytes);
    tracing::info!(socket = %socket.display(), spaces = spaces_known, disk, host_memory, "the service listens");
    let result = LocalSet::new().block_on(&runtime, async move {
        let listener =
            UnixListener::from_std(listener).map_err(|error| Error::io("listen at", &config.socket, error))?;
        let listener = Listener::new(listener, Arc::clone(&aside));
        locks.iter_mut().for_each(ServiceLock::keep);
        let _nobody_waits = started.send(place);
        let uids = config.uids.clone();
        let accept = async move || {
            let stream = listener.accept().await?;
            let peer = admit(&stream, &uids, group);
            // Of one who is not admitted, nothing is received.
            let uid = peer.as_ref().map_or(u32::MAX, |peer| peer.uid);
            let accepted = Accepted::new(stream, uid, Arc::clone(&aside))?;
            let peer =
                peer.and_then(|peer| late_close.keep(&accepted).map(|()| peer).map_err(|error| not_kept(&error)));
            Ok((Arc::new(accepted) as Arc<dyn Wire>, peer))
        };
        hold(config, spaces, accept, drained, asked).await
    });
    tracing::info!(socket = %socket.display(), "the service has ended");
    // Another service may have its socket there, if the folder was deleted.
    if place.is_at(&socket) {
        drop(fs::remove_file(socket));
    }
    result
}

/// Why a connection is refused that would be hung up too early if the service were killed.
fn not_kept(error: &io::Error) -> Failure {
    let text = format!("busy: the system keeps no more connections ({error}); try later, or raise `ulimit -n`");
    Failure::new(ServiceFault::Busy, text)
}

/// A connection, and who is at its other end or why it is refused.
pub type Caller = (Arc<dyn Wire>, Result<Peer, Failure>);

/// Serves the connections that `accept` returns until the service ends, and closes the spaces. `accept` is cancel safe.
pub(super) async fn hold(
    config: ServerConfig,
    spaces: Spaces,
    accept: impl AsyncFnMut() -> io::Result<Caller>,
    drained: watch::Receiver<bool>,
    mut asked: Asked,
) -> Result<()> {
    let state = Rc::new(ServiceState::new(config, spaces));
    let of_look = Rc::clone(&state);
    let look = spawn_local(async move { of_look.spaces.look().await });
    serve(&state, accept, drained, &mut asked).await;
    look.abort();
    state.spaces.close().await
}

/// Admits clients until the service drains, or had no client for too long; then waits for all sessions.
async fn serve(
    state: &Rc<ServiceState>,
    mut accept: impl AsyncFnMut() -> io::Result<Caller>,
    mut drained: watch::Receiver<bool>,
    asked: &mut Asked,
) {
    let (mut sessions, mut answers) = (JoinSet::new(), pin!(answer(state, asked)));
    let linger = state.config.linger_ms.map(Duration::from_millis);
    let mut alone_since = Instant::now();
    loop {
        let abandoned = async {
            match linger.filter(|_| state.connections() == 0) {
                Some(linger) => sleep_until(alone_since + linger).await,
                None => pending().await,
            }
        };
        tokio::select! { biased;
            // The sender is gone: the server was dropped.
            _ = drained.wait_for(|drained| *drained) => break,
            Some(ended) = sessions.join_next(), if !sessions.is_empty() => {
                // Who only asks, or was refused, may do so all the time. It has time to attach.
                let linger = linger.unwrap_or_default();
                let grace = if ended.unwrap_or(true) { linger } else { GRACE_MAX.min(linger / 10) };
                let since = Instant::now().checked_sub(linger - grace);
                alone_since = since.map_or(alone_since, |since| since.max(alone_since));
            }
            never = &mut answers => match never {},
            accepted = accept() => match accepted {
                Ok(caller) => {
                    let_in(state, caller, &mut sessions);
                    state.turn().await;
                }
                Err(error) => {
                    static NOT_ACCEPTED: Seldom = Seldom::new();
                    if let Some(others) = NOT_ACCEPTED.turn() {
                        tracing::warn!(%error, others, "a connection could not be accepted");
                    }
                    tokio::time::sleep(NO_DESCRIPTOR).await;
                }
            },
            () = abandoned => {
                tracing::info!(?linger, "nobody is connected: the service ends");
                break;
            }
        }
    }
    drop(accept);
    tracing::info!(clients = state.connections(), "the service drains: it takes no more requests");
    state.drain();
    loop {
        tokio::select! { biased;
            ended = sessions.join_next() => if ended.is_none() { break },
            never = &mut answers => match never {},
        }
    }
}

/// Answers those who ask for a report, one after another.
async fn answer(state: &ServiceState, asked: &mut Asked) -> Infallible {
    loop {
        // No sender: nobody asks any more.
        let Some(waiting) = asked.recv().await else { pending().await };
        let report = state.status_frames.instead(|| state.report()).await;
        drop(waiting.send(report));
    }
}

/// Serves or refuses a connection; the result of its task is whether it was a client's.
fn let_in(state: &Rc<ServiceState>, (wire, peer): Caller, sessions: &mut JoinSet<bool>) {
    let admitted = peer.and_then(|peer| state.has_room(peer.uid).map(|()| peer));
    match admitted {
        Err(failure) => {
            static REFUSED: Seldom = Seldom::new();
            if let Some(others) = REFUSED.turn() {
                tracing::warn!(reason = %failure.text, others, "a connection was refused");
            }
            sessions.spawn_local(session::refuse(Rc::clone(state), wire, failure));
        }
        Ok(peer) => {
            let connection = state.enter(peer.pid, peer.uid);
            sessions.spawn_local(session::serve(Rc::clone(state), connection, wire));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However many ask, the thread serves others between two reports.
    #[tokio::test(start_paused = true)]
    async fn the_next_report_waits() {
        let config = ServerConfig { host_bytes: 1 << 20, ..ServerConfig::new("unused") };
        let spaces = Spaces::load(config.clone(), Rc::new(Machine)).expect("no spaces");
        let state = ServiceState::new(config, spaces);
        let (ask, mut asked) = Ask::channel();
        let begin = Instant::now();
        let wait = async {
            for round in 0..3 {
                let waiting = ask.report().expect("it listens");
                state.cut_off.set(round);
                let report = waiting.await.expect("answered");
                assert_eq!(report.status.cut_off, round, "figures from after the question");
            }
        };
        tokio::select! {
            never = answer(&state, &mut asked) => match never {},
            () = wait => {}
        }
        assert!(begin.elapsed() >= Duration::from_millis(2), "{:?} for three", begin.elapsed());
        state.spaces.close().await.expect("in memory only");
    }
}

//! A session over a stream of the test's own.

mod defects;
mod figures;
mod hung_files;
mod keeps;
mod pins;

use std::{
    collections::VecDeque,
    io,
    ops::Range,
    os::fd::BorrowedFd,
    rc::Rc,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker},
    time::Duration,
};

use kvhoist::BlockKey;
use tokio::{
    sync::Notify,
    task::{LocalSet, spawn_local, yield_now},
    time::timeout,
};

use super::{ServiceState, serve};
use crate::{
    config::ServerConfig,
    error::ServiceFault,
    protocol::{HEADER_BYTES, Header, Hello, Reply, Request, SpaceDevice, Welcome},
    spaces::Spaces,
    system::Machine,
    wire::{Came, Wire},
};

/// Virtual time: the clock moves when every task waits.
const HANG: Duration = Duration::from_secs(3600);

#[derive(Default)]
struct Stream {
    to_service: VecDeque<u8>,
    to_client: Vec<u8>,
    /// The client takes its replies, all at once.
    takes: bool,
    hung_up: bool,
    /// The service waits to send, and for nothing else.
    only_sends: bool,
    waker: Option<Waker>,
    /// The service has hung up.
    over: bool,
}

#[derive(Default)]
struct Ends {
    stream: Mutex<Stream>,
    sent: Notify,
}

impl Ends {
    fn lock(&self) -> MutexGuard<'_, Stream> {
        self.stream.lock().expect("nothing panics under it")
    }

    /// Changes the client's end.
    fn change(&self, change: impl FnOnce(&mut Stream)) {
        let mut stream = self.lock();
        change(&mut stream);
        stream.waker.take().into_iter().for_each(Waker::wake);
    }

    /// Waits until the client has that many replies.
    async fn replies(&self, wanted: usize) {
        while replies(&self.lock().to_client) < wanted {
            self.sent.notified().await;
        }
    }
}

impl Wire for Ends {
    fn send(&self, bytes: &[u8], _fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let mut stream = self.lock();
        if !stream.takes {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        stream.to_client.extend_from_slice(bytes);
        self.sent.notify_one();
        Ok(bytes.len())
    }

    fn receive(&self, buf: &mut [u8]) -> io::Result<Came> {
        let mut stream = self.lock();
        if stream.to_service.is_empty() && !stream.hung_up {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        io::Read::read(&mut stream.to_service, buf).map(Came::Bytes)
    }

    fn end(&self) {}

    fn hang_up(&self) {
        self.lock().over = true;
    }

    fn poll_ready(&self, context: &mut Context<'_>, receive: bool, send: bool) -> Poll<io::Result<()>> {
        let mut stream = self.lock();
        stream.only_sends = !receive;
        if receive && (stream.hung_up || !stream.to_service.is_empty()) || send && stream.takes {
            return Poll::Ready(Ok(()));
        }
        stream.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    BlockKey::new(bytes)
}

/// Whole replies behind the welcome.
fn all_replies(bytes: &[u8]) -> Vec<Reply> {
    replies_with_ids(bytes).into_iter().map(|(_, reply)| reply).collect()
}

fn replies_with_ids(bytes: &[u8]) -> Vec<(u64, Reply)> {
    let (mut rest, mut replies) = (bytes.get(Welcome::BYTES..).unwrap_or_default(), Vec::new());
    while let Some(header) = rest.first_chunk::<HEADER_BYTES>() {
        let header = Header::decode(header).expect("a header");
        let (body, after) = rest[HEADER_BYTES..].split_at(header.body_bytes as usize);
        replies.push((header.id, Reply::decode(header.kind, body).expect("a reply")));
        rest = after;
    }
    replies
}

fn replies(bytes: &[u8]) -> usize {
    all_replies(bytes).len()
}

fn state() -> Rc<ServiceState> {
    state_of(ServerConfig::new("unused"))
}

fn state_of(mut config: ServerConfig) -> Rc<ServiceState> {
    config.host_bytes = 16 << 20;
    let spaces = Spaces::load(config.clone(), Rc::new(Machine)).expect("no spaces");
    Rc::new(ServiceState::new(config, spaces))
}

/// A client that says hello, and takes its replies.
fn come(state: &Rc<ServiceState>) -> Arc<Ends> {
    let ends = Arc::new(Ends::default());
    ends.change(|stream| {
        stream.takes = true;
        stream.to_service.extend(Hello::ours().encode());
    });
    spawn_local(serve(Rc::clone(state), state.enter(1, 1), Arc::<Ends>::clone(&ends)));
    ends
}

/// A client that has a space.
async fn attached(state: &Rc<ServiceState>) -> Arc<Ends> {
    attached_with(state, 1 << 20).await
}

/// A client that has a space, whose host memory is this.
async fn attached_with(state: &Rc<ServiceState>, host_bytes: u64) -> Arc<Ends> {
    let (ends, namespace) = (come(state), "tests".to_owned());
    let attach = Request::Attach {
        namespace,
        block_bytes: 4096,
        capacity_bytes: 0,
        host_bytes,
        shared: false,
        device: SpaceDevice::None,
    };
    ends.change(|stream| stream.to_service.extend(attach.encode(1)));
    ends.replies(1).await;
    ends
}

/// Sends so many requests at once, which take a turn of the cache each.
fn ask(ends: &Ends, ids: Range<u64>) {
    ends.change(|stream| stream.to_service.extend(ids.flat_map(|id| Request::Sync.encode(id))));
}

/// A client does not read until the service stops to listen, then reads all replies at once. `more`: requests that the
/// service has received, and not answered, at that time.
async fn read_all_at_once(more: usize) {
    let state = state();
    let connection = state.enter(1, 1);
    let ends = Arc::new(Ends::default());
    let session = spawn_local(serve(state, connection, Arc::<Ends>::clone(&ends)));
    ends.change(|stream| stream.to_service.extend(Hello::ours().encode()));
    let mut asked = 0;
    // Answered with an error: the client has no space.
    let mut ask = |count| {
        for _ in 0..count {
            asked += 1;
            ends.change(|stream| stream.to_service.extend(Request::Sync.encode(asked as u64)));
        }
        asked
    };
    while !ends.lock().only_sends {
        if ends.lock().to_service.is_empty() {
            ask(1 + more);
        }
        yield_now().await;
    }
    ends.change(|stream| stream.takes = true);
    let wanted = ask(0);
    timeout(HANG, ends.replies(wanted)).await.expect("all replies");
    let wanted = ask(1);
    timeout(HANG, ends.replies(wanted)).await.expect("a reply to a request that came afterwards");
    assert!(!ends.lock().over);
    ends.change(|stream| stream.hung_up = true);
    timeout(HANG, session).await.expect("the hang-up is seen").expect("no panic");
    assert!(ends.lock().over, "the stream may have more owners than the session");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_all_its_replies_at_once_is_served_on() {
    for more in [0, 100] {
        LocalSet::new().run_until(read_all_at_once(more)).await;
    }
}

/// A client asks after another has begun to send a long frame.
async fn asks_behind_a_long_frame() {
    const KEYS: usize = 32_768;
    let state = state();
    let (long, client) = (attached(&state).await, come(&state));
    let keys = vec![BlockKey::new([1; 32]); KEYS];
    long.change(|stream| stream.to_service.extend(Request::Touch { keys }.encode(2)));
    client.change(|stream| stream.to_service.extend(Request::Sync.encode(1)));
    client.replies(1).await;
    let left = long.lock().to_service.len();
    assert!(left > KEYS * 16, "{left} bytes of a long frame had not come when another request was answered");
    long.replies(2).await;
    assert_eq!(long.lock().to_service.len(), 0);
    state.spaces.close().await.expect("in memory only");
}

#[tokio::test]
async fn a_request_does_not_wait_for_a_long_frame() {
    LocalSet::new().run_until(asks_behind_a_long_frame()).await;
}

/// A client asks after many others have hung up, all before the service's thread has its turn.
async fn asks_behind_a_crowd() {
    const CROWD: usize = 100;
    let state = state();
    let (crowd, client): (Vec<_>, _) = ((0..CROWD).map(|_| come(&state)).collect(), come(&state));
    while client.lock().waker.is_none() {
        yield_now().await;
    }
    assert_eq!(state.connections() as usize, CROWD + 1);
    crowd.iter().for_each(|ends| ends.change(|stream| stream.hung_up = true));
    client.change(|stream| stream.to_service.extend(Request::Sync.encode(1)));
    timeout(HANG, client.replies(1)).await.expect("a reply");
    let over = crowd.iter().filter(|ends| ends.lock().over).count();
    assert!(over <= 5, "{over} of {CROWD} connections ended before the request was answered");
    for _ in 0..2 * CROWD {
        yield_now().await;
    }
    assert_eq!(state.connections(), 1, "one ends in each turn");
    assert!(crowd.iter().all(|ends| ends.lock().over) && !client.lock().over);
}

#[tokio::test(start_paused = true)]
async fn a_request_does_not_wait_for_a_crowd_that_hangs_up() {
    LocalSet::new().run_until(asks_behind_a_crowd()).await;
}

/// As many requests as come at once begin together, so that their number is that of requests in flight.
async fn asks_for_too_much() {
    let mut config = ServerConfig::new("unused");
    config.requests_max = 4;
    let state = state_of(config);
    let client = attached(&state).await;
    ask(&client, 2..12);
    client.replies(11).await;
    let replies = all_replies(&client.lock().to_client);
    let busy = |reply: &&Reply| matches!(reply, Reply::Failed(failure) if failure.fault == ServiceFault::Busy);
    let done = replies.iter().filter(|reply| **reply == Reply::Done).count();
    assert_eq!((done, replies.iter().filter(busy).count()), (4, 6), "{replies:?}");
    ask(&client, 12..13);
    client.replies(12).await;
    assert_eq!(all_replies(&client.lock().to_client).last(), Some(&Reply::Done), "the others have ended");
    state.spaces.close().await.expect("in memory only");
}

#[tokio::test]
async fn requests_past_the_limit_are_refused_until_others_have_ended() {
    LocalSet::new().run_until(asks_for_too_much()).await;
}

/// The service drains while requests are in flight.
async fn asks_before_a_drain() {
    let state = state();
    let client = attached(&state).await;
    let mut asked = 2;
    while state.status().clients.iter().all(|client| client.requests == 0) {
        if client.lock().to_service.is_empty() {
            ask(&client, asked..asked + 16);
            asked += 16;
        }
        yield_now().await;
    }
    state.drain();
    while !client.lock().over {
        yield_now().await;
    }
    let replies = all_replies(&client.lock().to_client);
    let Some((Reply::Goodbye(failure), answers)) = replies.split_last() else { panic!("{replies:?}") };
    assert_eq!(failure.fault, ServiceFault::Draining);
    // Those that came when it had begun to drain are not among them.
    let begun = asked as usize - 1 - client.lock().to_service.len() / Request::Sync.encode(1).len();
    assert_eq!(answers.len(), begun, "every request that was begun is answered");
    state.spaces.close().await.expect("in memory only");
}

#[tokio::test]
async fn a_session_that_drains_answers_every_request_that_it_has_begun() {
    LocalSet::new().run_until(asks_before_a_drain()).await;
}

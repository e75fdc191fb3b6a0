//! The connections of `--http`: one request each, a deadline for each, and room for the next one.

use std::{collections::VecDeque, io, sync::Arc, time::Duration};

use axum::Router;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinHandle,
    time::{Instant, sleep, timeout, timeout_at},
};

/// The pause after a connection that could not be accepted, for lack of file descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);

/// What clients may use of the address.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Connections at a time; the others wait. Each takes a file descriptor, which the service's own clients need.
    pub(super) connections_max: usize,
    /// A connection is closed after so long, wherever its one request and the answer are.
    pub(super) exchange: Duration,
    /// While others wait, the oldest connection is closed that has had so long.
    pub(super) grace: Duration,
}

impl Limits {
    pub(super) const SERVICE: Limits =
        Limits { connections_max: 64, exchange: Duration::from_secs(30), grace: Duration::from_secs(1) };
}

/// Answers one request of each connection, until the process ends.
pub(super) async fn answer(listener: TcpListener, routes: Router, limits: Limits) -> io::Result<()> {
    let slots = Arc::new(Semaphore::new(limits.connections_max));
    let mut open: VecDeque<(Instant, JoinHandle<()>)> = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "--http: a connection cannot be accepted");
                sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        let slot = loop {
            open.retain(|(_, connection)| !connection.is_finished());
            let room = Arc::clone(&slots).acquire_owned();
            let Some((since, _)) = open.front() else { break room.await };
            match timeout_at(*since + limits.grace, room).await {
                Ok(slot) => break slot,
                // Nobody knows which one is to blame: the one that had the longest time.
                Err(_) => {
                    if let Some((_, oldest)) = open.pop_front() {
                        oldest.abort();
                        drop(oldest.await);
                    }
                }
            }
        };
        let slot = slot.map_err(io::Error::other)?;
        let exchange = exchange(stream, routes.clone(), limits.exchange);
        let connection = tokio::spawn(async move {
            exchange.await;
            drop(slot);
        });
        open.push_back((Instant::now(), connection));
    }
}

/// Answers the first request of a connection, and closes it.
async fn exchange(stream: TcpStream, routes: Router, patience: Duration) {
    let mut http = Builder::new(TokioExecutor::new()).http1_only();
    // A connection without an end would be one without a deadline.
    http.http1().keep_alive(false);
    let served = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    match timeout(patience, served).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(error, "--http: a connection ended"),
        Err(_) => tracing::debug!(?patience, "--http: a connection was closed in the middle of its request"),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{SocketAddr, TcpStream},
        sync::atomic::{AtomicUsize, Ordering::SeqCst},
        thread,
    };

    use axum::routing::get;

    use super::*;

    /// More than anything takes.
    const LONG: Duration = Duration::from_secs(600);

    /// Answers at an address for the rest of the process.
    fn answering(routes: Router, limits: Limits) -> SocketAddr {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
        listener.set_nonblocking(true).expect("set");
        let address = listener.local_addr().expect("an address");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        thread::spawn(move || {
            runtime.block_on(async { answer(TcpListener::from_std(listener)?, routes, limits).await })
        });
        address
    }

    /// A connection with a request, or a part of one.
    fn sent(address: SocketAddr, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        stream.write_all(text.as_bytes()).expect("sent");
        stream
    }

    fn answered(mut stream: TcpStream) -> String {
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer, and the end");
        text
    }

    /// Sends a request again until it is answered: on a busy machine the time of a connection may be over before that.
    fn answered_at_last(address: SocketAddr, text: &str) {
        let hang = std::time::Instant::now() + Duration::from_secs(60);
        let mut answer = String::new();
        while !answer.ends_with("well") {
            assert!(std::time::Instant::now() < hang, "{answer:?}");
            answer.clear();
            _ = sent(address, text).read_to_string(&mut answer);
        }
    }

    /// Its bytes until it ends, however.
    fn ended(mut stream: TcpStream) -> usize {
        let (mut total, mut bytes) = (0, vec![0; 1 << 16]);
        loop {
            match stream.read(&mut bytes) {
                Ok(0) => return total,
                Ok(read) => total += read,
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
                    return total;
                }
            }
        }
    }

    const REQUEST: &str = "GET / HTTP/1.0\r\n\r\n";
    /// More than the buffers of two sockets.
    const LARGE: usize = 64 << 20;

    fn routes() -> Router {
        Router::new().route("/", get(async || "well")).route("/large", get(async || "x".repeat(LARGE)))
    }

    #[test]
    fn connections_that_send_no_head_are_closed() {
        let address =
            answering(routes(), Limits { connections_max: 3, exchange: Duration::from_millis(10), grace: LONG });
        let idle = ["", "GET / HT", ""].map(|text| sent(address, text));
        // After one of them is closed; and one that goes on is closed after its answer.
        answered_at_last(address, REQUEST);
        answered_at_last(address, "GET / HTTP/1.1\r\nHost: a\r\n\r\n");
        assert_eq!(idle.map(ended), [0; 3]);
    }

    #[test]
    fn a_connection_that_does_not_read_its_answer_is_closed_at_its_deadline() {
        let address =
            answering(routes(), Limits { connections_max: 2, exchange: Duration::from_millis(10), grace: LONG });
        let unread = [(); 2].map(|()| sent(address, "GET /large HTTP/1.0\r\n\r\n"));
        // After one of them is closed.
        answered_at_last(address, REQUEST);
        unread.into_iter().for_each(|stream| assert!(ended(stream) < LARGE, "the rest is not sent"));
    }

    #[test]
    fn more_connections_than_may_be_open_and_never_read_keep_nobody_out() {
        const MAX: usize = 4;
        let limits = Limits { connections_max: MAX, exchange: LONG, grace: Duration::from_millis(1) };
        let address = answering(routes(), limits);
        let unread: Vec<TcpStream> = (0..3 * MAX).map(|_| sent(address, "GET /large HTTP/1.0\r\n\r\n")).collect();
        for _ in 0..3 {
            assert!(answered(sent(address, REQUEST)).ends_with("well"));
        }
        drop(unread);
    }

    #[test]
    fn so_many_connections_are_answered_at_a_time() {
        const MAX: usize = 4;
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let seen = Arc::clone(&most);
        let handle = async move || {
            seen.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
            // So long that all connections which may be accepted are.
            for _ in 0..1000 {
                tokio::task::yield_now().await;
            }
            now.fetch_sub(1, SeqCst);
            "well"
        };
        let limits = Limits { connections_max: MAX, exchange: LONG, grace: LONG };
        let address = answering(Router::new().route("/", get(handle)), limits);
        let streams: Vec<TcpStream> = (0..4 * MAX).map(|_| sent(address, REQUEST)).collect();
        for stream in streams {
            assert!(answered(stream).ends_with("well"));
        }
        let most = most.load(SeqCst);
        assert!((1..=MAX).contains(&most), "{most} at a time");
    }
}

//! `kvhoist serve --http ADDR`: metrics, health and a page about a running service.

mod drives;
mod exposition;
mod figures;
#[cfg(feature = "otel")]
pub mod otlp;

use std::{
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    sync::Arc,
    thread,
    time::Duration,
};

use axum::{
    Router,
    extract::State,
    http::{HeaderName, StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::get,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use kvhoist::{
    internals::service::{OpenSpace, ServiceReport},
    service::{Server, ServiceStatus},
};
use tokio::sync::{Mutex, Semaphore};

pub use self::drives::Drive;
use self::figures::Metric;
use crate::{failure::Failure, status::object};

/// Scripts and pictures of the page itself, requests to the same address, and nothing else.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'";

/// Connections at a time; the others wait. Each takes a file descriptor, which the service's own clients need.
const CONNECTIONS_MAX: usize = 64;
/// A connection is closed that sends no complete head of a request for so long, also between two requests.
const HEAD_PATIENCE: Duration = Duration::from_secs(30);
/// The pause after a connection that could not be accepted, for lack of file descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);

/// A service and its drives.
pub struct Source {
    server: Arc<Server>,
    /// Where its stores are.
    paths: Vec<PathBuf>,
}

/// What a service and its drives report.
pub struct Seen {
    status: ServiceStatus,
    spaces: Vec<OpenSpace>,
    drives: Vec<Drive>,
}

impl Source {
    pub fn new(server: Arc<Server>, paths: Vec<PathBuf>) -> Self {
        Source { server, paths }
    }

    /// Asks the service and its drives. Blocks the thread.
    pub fn ask(&self) -> Result<Seen, kvhoist::Error> {
        let ServiceReport { status, spaces, .. } = self.server.report()?;
        Ok(Seen { status, spaces, drives: Drive::of(&self.paths) })
    }
}

impl Seen {
    /// Every metric.
    pub fn metrics(&self) -> Vec<Metric> {
        figures::collect(&self.status, &self.spaces, &self.drives)
    }
}

/// The source of all requests. They wait for one another: the service answers one at a time.
type Shared = Arc<Mutex<Arc<Source>>>;

/// What the source reports, or the text for the client if it does not answer.
async fn ask(source: &Shared) -> Result<Seen, String> {
    let source = source.lock().await;
    let asked = Arc::clone(&source);
    match tokio::task::spawn_blocking(move || asked.ask()).await {
        Ok(Ok(seen)) => Ok(seen),
        Ok(Err(error)) => Err(format!("{error}\n")),
        Err(error) => Err(format!("{error}\n")),
    }
}

/// Listens at an address and answers on a thread of its own until the process ends. Gives the address, whose port the
/// system has chosen where 0 was asked for.
///
/// # Errors
/// [`Failure::USAGE`] where the address cannot be listened at.
pub fn start(address: SocketAddr, source: Arc<Source>) -> Result<SocketAddr, Failure> {
    let refused = |error: std::io::Error| {
        Failure::usage(format!("--http {address}: {error}; name an address of this machine and a port that is free"))
    };
    let listener = TcpListener::bind(address).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    let source: Shared = Arc::new(Mutex::new(source));
    let routes = Router::new()
        .route("/", get(page))
        .route("/metrics", get(metrics))
        .route("/healthz", get(health))
        .route("/status.json", get(figures))
        .with_state(source);
    let failed = |error| Failure::run(format!("cannot start a thread: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let serve = move || {
        let served = runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            answer(listener, routes, CONNECTIONS_MAX, HEAD_PATIENCE).await
        });
        if let Err(error) = served {
            tracing::error!(%error, "--http: no more requests are answered");
        }
    };
    thread::Builder::new().name("kvhoist-http".into()).spawn(serve).map_err(failed)?;
    Ok(address)
}

/// Answers the requests of a limited number of connections at a time.
async fn answer(
    listener: tokio::net::TcpListener,
    routes: Router,
    connections_max: usize,
    head_patience: Duration,
) -> std::io::Result<()> {
    let mut http = Builder::new(TokioExecutor::new()).http1_only();
    http.http1().timer(TokioTimer::new()).header_read_timeout(head_patience);
    let slots = Arc::new(Semaphore::new(connections_max));
    loop {
        let slot = Arc::clone(&slots).acquire_owned().await.map_err(std::io::Error::other)?;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "--http: a connection cannot be accepted");
                tokio::time::sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        let (http, service) = (http.clone(), TowerToHyperService::new(routes.clone()));
        tokio::spawn(async move {
            if let Err(error) = http.serve_connection(TokioIo::new(stream), service).await {
                tracing::debug!(error, "--http: a connection ended");
            }
            drop(slot);
        });
    }
}

async fn metrics(State(source): State<Shared>) -> Response {
    match ask(&source).await {
        Ok(seen) => {
            ([(header::CONTENT_TYPE, exposition::CONTENT_TYPE)], exposition::text(&seen.metrics())).into_response()
        }
        Err(away) => (StatusCode::SERVICE_UNAVAILABLE, away).into_response(),
    }
}

async fn figures(State(source): State<Shared>) -> Response {
    match ask(&source).await {
        Ok(Seen { status, drives, .. }) => {
            let mut object = object(&status);
            object["drives"] = drives.iter().map(Drive::object).collect();
            ([(header::CONTENT_TYPE, "application/json")], object.to_string()).into_response()
        }
        Err(away) => (StatusCode::SERVICE_UNAVAILABLE, away).into_response(),
    }
}

/// 200 while all is well; 503 with the reasons, a line each, else.
async fn health(State(source): State<Shared>) -> (StatusCode, String) {
    match ask(&source).await {
        Ok(seen) => match troubles(&seen.status).as_slice() {
            [] => (StatusCode::OK, "ok\n".into()),
            troubles => (StatusCode::SERVICE_UNAVAILABLE, troubles.join("\n") + "\n"),
        },
        Err(away) => (StatusCode::SERVICE_UNAVAILABLE, away),
    }
}

/// Why the service is not well.
fn troubles(status: &ServiceStatus) -> Vec<String> {
    let draining = status.draining.then(|| "draining: no more requests are taken".to_owned());
    let disks = status.spaces.iter().filter_map(|space| {
        let trouble = &space.stats.as_ref()?.disk_trouble;
        (!trouble.is_empty()).then(|| format!("disk of space {:?}: {}", space.namespace, trouble))
    });
    draining.into_iter().chain(disks).collect()
}

async fn page() -> impl IntoResponse {
    let headers: [(HeaderName, &str); 2] =
        [(header::CONTENT_SECURITY_POLICY, POLICY), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (headers, Html(include_str!("page.html")))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpStream,
        sync::atomic::{AtomicUsize, Ordering::SeqCst},
    };

    use kvhoist::service::{SpaceStats, SpaceStatus};

    use super::*;

    /// Answers at an address for the rest of the process.
    fn answering(routes: Router, connections_max: usize, head_patience: Duration) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        listener.set_nonblocking(true).expect("set");
        let address = listener.local_addr().expect("an address");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        thread::spawn(move || {
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener)?;
                answer(listener, routes, connections_max, head_patience).await
            })
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

    const REQUEST: &str = "GET / HTTP/1.0\r\n\r\n";

    #[test]
    fn connections_that_send_no_head_are_closed() {
        let routes = Router::new().route("/", get(async || "well"));
        let address = answering(routes, 3, Duration::from_millis(10));
        let idle = ["", "GET / HT", "GET / HTTP/1.1\r\nHost: a\r\n\r\n"].map(|text| sent(address, text));
        assert!(answered(sent(address, REQUEST)).ends_with("well"), "after one of them is closed");
        let [silent, half, between] = idle.map(answered);
        assert_eq!((silent.as_str(), half.as_str()), ("", ""));
        assert!(between.ends_with("well"), "{between}");
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
        let address = answering(Router::new().route("/", get(handle)), MAX, HEAD_PATIENCE);
        let streams: Vec<TcpStream> = (0..4 * MAX).map(|_| sent(address, REQUEST)).collect();
        for stream in streams {
            assert!(answered(stream).ends_with("well"));
        }
        let most = most.load(SeqCst);
        assert!((1..=MAX).contains(&most), "{most} at a time");
    }

    #[test]
    fn a_service_is_well_until_it_drains_or_a_disk_fails() {
        let mut status = ServiceStatus { spaces: vec![SpaceStatus::default()], ..ServiceStatus::default() };
        assert_eq!(troubles(&status), Vec::<String>::new());
        let failed = SpaceStats { disk_trouble: "a write failed: EIO".into(), ..SpaceStats::default() };
        status.spaces.push(SpaceStatus { namespace: "a\nb".into(), stats: Some(failed), ..SpaceStatus::default() });
        assert_eq!(troubles(&status), [r#"disk of space "a\nb": a write failed: EIO"#]);
        status.draining = true;
        assert_eq!(troubles(&status).len(), 2);
    }
}

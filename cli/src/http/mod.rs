//! `kvhoist serve --http ADDR`: metrics, health and a page about a running service.

mod connections;
mod drives;
mod exposition;
mod figures;
mod host;
#[cfg(feature = "otel")]
pub mod otlp;

use std::{
    io::{self, ErrorKind},
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    sync::Arc,
    thread,
};

use axum::{
    Router,
    extract::State,
    http::{HeaderName, StatusCode, header},
    middleware,
    response::{Html, IntoResponse, Response},
    routing::get,
};
use kvhoist_service::{
    Server, ServiceStatus,
    internals::{OpenSpace, ServiceReport},
};
use tokio::sync::Mutex;

pub use self::drives::Drive;
use self::{connections::Limits, figures::Metric};
use crate::{failure::Failure, status::object};

/// Scripts and pictures of the page itself, requests to the same address, and nothing else.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'";

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
    // Held by the thread that asks: a connection may be closed before it has its answer.
    let source = Arc::clone(source).lock_owned().await;
    match tokio::task::spawn_blocking(move || source.ask()).await {
        Ok(Ok(seen)) => Ok(seen),
        Ok(Err(error)) => Err(format!("{error}\n")),
        Err(error) => Err(format!("{error}\n")),
    }
}

/// Where requests come in: `IP:PORT`, or `localhost:PORT`.
///
/// # Errors
/// What was found and what was expected.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let numbers = text.strip_prefix("localhost:").map(|port| format!("127.0.0.1:{port}"));
    let parsed = numbers.as_deref().unwrap_or(text).parse();
    parsed.map_err(|_| "expected IP:PORT, such as 127.0.0.1:9401, or 0.0.0.0:9401 for all addresses".into())
}

/// An address of which nothing else in the system can be listening.
pub struct Bound {
    listener: TcpListener,
    /// Its port is the system's choice where 0 was asked for.
    pub address: SocketAddr,
}

/// Takes an address, before the service starts.
///
/// # Errors
/// Where the address cannot be listened at: [`Failure::USAGE`] if this user may not, another status if it may be free,
/// or of this machine, later.
pub fn bind(address: SocketAddr) -> Result<Bound, Failure> {
    let refused = |error: io::Error| {
        let why = error.kind();
        let text = format!("--http {address}: {why}; name an address of this machine and a port that is free");
        if why == ErrorKind::PermissionDenied { Failure::usage(text) } else { Failure::run(text) }
    };
    let listener = TcpListener::bind(address).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    Ok(Bound { listener, address })
}

/// Answers on a thread of its own until the process ends: requests for an IP address, for localhost, and for these
/// `names`.
///
/// # Errors
/// Where there is no thread.
pub fn start(bound: Bound, names: &[String], source: Arc<Source>) -> Result<(), Failure> {
    let listener = bound.listener;
    let source: Shared = Arc::new(Mutex::new(source));
    let routes = Router::new()
        .route("/", get(page))
        .route("/metrics", get(metrics))
        .route("/healthz", get(health))
        .route("/status.json", get(figures))
        .with_state(source)
        .layer(middleware::from_fn_with_state(Arc::from(names), host::check));
    let failed = |error| Failure::run(format!("cannot start a thread: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let serve = move || {
        let served = runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            connections::answer(listener, routes, Limits::SERVICE).await
        });
        if let Err(error) = served {
            tracing::error!(%error, "--http: no more requests are answered");
        }
    };
    thread::Builder::new().name("kvhoist-http".into()).spawn(serve).map_err(failed)?;
    Ok(())
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
        let trouble = space.stats.as_ref()?.disk_trouble()?;
        Some(format!("disk of space {:?}: {trouble}", space.namespace))
    });
    let spaces = status.trouble.as_ref().map(|trouble| format!("spaces cannot be opened: {trouble}"));
    draining.into_iter().chain(spaces).chain(disks).collect()
}

async fn page() -> impl IntoResponse {
    let headers: [(HeaderName, &str); 2] =
        [(header::CONTENT_SECURITY_POLICY, POLICY), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (headers, Html(include_str!("page.html")))
}

#[cfg(test)]
mod tests {
    use kvhoist::Stats;
    use kvhoist_service::SpaceStatus;

    use super::*;

    #[test]
    fn a_service_is_well_until_it_drains_or_a_disk_fails() {
        let mut status = ServiceStatus { spaces: vec![SpaceStatus::default()], ..ServiceStatus::default() };
        assert_eq!(troubles(&status), Vec::<String>::new());
        let mut failed = Stats::default();
        failed.disk_read_only = Some("a write failed: EIO".into());
        status.spaces.push(SpaceStatus { namespace: "a\nb".into(), stats: Some(failed), ..SpaceStatus::default() });
        assert_eq!(troubles(&status), [r#"disk of space "a\nb": a write failed: EIO"#]);
        status.draining = true;
        status.trouble = Some("/b: found a read-only file system".into());
        assert_eq!(troubles(&status).len(), 3);
    }
}

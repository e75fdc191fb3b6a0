//! `kvhoist serve --http ADDR`: metrics, health and a page about a running service.

mod asked;
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
use kvhoist::Stats;
use kvhoist_service::{
    Server, ServiceStatus,
    internals::{OpenSpace, ServiceReport},
};

pub use self::drives::Drive;
use self::{asked::Asked, connections::Limits};
use crate::{failure::Failure, status::object};

/// Scripts and pictures of the page itself, requests to the same address, and nothing else.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'";

/// A service and its drives.
pub struct Source {
    server: Arc<Server>,
    /// Where its stores are.
    paths: Vec<PathBuf>,
}

/// What a service reports.
struct Report {
    status: ServiceStatus,
    spaces: Vec<OpenSpace>,
}

impl Source {
    pub fn new(server: Arc<Server>, paths: Vec<PathBuf>) -> Self {
        Source { server, paths }
    }

    /// Asks the service. Blocks the thread.
    fn report(&self) -> Result<Report, kvhoist::Error> {
        let ServiceReport { status, spaces, .. } = self.server.report()?;
        Ok(Report { status, spaces })
    }
}

/// Whom requests ask. A drive that hangs keeps nobody from asking the service.
#[derive(Clone)]
struct Sources {
    service: Asked<Result<Arc<Report>, kvhoist::Error>>,
    drives: Asked<Arc<[Drive]>>,
}

impl Sources {
    fn new(source: Arc<Source>) -> Self {
        let of_drives = Arc::clone(&source);
        Sources {
            service: Asked::new("the service", move || source.report().map(Arc::new)),
            drives: Asked::new("the drives", move || Drive::of(&of_drives.paths).into()),
        }
    }

    /// What the service reports, or the text for the client if it does not answer.
    async fn report(&self) -> Result<Arc<Report>, String> {
        self.service.ask().await?.map_err(|error| format!("{error}\n"))
    }

    /// That, and what the drives say: nothing of those that do not answer.
    async fn report_and_drives(&self) -> Result<(Arc<Report>, Arc<[Drive]>), String> {
        let (report, drives) = tokio::join!(self.report(), self.drives.ask());
        Ok((report?, drives.unwrap_or_default()))
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
    let routes = Router::new()
        .route("/", get(page))
        .route("/metrics", get(metrics))
        .route("/healthz", get(health))
        .route("/status.json", get(figures))
        .with_state(Sources::new(source))
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

async fn metrics(State(sources): State<Sources>) -> Response {
    match sources.report_and_drives().await {
        Ok((report, drives)) => {
            let metrics = figures::collect(&report.status, &report.spaces, &drives);
            ([(header::CONTENT_TYPE, exposition::CONTENT_TYPE)], exposition::text(&metrics)).into_response()
        }
        Err(away) => (StatusCode::SERVICE_UNAVAILABLE, away).into_response(),
    }
}

async fn figures(State(sources): State<Sources>) -> Response {
    match sources.report_and_drives().await {
        Ok((report, drives)) => {
            let mut object = object(&report.status);
            object["drives"] = drives.iter().map(Drive::object).collect();
            ([(header::CONTENT_TYPE, "application/json")], object.to_string()).into_response()
        }
        Err(away) => (StatusCode::SERVICE_UNAVAILABLE, away).into_response(),
    }
}

/// 200 while all is well; 503 with the reasons, a line each, else.
async fn health(State(sources): State<Sources>) -> (StatusCode, String) {
    match sources.report().await {
        Ok(report) => match troubles(&report.status).as_slice() {
            [] => (StatusCode::OK, "ok\n".into()),
            troubles => (StatusCode::SERVICE_UNAVAILABLE, troubles.join("\n") + "\n"),
        },
        Err(away) => (StatusCode::SERVICE_UNAVAILABLE, away),
    }
}

/// Why the service is not well.
fn troubles(status: &ServiceStatus) -> Vec<String> {
    let draining = status.draining.then(|| "draining: no more requests are taken".to_owned());
    let tiers = status.spaces.iter().flat_map(|space| {
        let stats = space.stats.as_ref();
        let disk = stats.and_then(Stats::disk_trouble).map(|trouble| ("disk", trouble));
        let device = stats.and_then(|stats| stats.device_retired.as_deref()).map(|trouble| ("device", trouble));
        let told = |(tier, trouble)| format!("{tier} of space {:?}: {trouble}", space.namespace);
        disk.into_iter().chain(device).map(told)
    });
    let spaces = status.trouble.as_ref().map(|trouble| format!("spaces cannot be opened: {trouble}"));
    draining.into_iter().chain(spaces).chain(tiers).collect()
}

async fn page() -> impl IntoResponse {
    let headers: [(HeaderName, &str); 2] =
        [(header::CONTENT_SECURITY_POLICY, POLICY), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (headers, Html(include_str!("page.html")))
}

#[cfg(test)]
mod tests {
    use kvhoist_service::SpaceStatus;

    use std::{sync::mpsc, time::Duration};

    use super::*;

    /// Each question waits for a word, and is answered with an idle service.
    fn slow(patience: Duration) -> (Sources, mpsc::Sender<()>) {
        let (answer, answers) = mpsc::channel();
        let answers = std::sync::Mutex::new(answers);
        let report = move || {
            answers.lock().expect("no panic").recv().map_err(|_| kvhoist::Error::Closed)?;
            Ok(Arc::new(Report { status: ServiceStatus::default(), spaces: Vec::new() }))
        };
        let service = Asked::new("the service", report).patience(patience);
        (Sources { service, drives: Asked::new("the drives", Arc::default) }, answer)
    }

    #[test]
    fn a_service_that_does_not_answer_is_not_well_and_one_that_answers_again_is() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (sources, answer) = slow(Duration::from_millis(10));
        runtime.block_on(async {
            // Of all of them one is asked: the others wait for it.
            for _ in 0..3 {
                let (status, text) = health(State(sources.clone())).await;
                let said = (status, text.as_str());
                assert_eq!(said, (StatusCode::SERVICE_UNAVAILABLE, "the service has not answered for 0.01 s\n"));
            }
            assert_eq!(metrics(State(sources.clone())).await.status(), StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(figures(State(sources.clone())).await.status(), StatusCode::SERVICE_UNAVAILABLE);
            // The one that nobody waits for any more, and the next.
            (0..2).for_each(|_| answer.send(()).expect("it waits"));
            let sources = Sources { service: sources.service.patience(Duration::from_secs(600)), ..sources };
            assert_eq!(health(State(sources)).await, (StatusCode::OK, "ok\n".into()));
        });
    }

    #[test]
    fn drives_that_do_not_answer_keep_nobody_from_the_service() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (sources, answer) = slow(Duration::from_secs(600));
        let (end, ends) = mpsc::channel::<()>();
        let ends = std::sync::Mutex::new(ends);
        let hangs = move || {
            _ = ends.lock().expect("no panic").recv();
            Arc::default()
        };
        let drives = Asked::new("the drives", hangs).patience(Duration::from_millis(10));
        let sources = Sources { drives, ..sources };
        runtime.block_on(async {
            (0..3).for_each(|_| answer.send(()).expect("it waits"));
            assert_eq!(metrics(State(sources.clone())).await.status(), StatusCode::OK);
            assert_eq!(figures(State(sources.clone())).await.status(), StatusCode::OK);
            assert_eq!(health(State(sources)).await.0, StatusCode::OK);
        });
        drop(end);
    }

    #[test]
    fn a_service_is_well_until_it_drains_or_a_disk_or_a_gpu_fails() {
        let mut status = ServiceStatus { spaces: vec![SpaceStatus::default()], ..ServiceStatus::default() };
        assert_eq!(troubles(&status), Vec::<String>::new());
        let mut failed = Stats::default();
        failed.disk_read_only = Some("a write failed: EIO".into());
        status.spaces.push(SpaceStatus { namespace: "a\nb".into(), stats: Some(failed), ..SpaceStatus::default() });
        assert_eq!(troubles(&status), [r#"disk of space "a\nb": a write failed: EIO"#]);
        let mut failed = Stats::default();
        failed.device_retired = Some("CUDA_ERROR_ILLEGAL_ADDRESS".into());
        status.spaces[0] = SpaceStatus { namespace: "g".into(), stats: Some(failed), ..SpaceStatus::default() };
        assert_eq!(troubles(&status)[0], r#"device of space "g": CUDA_ERROR_ILLEGAL_ADDRESS"#);
        status.draining = true;
        status.trouble = Some("/b: found a read-only file system".into());
        assert_eq!(troubles(&status).len(), 4);
        let metrics = super::figures::collect(&status, &[], &[]);
        let counted = metrics.iter().find(|metric| metric.name == "kvhoist_service_trouble").expect("a metric");
        assert_eq!(counted.samples.iter().map(|sample| sample.value).collect::<Vec<_>>(), [4.0]);
    }
}

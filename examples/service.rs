//! A web service whose handlers await blocks, fetched or computed, with Prometheus metrics.
//!
//!     cargo run --example service            # then: PUT and GET /blocks/KEY, GET /metrics
//!
//! Listens on loopback only. `KEY` is 64 hexadecimal digits; a block is 64 KiB. SIGTERM and Ctrl-C drain it.

use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Path, State},
    http::StatusCode,
    routing::get,
};
use kvhoist::{BlockKey, Cache, Durations, Error};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::signal::{
    ctrl_c,
    unix::{SignalKind, signal},
};

const BLOCK_BYTES: usize = 64 << 10;
/// What a request may wait for a block of the disk.
const DEADLINE_MS: u64 = 2_000;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Before the cache opens: it keeps the handles of its counters.
    // A histogram with the buckets of a service and of Python, for the board; the exporter's own would be quantiles.
    let durations = Matcher::Full("kvhoist_movement_seconds".to_owned());
    let prometheus = PrometheusBuilder::new().set_buckets_for_metric(durations, &Durations::BOUNDS_SECONDS)?;
    let prometheus = prometheus.install_recorder()?;
    let directory = tempfile::tempdir()?;
    let settings = Cache::builder().block_bytes(BLOCK_BYTES).host_bytes(64 << 20).deadline_ms(DEADLINE_MS);
    let cache = settings.disk(directory.path(), 256 << 20).open().await?;
    let gauges = cache.clone();
    let app = Router::new()
        .route("/blocks/{key}", get(fetch).put(store))
        .route("/metrics", get(move || metrics(gauges.clone(), prometheus.clone())))
        .layer(DefaultBodyLimit::max(BLOCK_BYTES))
        .with_state(cache.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
    println!("http://{}", listener.local_addr()?);
    // Service managers and containers send SIGTERM.
    let mut terminated = signal(SignalKind::terminate())?;
    let stop = async move {
        tokio::select! {
            _ = ctrl_c() => {}
            _ = terminated.recv() => {}
        }
    };
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    cache.close().await?;
    Ok(())
}

async fn metrics(cache: Cache, prometheus: PrometheusHandle) -> String {
    cache.export_gauges();
    prometheus.render()
}

/// A missing block is computed once, however many clients ask for it at a time.
///
/// The block goes out as it lies in the cache: `Bytes` holds the lease, nothing is copied. A client that reads slowly
/// holds a slot of the host tier meanwhile: have more slots than clients, or send a copy.
async fn fetch(State(cache): State<Cache>, Path(key): Path<String>) -> Result<Bytes, (StatusCode, String)> {
    let key = parse(&key)?;
    match cache.get_or_fetch_with(&key, None, async || Ok::<_, Error>(compute(&key))).await {
        Ok(block) => Ok(block),
        Err(error) if error.is_transient() => Err(status(error)),
        // No miss: the cache cannot say whether it has the block. The client can have it all the same.
        Err(_) => Ok(compute(&key).into()),
    }
}

/// The expensive part of a real service.
fn compute(key: &BlockKey) -> Vec<u8> {
    key.as_bytes().repeat(BLOCK_BYTES / 32)
}

async fn store(
    State(cache): State<Cache>,
    Path(key): Path<String>,
    block: Bytes,
) -> Result<StatusCode, (StatusCode, String)> {
    let key = parse(&key)?;
    cache.store(&key, None, &block).await.map_err(status)?;
    Ok(StatusCode::CREATED)
}

fn parse(key: &str) -> Result<BlockKey, (StatusCode, String)> {
    key.parse().map_err(|error| (StatusCode::BAD_REQUEST, format!("{error}\n")))
}

fn status(error: Error) -> (StatusCode, String) {
    let status = match &error {
        Error::Argument { .. } => StatusCode::BAD_REQUEST,
        // Busy or slow: the same request may succeed later.
        error if error.is_transient() => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    (status, format!("{error}\n"))
}

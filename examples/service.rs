//! A web service whose handlers await block fetches, with Prometheus metrics.
//!
//!     cargo run --example service            # then: PUT and GET /blocks/KEY, GET /metrics
//!
//! Listens on loopback only. `KEY` is 64 hexadecimal digits; a block is 64 KiB.

use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Path, State},
    http::StatusCode,
    routing::get,
};
use kvhoist::{BlockKey, Cache, Durations, Error};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

const BLOCK_BYTES: usize = 64 << 10;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Before the cache opens: it keeps the handles of its counters.
    // A histogram with the buckets of a service and of Python, for the board; the exporter's own would be quantiles.
    let durations = Matcher::Full("kvhoist_movement_seconds".to_owned());
    let prometheus = PrometheusBuilder::new().set_buckets_for_metric(durations, &Durations::BOUNDS_SECONDS)?;
    let prometheus = prometheus.install_recorder()?;
    let directory = tempfile::tempdir()?;
    let cache =
        Cache::builder().block_bytes(BLOCK_BYTES).host_bytes(64 << 20).disk(directory.path(), 256 << 20).open().await?;
    let gauges = cache.clone();
    let app = Router::new()
        .route("/blocks/{key}", get(fetch).put(store))
        .route("/metrics", get(move || metrics(gauges.clone(), prometheus.clone())))
        .layer(DefaultBodyLimit::max(BLOCK_BYTES))
        .with_state(cache.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
    println!("http://{}", listener.local_addr()?);
    let stop = async { drop(tokio::signal::ctrl_c().await) };
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    cache.close().await?;
    Ok(())
}

async fn metrics(cache: Cache, prometheus: PrometheusHandle) -> String {
    cache.export_gauges();
    prometheus.render()
}

/// The block goes out as it lies in the cache: `Bytes` holds the lease, nothing is copied. A client that reads slowly
/// holds a slot of the host tier meanwhile: have more slots than clients, or send a copy.
async fn fetch(State(cache): State<Cache>, Path(key): Path<String>) -> Result<Bytes, (StatusCode, String)> {
    let key = parse(&key)?;
    match cache.fetch(&key).await.map_err(status)? {
        Some(lease) => Ok(lease.into()),
        None => Err((StatusCode::NOT_FOUND, "no such block\n".into())),
    }
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
        Error::Busy { .. } => StatusCode::TOO_MANY_REQUESTS,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    (status, format!("{error}\n"))
}

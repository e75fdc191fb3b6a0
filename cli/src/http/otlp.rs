//! `kvhoist serve --otlp URL`: metrics for an OpenTelemetry collector, by OTLP over HTTP.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use kvhoist_service::ServiceStatus;
use opentelemetry::{KeyValue, metrics::MeterProvider};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response, hyper::HyperClient};
use opentelemetry_otlp::{MetricExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::{
    Resource,
    metrics::{Instrument, PeriodicReader, SdkMeterProvider, Stream},
};
use tokio::runtime::Runtime;

use super::{
    Source, Sources,
    figures::{Kind, Metric, collect},
};
use crate::failure::Failure;

/// All instruments of one export share what the service said within this time.
const SAME_EXPORT: Duration = Duration::from_millis(50);

/// Most sets of labels of an instrument: 16 routes in each of 256 spaces.
const SETS_MAX: usize = 4_200;

/// Most sets of labels of a histogram's buckets: 24 of each of the 16 routes. The SDK reserves room for them, some
/// megabytes.
const BUCKETS_MAX: usize = 100_000;

/// A collector that does not answer within this time has missed an export.
const TIMEOUT: Duration = Duration::from_secs(10);

const EXPECTED: &str = "expected http://HOST:PORT, as of a collector on this machine";

/// A collector's URL.
///
/// # Errors
/// What was found and what was expected.
pub fn parse_url(text: &str) -> Result<String, String> {
    let url = text.parse::<axum::http::Uri>().map_err(|error| format!("found {error}, {EXPECTED}"))?;
    match url.scheme_str() {
        Some("http") => Ok(text.to_owned()),
        _ => Err(format!("found another protocol, {EXPECTED}")),
    }
}

/// Exports until it is dropped, and once more then.
pub struct Exporter(SdkMeterProvider);

impl Exporter {
    /// Begins to export: every minute, or as OTEL_METRIC_EXPORT_INTERVAL says (milliseconds).
    ///
    /// # Errors
    /// [`Failure::USAGE`] for a URL that the exporter does not take.
    pub fn start(url: &str, source: Arc<Source>) -> Result<Exporter, Failure> {
        let wrong = |why: String| Failure::usage(format!("--otlp {url}: found {why}, {EXPECTED}"));
        let failed = |error| Failure::run(format!("cannot start a thread: {error}"));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        // For good: its end would wait for a drive that hangs.
        let runtime: &'static Runtime = Box::leak(Box::new(runtime.map_err(failed)?));
        let client = OnRuntime { runtime, client: HyperClient::with_default_connector(TIMEOUT, None) };
        let exporter = MetricExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_endpoint(format!("{}/v1/metrics", url.trim_end_matches('/')))
            .with_timeout(TIMEOUT)
            .build()
            .map_err(|error| wrong(error.to_string()))?;
        let provider = SdkMeterProvider::builder()
            .with_reader(PeriodicReader::builder(exporter).build())
            .with_view(of_all_spaces)
            .with_resource(Resource::builder().with_service_name("kvhoist").build())
            .build();
        instruments(&provider, Sources::new(source), runtime);
        Ok(Exporter(provider))
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        if let Err(error) = self.0.shutdown() {
            tracing::warn!(%error, "--otlp: the last figures were not sent");
        }
    }
}

/// With many spaces there are more sets of labels than the 2,000 of which the SDK sends the figures.
fn of_all_spaces(instrument: &Instrument) -> Option<Stream> {
    let sets = if instrument.name().ends_with("_bucket") { BUCKETS_MAX } else { SETS_MAX };
    Stream::builder().with_cardinality_limit(sets).build().ok()
}

/// An observable instrument for every name of /metrics, with its labels. OpenTelemetry has no histogram that is
/// observed: the counters of one are counters.
fn instruments(provider: &SdkMeterProvider, sources: Sources, runtime: &'static Runtime) {
    let meter = provider.meter("kvhoist");
    let last = Arc::new(Last { sources, runtime, seen: Mutex::default() });
    // A service without spaces has the same metrics, and need not be asked.
    for (at, metric) in collect(&ServiceStatus::default(), &[], &[]).iter().enumerate() {
        let kind = metric.kind();
        let suffixes: &[&str] = if kind == Kind::Histogram { &["_bucket", "_sum", "_count"] } else { &[""] };
        for &suffix in suffixes {
            let last = Arc::clone(&last);
            let observe = move |record: &dyn Fn(f64, &[KeyValue])| {
                let metrics = last.metrics();
                let samples = metrics.get(at).map(|metric| &metric.samples[..]).unwrap_or_default();
                for sample in samples.iter().filter(|sample| sample.suffix == suffix) {
                    let labels: Vec<KeyValue> =
                        sample.labels.iter().map(|(name, value)| KeyValue::new(*name, value.clone())).collect();
                    record(sample.value, &labels);
                }
            };
            let (name, help) = (format!("{}{suffix}", metric.name), metric.help);
            if kind == Kind::Gauge {
                let gauge = meter.f64_observable_gauge(name).with_description(help);
                gauge.with_callback(move |to| observe(&|value, labels| to.observe(value, labels))).build();
            } else {
                let counter = meter.f64_observable_counter(name).with_description(help);
                counter.with_callback(move |to| observe(&|value, labels| to.observe(value, labels))).build();
            }
        }
    }
}

/// What the service last said.
struct Last {
    sources: Sources,
    runtime: &'static Runtime,
    seen: Mutex<Option<(Instant, Arc<Vec<Metric>>)>>,
}

impl Last {
    /// The metrics of this export: asked for by its first instrument. A service that has ended keeps its last ones.
    fn metrics(&self) -> Arc<Vec<Metric>> {
        let mut seen = self.seen.lock().expect("nothing panics under it");
        if let Some((at, metrics)) = &*seen
            && at.elapsed() < SAME_EXPORT
        {
            return Arc::clone(metrics);
        }
        let asked = self.runtime.block_on(self.sources.report_and_drives());
        let metrics = match (asked, &*seen) {
            (Ok((report, drives)), _) => Arc::new(collect(&report.status, &report.spaces, &drives)),
            (Err(_), Some((_, before))) => Arc::clone(before),
            (Err(_), None) => Arc::default(),
        };
        *seen = Some((Instant::now(), Arc::clone(&metrics)));
        metrics
    }
}

/// Hyper's client needs a runtime, and the reader's thread has none.
#[derive(Debug)]
struct OnRuntime {
    runtime: &'static Runtime,
    client: HyperClient,
}

#[async_trait::async_trait]
impl HttpClient for OnRuntime {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        self.runtime.spawn(async move { client.send_bytes(request).await }).await?
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        future::{Future, ready},
        sync::mpsc,
    };

    use opentelemetry_sdk::{
        error::OTelSdkResult,
        metrics::{
            Temporality,
            data::{AggregatedMetrics, MetricData, ResourceMetrics, ScopeMetrics},
            exporter::PushMetricExporter,
        },
    };

    use super::*;
    use crate::http::{Asked, Report};

    /// Counts the sets of labels that each metric has.
    #[derive(Clone, Default)]
    struct Counting(Arc<Mutex<BTreeMap<String, usize>>>);

    impl PushMetricExporter for Counting {
        fn export(&self, metrics: &ResourceMetrics) -> impl Future<Output = OTelSdkResult> + Send {
            for metric in metrics.scope_metrics().flat_map(ScopeMetrics::metrics) {
                let sets = match metric.data() {
                    AggregatedMetrics::F64(MetricData::Sum(sum)) => sum.data_points().count(),
                    AggregatedMetrics::F64(MetricData::Gauge(gauge)) => gauge.data_points().count(),
                    _ => panic!("{metric:?}"),
                };
                self.0.lock().expect("no panic").insert(metric.name().to_owned(), sets);
            }
            ready(Ok(()))
        }

        fn force_flush(&self) -> OTelSdkResult {
            Ok(())
        }

        fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
            Ok(())
        }

        fn temporality(&self) -> Temporality {
            Temporality::Cumulative
        }
    }

    #[test]
    fn the_buckets_of_many_spaces_are_all_sent() {
        let sets = Counting::default();
        let provider = SdkMeterProvider::builder()
            .with_reader(PeriodicReader::builder(sets.clone()).build())
            .with_view(of_all_spaces)
            .build();
        let meter = provider.meter("kvhoist");
        const NAME: &str = "kvhoist_movement_seconds_bucket";
        let counter = meter.f64_observable_counter(NAME);
        let observe = |set: i64| KeyValue::new("cache", set.to_string());
        counter.with_callback(move |to| (0..5000).for_each(|set| to.observe(1.0, &[observe(set)]))).build();
        provider.force_flush().expect("exported");
        assert_eq!(sets.0.lock().expect("no panic").get(NAME), Some(&5000));
    }

    #[test]
    fn a_drive_that_hangs_delays_no_start_and_its_figures_alone_are_missing() {
        let (end, ends) = mpsc::channel::<()>();
        let ends = Mutex::new(ends);
        let drives = move || {
            _ = ends.lock().expect("no panic").recv();
            Arc::default()
        };
        let (began, begins) = mpsc::channel::<()>();
        let report = move || {
            _ = began.send(());
            Ok(Arc::new(Report { status: ServiceStatus::default(), spaces: Vec::new() }))
        };
        let sources = Sources {
            service: Asked::new("the service", report).patience(Duration::from_secs(600)),
            drives: Asked::new("the drives", drives).patience(Duration::from_millis(10)),
        };
        let sets = Counting::default();
        let provider = SdkMeterProvider::builder().with_reader(PeriodicReader::builder(sets.clone()).build()).build();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        instruments(&provider, sources, Box::leak(Box::new(runtime.expect("a thread"))));
        assert!(begins.try_recv().is_err(), "nothing is asked before the first export");
        provider.force_flush().expect("exported");
        let seen = sets.0.lock().expect("no panic").clone();
        assert_eq!((seen.get("kvhoist_service_spaces"), seen.get("kvhoist_drive_used")), (Some(&1), None));
        drop(end);
    }
}

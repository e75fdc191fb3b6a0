//! `kvhoist serve --otlp` and a collector that decodes what it gets.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    time::Duration,
};

use kvhoist::block_on;
use kvhoist_service::{Client, ClientOptions};
use opentelemetry_proto::tonic::{
    collector::metrics::v1::ExportMetricsServiceRequest,
    common::v1::{KeyValue, any_value::Value},
    metrics::v1::{NumberDataPoint, metric::Data, number_data_point},
};
use prost::Message;

use super::{BLOCK_BYTES, Serving, get, kvhoist, text};

/// Values by metric and by labels.
type Figures = BTreeMap<String, BTreeMap<Vec<(String, String)>, f64>>;

/// Answers one request, and returns its path and body.
fn answer(listener: &TcpListener) -> (String, Vec<u8>) {
    let (stream, _) = listener.accept().expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
    let mut reader = BufReader::new(stream);
    let (mut first, mut bytes) = (String::new(), 0);
    reader.read_line(&mut first).expect("a request");
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).expect("a header");
        match line.trim_end().to_ascii_lowercase().split_once(": ") {
            Some(("content-length", length)) => bytes = length.parse().expect("a number"),
            Some(("content-type", kind)) => assert_eq!(kind, "application/x-protobuf"),
            Some(_) => {}
            None => break,
        }
    }
    let mut body = vec![0; bytes];
    reader.read_exact(&mut body).expect("the body");
    let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    reader.into_inner().write_all(answer).expect("answered");
    (first.split(' ').nth(1).expect("a path").to_owned(), body)
}

fn of_point(point: &NumberDataPoint) -> (Vec<(String, String)>, f64) {
    let label = |KeyValue { key, value, .. }: &KeyValue| match value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(value)) => (key.clone(), value.clone()),
        other => panic!("{key}: {other:?}"),
    };
    let mut labels: Vec<_> = point.attributes.iter().map(label).collect();
    labels.sort();
    let Some(number_data_point::Value::AsDouble(value)) = point.value else { panic!("{point:?}") };
    (labels, value)
}

fn decoded(body: &[u8]) -> Figures {
    let request = ExportMetricsServiceRequest::decode(body).expect("a request of OTLP");
    let scopes = request.resource_metrics.iter().flat_map(|resource| &resource.scope_metrics);
    let of_metric = |metric: &opentelemetry_proto::tonic::metrics::v1::Metric| {
        let points = match metric.data.as_ref().expect("data") {
            Data::Sum(sum) => {
                let counts = ["_total", "_bucket", "_sum", "_count"];
                assert!(sum.is_monotonic && counts.iter().any(|end| metric.name.ends_with(end)), "{}", metric.name);
                &sum.data_points
            }
            Data::Gauge(gauge) => &gauge.data_points,
            other => panic!("{other:?}"),
        };
        (metric.name.clone(), points.iter().map(of_point).collect())
    };
    scopes.flat_map(|scope| &scope.metrics).map(of_metric).collect()
}

#[test]
fn a_collector_gets_what_the_metrics_page_has() {
    let collector = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", collector.local_addr().expect("an address"));
    let interval = ("OTEL_METRIC_EXPORT_INTERVAL", "50");
    let serving = Serving::start_in(&["--http", "127.0.0.1:0", "--otlp", &url], &[interval]);
    let _client = block_on(Client::connect(serving.socket(), ClientOptions::new("a\"b", BLOCK_BYTES))).expect("there");
    let is_of_space =
        |labels: &[(String, String)]| labels.iter().any(|(name, value)| name == "cache" && value == "a\"b");
    // Exports from before the client was there have no space, and the first one after may have a part of its figures.
    let mut missing = Vec::new();
    let found = (0..1000).find_map(|_| {
        let (path, body) = answer(&collector);
        assert_eq!(path, "/v1/metrics");
        let figures = decoded(&body);
        if !figures.get("kvhoist_slots").is_some_and(|of| of.keys().any(|labels| is_of_space(labels))) {
            return None;
        }
        let (_, page) = get(serving.http.as_deref().expect("it says where"), "/metrics");
        let names = page.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split(['{', ' ']).next());
        missing = names.filter(|name| !figures.contains_key(*name)).map(str::to_owned).collect();
        missing.is_empty().then_some((figures, page))
    });
    let (figures, page) = found.unwrap_or_else(|| panic!("no export has {missing:?}"));
    let of = |name: &str, tier: &str| {
        let wanted = ("tier".to_owned(), tier.to_owned());
        figures[name].iter().find(|(labels, _)| labels.contains(&wanted)).map(|(_, value)| *value)
    };
    assert_eq!(of("kvhoist_resident_blocks", "disk"), Some(0.0));
    let slots = page.lines().find(|line| line.starts_with("kvhoist_slots{") && line.contains("tier=\"disk\""));
    let slots = slots.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    assert!(slots.is_some_and(|slots| slots > 0.0) && of("kvhoist_slots", "disk") == slots, "{slots:?}");
}

#[test]
fn a_collector_behind_another_protocol_is_refused() {
    let place = tempfile::tempdir().expect("a directory");
    let (socket, path) = (place.path().join("s").display().to_string(), place.path().display().to_string());
    let flags = ["serve", "--socket", &socket, "--path", &path, "--capacity", "2MiB", "--host-bytes", "1MiB"];
    let refused = kvhoist(&[&flags[..], &["--otlp", "https://collector:4318"]].concat());
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("expected http://HOST:PORT"), "{}", text(&refused.stderr));
    assert!(std::fs::read_dir(place.path()).expect("there").next().is_none(), "before it makes anything");
}

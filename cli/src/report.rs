//! The report of a replay: a table for people, an object for programs.

use kvhoist::{DeviceKind, Route, Tier};
use kvhoist_workbench::RouteTally;
use serde_json::{Value, json};

use crate::{columns::columns, replay::Summary, size::show_bytes};

/// One JSON object, or tables; of several traces a list of objects, or the tables one after another under their names.
pub fn text(summaries: &[Summary], json: bool) -> String {
    match (summaries, json) {
        ([summary], true) => format!("{:#}\n", object(summary)),
        ([summary], false) => table(summary),
        (_, true) => format!("{:#}\n", json!({ "traces": summaries.iter().map(object).collect::<Vec<_>>() })),
        (_, false) => {
            let tables = summaries.iter().map(|summary| format!("{}\n{}", summary.trace, table(summary)));
            tables.collect::<Vec<_>>().join("\n")
        }
    }
}

fn object(summary: &Summary) -> Value {
    let (tally, stats) = (&summary.tally, &summary.stats);
    let routes: serde_json::Map<String, Value> = tally
        .routes
        .iter()
        .map(|(route, figures)| {
            let value = json!({
                "blocks": figures.latency_ns.len(),
                "bytes": figures.bytes,
                "p50_us": figures.latency_ns.value_at_quantile(0.5) as f64 / 1e3,
                "p99_us": figures.latency_ns.value_at_quantile(0.99) as f64 / 1e3,
            });
            (route.name().to_owned(), value)
        })
        .collect();
    let mut object = json!(stats);
    for tier in Tier::ALL {
        object["tiers"][tier.name()]["hits"] = tally.hits[tier as usize].into();
    }
    let of_replay = json!({
        "trace": summary.trace,
        "requests": summary.requests,
        "requests_in_trace": summary.requests_in_trace,
        "complete": summary.requests == summary.requests_in_trace,
        "references": tally.references,
        "hits": tally.all_hits(),
        "hit_ratio": tally.hit_ratio(),
        "verification_failures": tally.verification_failures,
        "store_failures": tally.store_failures,
        "seconds": summary.seconds,
        "routes": routes,
        "config": summary.config,
    });
    for (name, value) in of_replay.as_object().expect("written above") {
        object[name] = value.clone();
    }
    object
}

/// Counters that a report has also where they are 0.
const ALWAYS: [&str; 2] = ["checksum_failures", "writes_refused"];

fn table(summary: &Summary) -> String {
    let (tally, stats) = (&summary.tally, &summary.stats);
    let mut text = String::new();
    let mut line = |row: String| {
        text.push_str(row.trim_end());
        text.push('\n');
    };
    line(format!("requests               {:>12}", summary.requests));
    if summary.requests < summary.requests_in_trace {
        line(format!("interrupted, of        {:>12}", summary.requests_in_trace));
    }
    line(format!("references             {:>12}", tally.references));
    line(format!("hits                   {:>12}", tally.all_hits()));
    line(format!("hit ratio              {:>12.4}", tally.hit_ratio()));
    line(format!("verification failures  {:>12}", tally.verification_failures));
    line(format!("store failures         {:>12}", tally.store_failures));
    for (name, count) in stats.counters().filter(|(name, count)| *count > 0 || ALWAYS.contains(name)) {
        line(format!("{:<23}{count:>12}", name.replace('_', " ")));
    }
    line(format!("writes declined        {:>12}", stats.writes_declined));
    line(format!("writes over budget     {:>12}", stats.writes_over_budget));
    line(format!("seconds                {:>12.2}", summary.seconds));
    let device = match summary.config.device.kind {
        _ if summary.config.device_slots() == 0 => "none",
        DeviceKind::Cuda => "cuda",
        _ => "simulated",
    };
    line(format!("device                 {device:>12}"));
    line(format!("storage                {:>12}{}", stats.storage, if stats.direct_io { ", direct I/O" } else { "" }));
    let row = |tier: Tier| {
        let (hits, figures) = (tally.hits[tier as usize], stats.tier(tier));
        vec![
            tier.name().to_owned(),
            hits.to_string(),
            format!("{:.4}", hits as f64 / (tally.references as f64).max(1.0)),
            figures.resident.to_string(),
            figures.slots.to_string(),
            figures.evictions.to_string(),
            figures.refused.to_string(),
            show_bytes(figures.bytes_in),
            show_bytes(figures.bytes_out),
        ]
    };
    let heads = ["tier", "hits", "of refs", "resident", "slots", "evictions", "refused", "bytes in", "bytes out"];
    text + "\n" + &columns(&heads, &Tier::ALL.map(row)) + &routes(summary)
}

/// A row for each route.
fn routes(summary: &Summary) -> String {
    let row = |(route, figures): (&Route, &RouteTally)| {
        let quantile = |q| format!("{:.1}", figures.latency_ns.value_at_quantile(q) as f64 / 1e3);
        vec![
            route.name().to_owned(),
            figures.latency_ns.len().to_string(),
            show_bytes(figures.bytes),
            show_bytes((figures.bytes as f64 / summary.seconds.max(1e-9)) as u64),
            quantile(0.5),
            quantile(0.99),
        ]
    };
    let rows: Vec<Vec<String>> = summary.tally.routes.iter().map(row).collect();
    "\n".to_owned() + &columns(&["route", "blocks", "bytes", "bytes/s", "p50 us", "p99 us"], &rows)
}

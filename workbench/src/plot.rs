//! The plot of a replay: hits per tier over the trace, as stacked areas in an SVG file.

use std::fmt::Write as _;

use kvhoist::Tier;

use crate::{curves::stack, tally::Tally, ticks::Ticks};

const BUCKETS: usize = 200;
const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 50.0;
const RIGHT: f64 = 20.0;
const BOTTOM: f64 = 50.0;
const SERIES: [(&str, &str); Tier::COUNT + 1] =
    [("device", "#1b6ca8"), ("host", "#3fa34d"), ("disk", "#e8a33d"), ("miss", "#d9d9d9")];

/// The plots of all traces below one another, each under its name, as the text of an SVG file.
pub fn draw(traces: &[(&str, &Tally)]) -> String {
    stack(traces, (WIDTH, HEIGHT), draw_panel)
}

fn draw_panel(svg: &mut String, (name, tally): &(&str, &Tally)) {
    let shares = shares(&tally.per_request);
    let name = name.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        svg,
        "<text x=\"{LEFT}\" y=\"24\" font-size=\"16\">Hits per tier of {name}: {} references, hit ratio {:.4}</text>",
        tally.references,
        tally.hit_ratio(),
    );
    let mut floor = vec![0.0; shares.len()];
    for (series, (_, color)) in SERIES.iter().enumerate() {
        let ceiling: Vec<f64> = floor.iter().zip(&shares).map(|(floor, share)| floor + share[series]).collect();
        let _ = writeln!(svg, "<path d=\"{}\" fill=\"{color}\"/>", area(&floor, &ceiling));
        floor = ceiling;
    }
    axes(svg, tally.per_request.len());
    legend(svg);
}

/// The share of each series in each bucket of requests.
fn shares(requests: &[[u32; Tier::COUNT + 1]]) -> Vec<[f64; Tier::COUNT + 1]> {
    let per_bucket = requests.len().div_ceil(BUCKETS).max(1);
    requests
        .chunks(per_bucket)
        .map(|bucket| {
            let sums: [u64; Tier::COUNT + 1] =
                std::array::from_fn(|series| bucket.iter().map(|request| u64::from(request[series])).sum());
            let all = sums.iter().sum::<u64>().max(1) as f64;
            sums.map(|sum| sum as f64 / all)
        })
        .collect()
}

fn area(floor: &[f64], ceiling: &[f64]) -> String {
    let mut path = String::new();
    let last = ceiling.len().saturating_sub(1).max(1) as f64;
    let point = |at: usize, share: f64| {
        let x = LEFT + (WIDTH - LEFT - RIGHT) * at as f64 / last;
        let y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share;
        (x, y)
    };
    let outline = (0..ceiling.len()).map(|at| point(at, ceiling[at]));
    let back = (0..floor.len()).rev().map(|at| point(at, floor[at]));
    for (i, (x, y)) in outline.chain(back).enumerate() {
        let _ = write!(path, "{}{x:.1} {y:.1}", if i == 0 { "M" } else { "L" });
    }
    path.push('Z');
    path
}

fn axes(svg: &mut String, requests: usize) {
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    let _ = writeln!(svg, "<path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"black\"/>");
    for (percent, text) in Ticks::new(100.0).up_to(100.0) {
        let (x, y) = (LEFT - 8.0, bottom - (bottom - TOP) * percent / 100.0 + 4.0);
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{text}%</text>");
    }
    let requests = requests.max(1) as f64;
    for (request, text) in Ticks::whole(requests).up_to(requests) {
        let (x, y) = (LEFT + (right - LEFT) * request / requests, bottom + 18.0);
        let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{text}</text>");
    }
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">requests</text>\
         <text transform=\"translate(18 {}) rotate(-90)\" text-anchor=\"middle\">share of references</text>",
        f64::midpoint(LEFT, right),
        HEIGHT - 12.0,
        f64::midpoint(TOP, bottom),
    );
}

fn legend(svg: &mut String) {
    for (i, (name, color)) in SERIES.iter().enumerate() {
        let x = WIDTH - RIGHT - 90.0 * (SERIES.len() - i) as f64;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"30\" width=\"12\" height=\"12\" fill=\"{color}\"/>\
             <text x=\"{}\" y=\"41\">{name}</text>",
            x + 18.0
        );
    }
}

//! `kvhoist replay --compare`: hit ratios over the capacity, by eviction policy, between two bounds.
//!
//! Each cell is a cache in host memory alone that replays the whole trace, one request at a time: what is in flight
//! does not change what is evicted. The coins of `rb_refuse` differ from run to run. Every byte of every hit is
//! verified, as in any replay.

use std::{
    collections::HashSet,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use kvhoist::{Cache, Config, Eviction, Tier};
use kvhoist_workbench::{
    Pace, belady,
    curves::{self, Panel},
    generator,
    trace::{self, Request},
};
use serde_json::{Value, json};

use super::{Args, replay_shown};
use crate::{
    choice::word,
    columns::columns,
    failure::Failure,
    interrupt,
    output::emit,
    plot,
    progress::{Progress, announce},
    shown::shown,
};

/// Shares of a trace's distinct blocks that are tried without `--shares`, percent.
const SHARES: [f64; 6] = [1.0, 2.0, 5.0, 10.0, 20.0, 40.0];
/// Bytes of a block without `--block-bytes`: policies do not care, and 40 % of a long trace are to fit in memory.
pub const BLOCK_BYTES: usize = 4096;

/// One capacity of one trace.
struct Row {
    share: f64,
    slots: u32,
    belady: f64,
    /// By policy: hits, and blocks stored, of all references.
    cells: Vec<Cell>,
}

struct Cell {
    hits: f64,
    stores: f64,
}

/// What one trace came to.
struct Compared {
    name: String,
    references: u64,
    distinct: usize,
    rows: Vec<Row>,
    failures: u64,
}

/// Compares, prints a table or an object, and draws the plot.
pub fn run(args: &Args, policies: &[Eviction]) -> Result<(), Failure> {
    // The lower bound is always there.
    let mut policies = policies.to_vec();
    policies.retain(|policy| *policy != Eviction::Lru);
    policies.insert(0, Eviction::Lru);
    let shares = if args.shares.is_empty() { SHARES.to_vec() } else { args.shares.clone() };
    let traces = traces(args, args.block_bytes.unwrap_or(BLOCK_BYTES))?;
    let interrupted = interrupt::catch()?;
    let plot_file = args.plot.as_deref().map(plot::create).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build();
    let runtime = runtime.map_err(|error| Failure::run(format!("cannot start a runtime: {error}")))?;
    let mut compared = Vec::new();
    for (name, requests) in traces {
        compared.push(runtime.block_on(compare(args, &policies, &shares, name, &requests, &interrupted))?);
        if interrupted.load(Ordering::Relaxed) {
            break;
        }
    }
    if let Some(file) = plot_file {
        let panels: Vec<Panel> = compared.iter().map(|trace| panel(trace, &policies)).collect();
        file.write(curves::draw(&panels).as_bytes())?;
    }
    let text = match args.json {
        true => format!("{:#}\n", json(&compared, &policies)),
        false => compared.iter().map(|trace| table(trace, &policies)).collect::<Vec<_>>().join("\n"),
    };
    emit(&text)?;
    let failures: u64 = compared.iter().map(|trace| trace.failures).sum();
    if failures > 0 {
        return Err(Failure::run(format!("{failures} blocks came back with wrong bytes")));
    }
    if interrupted.load(Ordering::Relaxed) { Err(Failure::interrupted()) } else { Ok(()) }
}

/// What is to be replayed, by name; objects of a trace are cut into blocks of `block_bytes`.
pub fn traces(args: &Args, block_bytes: usize) -> Result<Vec<(String, Vec<Request>)>, Failure> {
    if args.trace.is_empty() {
        return Ok(vec![("built-in workload".into(), generator::generate(args.seed))]);
    }
    let named = |path: &std::path::PathBuf| {
        let name = Path::new(path).file_name().map_or_else(|| shown(path), |name| shown(Path::new(name)));
        let place = if path == Path::new("-") { "standard input".to_owned() } else { shown(path) };
        let _waiting = Progress::waiting(&format!("reading {place}"), args.quiet);
        let wrong = |wrong| Failure::usage(format!("--trace {place}: {wrong}"));
        let requests = trace::read(path, block_bytes).map_err(wrong)?;
        let is_timed = requests.len() < 2 || requests.iter().any(|request| request.timestamp != 0.0);
        if args.speed.is_some() && args.compare.is_empty() && !is_timed {
            let found = "found no timestamps but 0, expected the requests' times for --speed; replay it without";
            return Err(wrong(found.into()));
        }
        Ok((name, requests))
    };
    args.trace.iter().map(named).collect()
}

async fn compare(
    args: &Args,
    policies: &[Eviction],
    shares: &[f64],
    name: String,
    requests: &[Request],
    interrupted: &Arc<AtomicBool>,
) -> Result<Compared, Failure> {
    let references: u64 = requests.iter().map(|request| request.chain.ids().count() as u64).sum();
    let distinct = requests.iter().flat_map(|request| request.chain.ids()).collect::<HashSet<_>>().len();
    let mut compared = Compared { name, references, distinct, rows: Vec::new(), failures: 0 };
    let of = shares.len() * policies.len();
    for (row, &share) in shares.iter().enumerate() {
        let slots = ((distinct as f64 * share / 100.0) as u32).max(1);
        let mut cells = Vec::new();
        for &policy in policies {
            let (name, at, policy_name) = (&compared.name, row * policies.len() + cells.len() + 1, word(&policy));
            let what =
                format!("{name}: {policy_name} with {slots} slots, {share} % of {distinct} blocks ({at} of {of})");
            announce(args.quiet, &what);
            let (cell, failures) = cell(args, policy, slots, requests.to_vec(), references, interrupted).await?;
            compared.failures += failures;
            if interrupted.load(Ordering::Relaxed) {
                return Ok(compared);
            }
            cells.push(cell);
        }
        let belady = belady::hits(requests, slots as usize) as f64 / (references as f64).max(1.0);
        compared.rows.push(Row { share, slots, belady, cells });
    }
    Ok(compared)
}

/// One policy at one capacity, and how many blocks were wrong.
async fn cell(
    args: &Args,
    policy: Eviction,
    slots: u32,
    requests: Vec<Request>,
    references: u64,
    interrupted: &Arc<AtomicBool>,
) -> Result<(Cell, u64), Failure> {
    let config = Config::default()
        .block_bytes(args.block_bytes.unwrap_or(BLOCK_BYTES))
        .host_blocks(slots)
        .eviction_policy(policy)
        .namespace("replay");
    config.validate()?;
    let cache = Cache::open(config).await?;
    // One after the other: what is in flight at once would change what is evicted.
    let one_at_a_time = Pace { in_flight: 1, speed: None };
    let replayed = replay_shown(&cache, requests, one_at_a_time, args.quiet, interrupted).await;
    let stats = cache.stats();
    cache.close().await?;
    let (_, tally) = replayed?;
    let of_all = |count: u64| count as f64 / (references as f64).max(1.0);
    assert_eq!(tally.all_hits(), tally.hits[Tier::Host as usize], "there is no other tier");
    Ok((Cell { hits: of_all(tally.all_hits()), stores: of_all(stats.stores) }, tally.verification_failures))
}

fn table(trace: &Compared, policies: &[Eviction]) -> String {
    let Compared { name, references, distinct, rows, failures } = trace;
    let said = format!("{name}: hit ratios; {references} references to {distinct} blocks");
    let names: Vec<String> = policies.iter().map(word).collect();
    let stores: Vec<String> = names.iter().map(|name| format!("stores {name}")).collect();
    let heads = ["share", "slots"]
        .into_iter()
        .chain(names.iter().map(String::as_str))
        .chain(["belady"])
        .chain(stores.iter().map(String::as_str));
    let row = |row: &Row| {
        let hits = row.cells.iter().map(|cell| cell.hits).chain([row.belady]);
        let ratios = hits.chain(row.cells.iter().map(|cell| cell.stores)).map(|ratio| format!("{ratio:.4}"));
        [format!("{}%", row.share), row.slots.to_string()].into_iter().chain(ratios).collect()
    };
    let rows: Vec<Vec<String>> = rows.iter().map(row).collect();
    format!("{said}; verification failures {failures}\n{}", columns(&heads.collect::<Vec<_>>(), &rows))
}

fn json(compared: &[Compared], policies: &[Eviction]) -> Value {
    let row = |row: &Row| {
        let cells = policies.iter().zip(&row.cells);
        let cells =
            cells.map(|(policy, cell)| (word(policy), json!({ "hit_ratio": cell.hits, "stores": cell.stores })));
        let cells: serde_json::Map<String, Value> = cells.collect();
        json!({ "share": row.share / 100.0, "slots": row.slots, "belady": row.belady, "policies": cells })
    };
    let trace = |trace: &Compared| {
        json!({
            "trace": trace.name,
            "references": trace.references,
            "distinct_blocks": trace.distinct,
            "verification_failures": trace.failures,
            "rows": trace.rows.iter().map(row).collect::<Vec<_>>(),
        })
    };
    json!({ "traces": compared.iter().map(trace).collect::<Vec<_>>() })
}

fn panel(trace: &Compared, policies: &[Eviction]) -> Panel {
    let of = |at: usize| trace.rows.iter().map(|row| row.cells[at].hits).collect();
    let mut lines: Vec<(String, Vec<f64>)> =
        policies.iter().enumerate().map(|(at, policy)| (word(policy), of(at))).collect();
    lines.push(("belady".into(), trace.rows.iter().map(|row| row.belady).collect()));
    let marks = trace.rows.iter().map(|row| format!("{} %", row.share)).collect();
    Panel { title: format!("{}: hit ratio over the share of its blocks that fit", trace.name), marks, lines }
}

//! `kvhoist replay --compare-writes`: hit ratios and bytes written to disk over the disk's capacity, by write policy.
//!
//! Each cell is a cache in host memory and on disk that replays the whole trace, one request at a time. Every byte of
//! every hit is verified.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use kvhoist::{Cache, Config, DirectIo, DiskPath, Tier, WritePolicy};
use kvhoist_workbench::{Pace, trace::Request};
use serde_json::{Value, json};

use super::{Args, compare, replay_shown};
use crate::{
    choice::word, columns::columns, failure::Failure, interrupt, output::emit, progress::announce, scratch::Scratch,
    size::show_bytes,
};

/// Host memory, percent of a trace's distinct blocks.
const HOST_SHARE: f64 = 2.0;
/// Shares of the distinct blocks that the disk holds, percent.
const SHARES: [f64; 3] = [5.0, 10.0, 20.0];

/// One capacity of one trace.
struct Row {
    share: f64,
    host_blocks: u32,
    disk_blocks: u32,
    /// By policy.
    cells: Vec<Cell>,
}

struct Cell {
    hit_ratio: f64,
    bytes_written: u64,
    declined: u64,
}

struct Compared {
    name: String,
    distinct: usize,
    rows: Vec<Row>,
    failures: u64,
}

/// Compares, and prints a table or an object.
pub fn run(args: &Args) -> Result<(), Failure> {
    // What all are compared with is always there.
    let mut policies = args.compare_writes.clone();
    policies.retain(|policy| !matches!(policy, WritePolicy::WriteThrough));
    policies.insert(0, WritePolicy::WriteThrough);
    let shares = if args.shares.is_empty() { SHARES.to_vec() } else { args.shares.clone() };
    let traces = compare::traces(args, args.block_bytes.unwrap_or(compare::BLOCK_BYTES))?;
    let interrupted = interrupt::catch()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build();
    let runtime = runtime.map_err(|error| Failure::run(format!("cannot start a runtime: {error}")))?;
    let mut compared = Vec::new();
    for (name, requests) in traces {
        compared.push(runtime.block_on(compare_one(args, &policies, &shares, name, &requests, &interrupted))?);
        if interrupted.load(Ordering::Relaxed) {
            break;
        }
    }
    emit(&match args.json {
        true => format!("{:#}\n", json(&compared, &policies)),
        false => compared.iter().map(|trace| table(trace, &policies)).collect::<Vec<_>>().join("\n"),
    })?;
    let failures: u64 = compared.iter().map(|trace| trace.failures).sum();
    if failures > 0 {
        return Err(Failure::run(format!("{failures} blocks came back with wrong bytes")));
    }
    if interrupted.load(Ordering::Relaxed) { Err(Failure::interrupted()) } else { Ok(()) }
}

async fn compare_one(
    args: &Args,
    policies: &[WritePolicy],
    shares: &[f64],
    name: String,
    requests: &[Request],
    interrupted: &Arc<AtomicBool>,
) -> Result<Compared, Failure> {
    let distinct = requests.iter().flat_map(|request| request.chain.ids()).collect::<HashSet<_>>().len();
    let mut compared = Compared { name, distinct, rows: Vec::new(), failures: 0 };
    let slots = |share: f64| ((distinct as f64 * share / 100.0) as u32).max(1);
    let of = shares.len() * policies.len();
    for (row, &share) in shares.iter().enumerate() {
        let (host_blocks, disk_blocks) = (slots(HOST_SHARE), slots(share));
        let mut cells = Vec::new();
        for &policy in policies {
            let (name, at, policy_name) = (&compared.name, row * policies.len() + cells.len() + 1, word(&policy));
            announce(args.quiet, &format!("{name}: {policy_name} with {disk_blocks} slots on disk ({at} of {of})"));
            let config = Config::default()
                .block_bytes(args.block_bytes.unwrap_or(compare::BLOCK_BYTES))
                .host_blocks(host_blocks)
                .eviction_policy(args.policy.unwrap_or_default())
                .write_policy(policy)
                .namespace("replay")
                .direct_io(args.direct_io.unwrap_or(DirectIo::Prefer))
                .storage(args.storage.unwrap_or_default());
            let (cell, failures) = cell(args, config, disk_blocks, requests.to_vec(), interrupted).await?;
            compared.failures += failures;
            if interrupted.load(Ordering::Relaxed) {
                return Ok(compared);
            }
            cells.push(cell);
        }
        compared.rows.push(Row { share, host_blocks, disk_blocks, cells });
    }
    Ok(compared)
}

/// One policy at one capacity, and how many blocks were wrong.
async fn cell(
    args: &Args,
    mut config: Config,
    disk_blocks: u32,
    requests: Vec<Request>,
    interrupted: &Arc<AtomicBool>,
) -> Result<(Cell, u64), Failure> {
    let folder = Scratch::new("kvhoist-replay-", args.path.first().map(AsRef::as_ref)).map_err(|error| {
        Failure::usage(format!("no temporary directory: {error}; name a place for it with --path or TMPDIR"))
    })?;
    if config.disk.write_policy == WritePolicy::ByValue {
        config.disk.write_budget = args.write_budget.map(|bytes| bytes as u64);
    }
    config.disk.paths = vec![DiskPath::with_blocks(folder.path(), disk_blocks)];
    config.validate()?;
    let cache = Cache::open(config).await?;
    // One after the other: what is in flight at once would change what is evicted.
    let one_at_a_time = Pace { in_flight: 1, speed: args.speed };
    let replayed = replay_shown(&cache, requests, one_at_a_time, args.quiet, interrupted).await;
    // What the end writes, or declines, counts as well.
    let synced = cache.sync().await;
    let stats = cache.stats();
    cache.close().await?;
    let (_, tally) = replayed?;
    synced?;
    let cell = Cell {
        hit_ratio: tally.hit_ratio(),
        bytes_written: stats.tier(Tier::Disk).bytes_in,
        declined: stats.writes_declined + stats.writes_over_budget,
    };
    Ok((cell, tally.verification_failures))
}

fn table(trace: &Compared, policies: &[WritePolicy]) -> String {
    let Compared { name, distinct, rows, failures } = trace;
    let row = |row: &Row, policy: &WritePolicy, cell: &Cell| {
        let first = &row.cells[0];
        vec![
            word(policy),
            format!("{}%", row.share),
            row.host_blocks.to_string(),
            row.disk_blocks.to_string(),
            format!("{:.4}", cell.hit_ratio),
            format!("{:.3}", cell.hit_ratio / first.hit_ratio.max(1e-9)),
            show_bytes(cell.bytes_written),
            format!("{:.3}", cell.bytes_written as f64 / (first.bytes_written as f64).max(1.0)),
            cell.declined.to_string(),
        ]
    };
    let rows =
        rows.iter().flat_map(|one| policies.iter().zip(&one.cells).map(move |(policy, cell)| row(one, policy, cell)));
    let heads = ["write policy", "share", "host", "disk", "hits", "of first", "written", "of first", "declined"];
    let rows: Vec<Vec<String>> = rows.collect();
    format!("{name}: {distinct} blocks; verification failures {failures}\n{}", columns(&heads, &rows))
}

fn json(compared: &[Compared], policies: &[WritePolicy]) -> Value {
    let row = |row: &Row| {
        let cells = policies.iter().zip(&row.cells).map(|(policy, cell)| {
            let Cell { hit_ratio, bytes_written, declined } = cell;
            let cell = json!({ "hit_ratio": hit_ratio, "bytes_written": bytes_written, "writes_declined": declined });
            (word(policy), cell)
        });
        let cells: serde_json::Map<String, Value> = cells.collect();
        let Row { share, host_blocks, disk_blocks, .. } = row;
        json!({ "share": share / 100.0, "host_blocks": host_blocks, "disk_blocks": disk_blocks, "policies": cells })
    };
    let trace = |trace: &Compared| {
        json!({
            "trace": trace.name,
            "distinct_blocks": trace.distinct,
            "verification_failures": trace.failures,
            "rows": trace.rows.iter().map(row).collect::<Vec<_>>(),
        })
    };
    json!({ "traces": compared.iter().map(trace).collect::<Vec<_>>() })
}

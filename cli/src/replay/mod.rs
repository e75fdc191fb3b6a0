//! `kvhoist replay`: the main job, from flags to report.

mod args;
mod compare;
mod compare_writes;
mod place;

pub use args::{Args, Device};
use place::Place;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use kvhoist::{Cache, Config, Stats};
use kvhoist_workbench::{self as workbench, Pace, Tally, trace::Request};

use crate::{
    failure::Failure,
    interrupt,
    output::{OutputFile, emit},
    plot,
    progress::{Progress, announce},
    report,
    size::show_bytes,
};

/// What the replay of a trace came to.
pub struct Summary {
    /// The name of the trace.
    pub trace: String,
    /// The settings of the cache.
    pub config: Config,
    /// Requests replayed.
    pub requests: usize,
    /// Requests of the trace; more than were replayed where it was interrupted.
    pub requests_in_trace: usize,
    /// What became of their blocks.
    pub tally: Tally,
    /// From the first request to the last flush.
    pub seconds: f64,
    /// The cache's own figures at the end.
    pub stats: Stats,
}

/// Runs a replay and prints its report.
pub fn run(args: &Args) -> Result<(), Failure> {
    args.check()?;
    if !args.compare.is_empty() {
        return compare::run(args, &args.compare);
    }
    if !args.compare_writes.is_empty() {
        return compare_writes::run(args);
    }
    let traces = compare::traces(args, place::check(args)?)?;
    let interrupted = interrupt::catch()?;
    let plot_file = args.plot.as_deref().map(plot::create).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build();
    let runtime = runtime.map_err(|error| Failure::run(format!("cannot start a runtime: {error}")))?;
    let (mut summaries, of) = (Vec::new(), traces.len());
    for (at, (name, requests)) in traces.into_iter().enumerate() {
        let (config, place) = place::settings(args)?;
        if of > 1 {
            announce(args.quiet, &format!("{name} (trace {} of {of})", at + 1));
        }
        // The store goes before the report: nothing that the report meets keeps it on disk.
        summaries.push(runtime.block_on(replay(args, config, (name, requests), &interrupted, &place))?);
        if interrupted.load(Ordering::Relaxed) {
            break;
        }
    }
    finish(args, &summaries, plot_file)?;
    if interrupted.load(Ordering::Relaxed) { Err(Failure::interrupted()) } else { Ok(()) }
}

async fn replay(
    args: &Args,
    config: Config,
    (trace, requests): (String, Vec<Request>),
    interrupted: &Arc<AtomicBool>,
    place: &Place,
) -> Result<Summary, Failure> {
    let cache = Cache::open(config.clone()).await.map_err(|error| args.failure(error))?;
    place.keep();
    let requests_in_trace = requests.len();
    let started = Instant::now();
    let pace = Pace { in_flight: args.in_flight, speed: args.speed };
    let tally = replay_shown(&cache, requests, pace, args.quiet, interrupted).await;
    let waiting = Progress::waiting("writing what is in memory only", args.quiet || config.disk.paths.is_empty());
    // What the end writes counts as well.
    let synced = cache.sync().await;
    let stats = cache.stats();
    let closed = cache.close().await;
    drop(waiting);
    let seconds = started.elapsed().as_secs_f64();
    let (requests, tally) = tally?;
    synced.and(closed)?;
    Ok(Summary { trace, config, requests, requests_in_trace, tally, seconds, stats })
}

/// Replays requests with progress on standard error. Returns how many it replayed.
async fn replay_shown(
    cache: &Cache,
    requests: Vec<Request>,
    pace: Pace,
    quiet: bool,
    interrupted: &Arc<AtomicBool>,
) -> Result<(usize, Tally), Failure> {
    let mut progress = Progress::new(requests.len(), "requests", quiet);
    let so_far = |tally: &Tally| {
        let bytes = tally.routes.values().map(|route| route.bytes).sum();
        format!("hit ratio {:.4}, {} fetched", tally.hit_ratio(), show_bytes(bytes))
    };
    let tell = |done, tally: &Tally| progress.update(done, || so_far(tally));
    let replayed = workbench::replay(cache, requests, pace, interrupted, tell).await?;
    progress.finish();
    Ok(replayed)
}

fn finish(args: &Args, summaries: &[Summary], plot_file: Option<OutputFile>) -> Result<(), Failure> {
    if let Some(file) = plot_file {
        let traces: Vec<_> = summaries.iter().map(|summary| (summary.trace.as_str(), &summary.tally)).collect();
        file.write(workbench::plot::draw(&traces).as_bytes())?;
    }
    emit(&report::text(summaries, args.json))?;
    match summaries.iter().map(|summary| summary.tally.verification_failures).sum() {
        0 => Ok(()),
        failures => Err(Failure::run(format!("{failures} blocks came back with wrong bytes"))),
    }
}

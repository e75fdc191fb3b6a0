//! `kvhoist replay`: the main job, from flags to report.

mod args;
mod engine;
mod tally;

pub use args::{Args, Device, Direct, Engine};
pub use tally::Tally;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use kvhoist::{Cache, Config, DiskPath, Stats};
use tempfile::TempDir;

use crate::{
    failure::Failure,
    generator, interrupt,
    output::{OutputFile, emit},
    plot, report, trace,
};

/// What a replay came to.
pub struct Summary {
    /// The settings of the cache.
    pub config: Config,
    /// Requests replayed.
    pub requests: usize,
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
    let requests = match &args.trace {
        Some(path) => trace::read(path)?,
        None => generator::generate(args.seed),
    };
    let (config, directory) = settings(args)?;
    let interrupted = interrupt::catch()?;
    let plot_file = args.plot.as_deref().map(plot::create).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build();
    let runtime = runtime.map_err(|error| Failure::run(format!("cannot start a runtime: {error}")))?;
    let summary = runtime.block_on(replay(args, config, requests, &interrupted))?;
    // The store goes before the report: nothing that the report meets keeps it on disk.
    drop(directory);
    finish(args, &summary, plot_file)
}

async fn replay(
    args: &Args,
    config: Config,
    requests: Vec<trace::Request>,
    interrupted: &Arc<AtomicBool>,
) -> Result<Summary, Failure> {
    let cache = Cache::open(config.clone()).await?;
    let count = requests.len();
    let started = Instant::now();
    let tally = engine::replay(&cache, requests, args, interrupted).await;
    let stats = cache.stats();
    let closed = cache.close().await;
    let seconds = started.elapsed().as_secs_f64();
    if interrupted.load(Ordering::Relaxed) {
        return Err(Failure::run("interrupted"));
    }
    let tally = tally?;
    closed?;
    Ok(Summary { config, requests: count, tally, seconds, stats })
}

fn finish(args: &Args, summary: &Summary, plot_file: Option<OutputFile>) -> Result<(), Failure> {
    if let Some(file) = plot_file {
        file.write(plot::draw(summary).as_bytes())?;
    }
    emit(&report::text(summary, args.json))?;
    match summary.tally.verification_failures {
        0 => Ok(()),
        failures => Err(Failure::run(format!("{failures} blocks came back with wrong bytes"))),
    }
}

/// The cache's settings, and the temporary directory if the store lives in one.
fn settings(args: &Args) -> Result<(Config, Option<TempDir>), Failure> {
    let mut directory = None;
    let mut paths = args.path.clone();
    if paths.is_empty() {
        let made = tempfile::Builder::new().prefix("kvhoist-replay-").tempdir().map_err(|error| {
            Failure::usage(format!("no temporary directory: {error}; name one with --path or TMPDIR"))
        })?;
        paths.push(made.path().to_owned());
        directory = Some(made);
    }
    let members = u32::try_from(paths.len()).unwrap_or(u32::MAX);
    let disks = paths.into_iter().zip(0..).map(|(path, member)| {
        // The first ones take what does not divide.
        let blocks = args.disk_blocks / members + u32::from(member < args.disk_blocks % members);
        DiskPath { path, blocks }
    });
    let config = Config {
        block_bytes: args.block_bytes,
        host_blocks: args.host_blocks,
        device_blocks: args.device_blocks,
        device: args.device.into(),
        disks: if args.disk_blocks == 0 { Vec::new() } else { disks.collect() },
        namespace: "replay".into(),
        write_policy: args.write_policy.into(),
        eviction_policy: args.policy.into(),
        storage: args.storage.into(),
        direct_io: args.direct_io.into(),
        ..Config::default()
    };
    config.validate()?;
    Ok((config, directory))
}

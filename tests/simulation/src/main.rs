//! `kvhoist-sim`: many seeds, or one.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use clap::Parser;
use kvhoist_simulation::{Failure, Report, run, run_bytes};

/// Runs whole caches in simulation, each from one seed, until all are done; exits with 1 if any broke a promise.
#[derive(Parser)]
#[command(version, about)]
struct Args {
    /// Seeds to run, as FROM..TO; TO is not run.
    #[arg(long, default_value = "0..1000", value_parser = seeds)]
    seeds: Range<u64>,
    /// One seed to run instead.
    #[arg(long)]
    seed: Option<u64>,
    /// Input of the fuzz target `mover_ops` to run instead.
    #[arg(long, conflicts_with = "seed")]
    input: Option<PathBuf>,
    /// Prints every call of every run.
    #[arg(long)]
    verbose: bool,
    /// Threads.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Failures after which no more seeds are run.
    #[arg(long, default_value_t = 10)]
    failures: usize,
    /// Seconds after which a seed that has not ended has failed, and with it this program.
    #[arg(long, default_value_t = 600)]
    patience_s: u64,
}

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let range = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    range.filter(|range: &Range<u64>| !range.is_empty()).ok_or_else(|| "expected FROM..TO, such as 0..1000".into())
}

/// What the threads share.
struct Work {
    next: AtomicU64,
    end: u64,
    done: Mutex<Done>,
    /// The seed that each thread runs, and since when.
    running: Vec<Mutex<Option<(u64, Instant)>>>,
}

#[derive(Default)]
struct Done {
    report: Report,
    failures: Vec<Failure>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(input) = &args.input {
        return run_input(input, args.verbose);
    }
    let range = args.seed.map_or(args.seeds.clone(), |seed| seed..seed + 1);
    let running = (0..args.jobs.max(1)).map(|_| Mutex::default()).collect();
    let work = Work { next: AtomicU64::new(range.start), end: range.end, done: Mutex::default(), running };
    let started = Instant::now();
    std::thread::scope(|scope| {
        let (work, args) = (&work, &args);
        let threads: Vec<_> = work.running.iter().map(|own| scope.spawn(move || serve(work, own, args))).collect();
        let mut told = Instant::now();
        while !threads.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(50));
            end_if_stuck(work, Duration::from_secs(args.patience_s));
            if told.elapsed() > Duration::from_secs(10) {
                told = Instant::now();
                progress(work, started);
            }
        }
    });
    let done = work.done.into_inner().expect("no thread panics under it");
    let seconds = started.elapsed().as_secs_f64();
    println!("{}", done.report);
    println!("{:.1} s, {:.1} seeds/s", seconds, done.report.runs as f64 / seconds);
    if args.seed.is_some() {
        println!("digest {:016x}", done.report.digest);
    }
    if done.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run_input(input: &Path, verbose: bool) -> ExitCode {
    let result = std::fs::read(input).map_err(|error| error.to_string()).and_then(|bytes| run_bytes(&bytes, verbose));
    match result {
        Ok(report) => {
            println!("{report}\ndigest {:016x}", report.digest);
            ExitCode::SUCCESS
        }
        Err(what) => {
            eprintln!("{}: {what}", input.display());
            ExitCode::FAILURE
        }
    }
}

/// Ends the program where a seed does not end: a thread that waits for a lock sees no virtual time pass.
fn end_if_stuck(work: &Work, patience: Duration) {
    for running in &work.running {
        let running = *running.lock().expect("no thread panics under it");
        let Some((seed, _)) = running.filter(|(_, since)| since.elapsed() > patience) else { continue };
        let what = format!("it has not ended after {patience:?} of real time, and the program ends with it");
        eprintln!("{}", Failure { seed, what });
        std::process::exit(1);
    }
}

fn serve(work: &Work, running: &Mutex<Option<(u64, Instant)>>, args: &Args) {
    let set = |seed| *running.lock().expect("no thread panics under it") = seed;
    loop {
        let seed = work.next.fetch_add(1, Ordering::Relaxed);
        if seed >= work.end {
            return set(None);
        }
        set(Some((seed, Instant::now())));
        let result = run(seed, args.verbose);
        let mut done = work.done.lock().expect("no thread panics under it");
        match result {
            Ok(report) => done.report.add(&report),
            Err(failure) => {
                eprintln!("{failure}");
                done.failures.push(failure);
                if done.failures.len() >= args.failures {
                    work.next.store(work.end, Ordering::Relaxed);
                }
            }
        }
    }
}

fn progress(work: &Work, started: Instant) {
    let done = work.done.lock().expect("no thread panics under it");
    let (runs, failures) = (done.report.runs, done.failures.len());
    let rate = runs as f64 / started.elapsed().as_secs_f64();
    eprintln!("{runs} seeds done, {failures} failed, {rate:.1} seeds/s");
}

//! One run: a seed, its lives, and what came of them.

use std::{
    cell::RefCell,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Once,
};

use crate::{
    context::Context,
    life,
    plan::Plan,
    report::Report,
    service::{self, SERVICE_SEEDS},
    sim,
};

/// A run in which something was wrong.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The run.
    pub seed: u64,
    /// What was wrong first.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { seed, what } = self;
        write!(f, "seed {seed}: {what}\n  replay: cargo run -p kvhoist-simulation -- --seed {seed} --verbose")
    }
}

thread_local! {
    /// Panics on this thread. Tasks swallow theirs, and a run with one has failed.
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Notes panics of runs. Prints them too: a panic while another unwinds ends the process.
fn note_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let earlier = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if RUNNING.with(|running| *running.borrow()) {
                PANICS.with(|panics| panics.borrow_mut().push(info.to_string()));
            }
            earlier(info);
        }));
    });
}

thread_local! {
    static RUNNING: RefCell<bool> = const { RefCell::new(false) };
}

/// Runs `seed`: the numbers, or what was wrong.
///
/// # Errors
/// The first promise that was broken, a panic, or books that do not balance.
pub fn run(seed: u64, verbose: bool) -> Result<Report, Failure> {
    let result = match seed >= SERVICE_SEEDS {
        true => watched(|| service::run(seed, verbose)),
        false => watched(|| run_lives(Plan::new(seed), verbose)),
    };
    result.map_err(|what| Failure { seed, what })
}

/// Runs what the bytes of a fuzzer choose.
///
/// # Errors
/// As [`run`].
pub fn run_bytes(bytes: &[u8], verbose: bool) -> Result<Report, String> {
    watched(|| run_lives(Plan::from_bytes(bytes), verbose))
}

/// Makes a run; a panic of any task is what was wrong.
fn watched(run: impl FnOnce() -> Result<Report, String>) -> Result<Report, String> {
    note_panics();
    crate::log::watch();
    RUNNING.with(|running| *running.borrow_mut() = true);
    PANICS.with(|panics| panics.borrow_mut().clear());
    let result = catch_unwind(AssertUnwindSafe(run));
    RUNNING.with(|running| *running.borrow_mut() = false);
    let panics = PANICS.with(RefCell::take);
    match (panics.first(), result) {
        (Some(panic), _) => Err(panic.clone()),
        (None, Ok(result)) => result,
        (None, Err(_)) => Err("a panic without a message".into()),
    }
}

fn run_lives(plan: Plan, verbose: bool) -> Result<Report, String> {
    let context = Context::new(plan, verbose);
    let plan = &context.plan;
    context.say(|| format!("{:?} {:#?}\n{:?} {:?}", plan.level, plan.config, plan.rates, plan.habits));
    let mut files = sim::blank_files(&plan.config);
    for life in 0..plan.lives {
        files = life::live(&context, files, life).files;
        let panicked = PANICS.with(|panics| !panics.borrow().is_empty());
        if context.failed() || panicked {
            break;
        }
    }
    match context.take_failure() {
        Some(what) => Err(what),
        None => {
            let mut report = context.report.borrow().clone();
            if let Some(remote) = &plan.remote {
                let counts = remote.counts();
                (report.remote_requests, report.remote_lies) = (counts.requests, counts.lies);
            }
            report.digest = context.digest();
            Ok(report)
        }
    }
}

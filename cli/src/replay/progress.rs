//! What a person sees while a replay runs.

use std::{
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

/// Progress on stderr: a bar on a terminal, a line now and then elsewhere.
pub enum Progress {
    Bar(ProgressBar),
    Lines { total: usize, started: Instant, last: Instant },
    Quiet,
}

const LINE_EVERY: Duration = Duration::from_secs(2);

impl Progress {
    pub fn new(total: usize, quiet: bool) -> Self {
        if quiet {
            return Progress::Quiet;
        }
        if std::io::stderr().is_terminal() {
            let style = ProgressStyle::with_template("{bar:40} {pos}/{len} requests, {per_sec}, {eta} left  {msg}");
            return Progress::Bar(ProgressBar::new(total as u64).with_style(style.expect("a constant template")));
        }
        let now = Instant::now();
        Progress::Lines { total, started: now, last: now }
    }

    /// `done` requests have ended; `say` tells what they came to.
    pub fn update(&mut self, done: usize, say: impl FnOnce() -> String) {
        match self {
            Progress::Bar(bar) => {
                bar.set_position(done as u64);
                if done.is_multiple_of(64) {
                    bar.set_message(say());
                }
            }
            Progress::Lines { total, started, last } => {
                if last.elapsed() >= LINE_EVERY || done == *total {
                    *last = Instant::now();
                    let per_second = done as f64 / started.elapsed().as_secs_f64().max(1e-9);
                    // Nobody listening is no reason to stop.
                    drop(writeln!(std::io::stderr(), "{done}/{total} requests, {per_second:.0}/s, {}", say()));
                }
            }
            Progress::Quiet => {}
        }
    }

    pub fn finish(&self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

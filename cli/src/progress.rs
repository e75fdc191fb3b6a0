//! What a person sees while a command runs.

use std::{
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

/// Progress on stderr: a bar on a terminal, a line now and then elsewhere.
pub enum Progress {
    Bar(ProgressBar),
    Lines { total: usize, unit: &'static str, started: Instant, last: Instant },
    Quiet,
}

const LINE_EVERY: Duration = Duration::from_secs(2);

impl Progress {
    /// For `total` things of this name, in the plural.
    pub fn new(total: usize, unit: &'static str, quiet: bool) -> Self {
        if quiet {
            return Progress::Quiet;
        }
        if std::io::stderr().is_terminal() {
            let template = format!("{{bar:40}} {{pos}}/{{len}} {unit}, {{per_sec}}, {{eta}} left  {{msg}}");
            let style = ProgressStyle::with_template(&template).expect("a template of constant parts");
            return Progress::Bar(ProgressBar::new(total as u64).with_style(style));
        }
        let now = Instant::now();
        Progress::Lines { total, unit, started: now, last: now }
    }

    /// `done` of them have ended; `say` tells what they came to.
    pub fn update(&mut self, done: usize, say: impl FnOnce() -> String) {
        match self {
            Progress::Bar(bar) => {
                bar.set_position(done as u64);
                if done.is_multiple_of(64) {
                    bar.set_message(say());
                }
            }
            Progress::Lines { total, unit, started, last } => {
                if last.elapsed() >= LINE_EVERY || done == *total {
                    *last = Instant::now();
                    let per_second = done as f64 / started.elapsed().as_secs_f64().max(1e-9);
                    // Nobody listening is no reason to stop.
                    drop(writeln!(std::io::stderr(), "{done}/{total} {unit}, {per_second:.0}/s, {}", say()));
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

//! Progress of a running command.

use std::{
    io::{self, IsTerminal, Write},
    sync::Mutex,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

/// Progress on stderr: a bar on a terminal, a line every 2 s elsewhere. Dropping it clears the bar.
pub enum Progress {
    Bar(ProgressBar),
    Lines { total: usize, unit: &'static str, started: Instant, last: Instant },
    Quiet,
}

/// Says on standard error what comes now, unless it is to be quiet.
pub fn announce(quiet: bool, what: &str) {
    if !quiet {
        // A closed output is no reason to stop.
        drop(writeln!(io::stderr(), "{what}"));
    }
}

const LINE_EVERY: Duration = Duration::from_secs(2);

/// The bar that is on the terminal now, if any.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

impl Progress {
    /// For `total` things of this name, in the plural.
    pub fn new(total: usize, unit: &'static str, quiet: bool) -> Self {
        if quiet {
            return Progress::Quiet;
        }
        if io::stderr().is_terminal() {
            // The message takes what is left of a line, and no more.
            let template = format!("{{bar:12}} {{pos}}/{{len}} {unit}, {{eta}} left  {{wide_msg}}");
            let style = ProgressStyle::with_template(&template).expect("a template of constant parts");
            let bar = ProgressBar::new(total as u64).with_style(style);
            *SHOWN.lock().expect("nothing panics under it") = Some(bar.clone());
            return Progress::Bar(bar);
        }
        let now = Instant::now();
        Progress::Lines { total, unit, started: now, last: now }
    }

    /// For a wait whose end nobody knows.
    pub fn waiting(what: &str, quiet: bool) -> Self {
        if quiet || !io::stderr().is_terminal() {
            announce(quiet, what);
            return Progress::Quiet;
        }
        let style = ProgressStyle::with_template("{wide_msg}").expect("a template of constant parts");
        let bar = ProgressBar::new_spinner().with_style(style).with_message(what.to_owned());
        *SHOWN.lock().expect("nothing panics under it") = Some(bar.clone());
        bar.tick();
        Progress::Bar(bar)
    }

    /// `done` of them have ended; `say` describes the results so far.
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
                    // A closed output is no reason to stop.
                    drop(writeln!(io::stderr(), "{done}/{total} {unit}, {per_second:.0}/s, {}", say()));
                }
            }
            Progress::Quiet => {}
        }
    }

    pub fn finish(&self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
            *SHOWN.lock().expect("nothing panics under it") = None;
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Standard error for messages: hides the bar while a message is printed.
pub struct BesideProgress;

impl Write for BesideProgress {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let shown = SHOWN.lock().expect("nothing panics under it").clone();
        match shown {
            Some(bar) => bar.suspend(|| io::stderr().write(bytes)),
            None => io::stderr().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

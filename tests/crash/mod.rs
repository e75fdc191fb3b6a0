//! What is run to be killed, and what must be found afterwards. For tests of crashes of any kind.
//!
//! A child process stores, removes, flushes, closes and opens as its [`Plan`] says, and reports on its standard output
//! what it is about to do and what was acknowledged. The killing process keeps the [`History`] from those lines, and
//! then holds the store to it.
#![allow(dead_code, reason = "each test binary uses a part of it")]

mod history;
mod load;
mod plan;

use std::io::Write;

pub use history::{Checked, Death, History};
pub use load::run;
pub use plan::Plan;

/// What the lines of a child begin with, among all else that is printed where it runs.
pub const PREFIX: &str = "crash-child: ";

/// What they end with: one that was cut short by the crash does not count.
pub const SUFFIX: &str = ";";

/// A line for the history, in a single write.
pub fn print(line: &str) {
    let (mut out, line) = (std::io::stdout(), format!("{PREFIX}{line}{SUFFIX}\n"));
    out.write_all(line.as_bytes()).and_then(|()| out.flush()).expect("a reader");
}

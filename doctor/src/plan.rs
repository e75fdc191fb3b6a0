//! The plan and the findings.

use std::path::{Path, PathBuf};

/// The caches to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Processes on this machine, each with its own stores and memory.
    pub ranks: u32,
    /// The paths of the disk tier.
    pub paths: Vec<PlannedPath>,
    /// Host memory bytes per rank. 0: unknown.
    pub host_bytes: u64,
    /// Bytes that a rank may write to disk a day. 0: unknown, or no limit.
    pub write_bytes_a_day: u64,
    /// A path may be a file, as the library's may. Otherwise each is a folder.
    pub takes_files: bool,
}

/// A path of the disk tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedPath {
    /// Where the stores will be.
    pub path: PathBuf,
    /// The path, or the folder that it will be made in.
    pub at: PathBuf,
    /// Bytes of a rank there. 0: unknown.
    pub bytes: u64,
}

impl Plan {
    /// The share of a rank's bytes that goes to paths on a drive; of all paths alike, where their bytes are unknown.
    pub(crate) fn share(&self, is_on_it: impl Fn(&Path) -> bool) -> f64 {
        let known = self.paths.iter().any(|path| path.bytes > 0);
        let weight = |path: &PlannedPath| if known { path.bytes as f64 } else { 1.0 };
        let all: f64 = self.paths.iter().map(weight).sum();
        let here: f64 = self.paths.iter().filter(|path| is_on_it(&path.at)).map(weight).sum();
        if all > 0.0 { here / all } else { 0.0 }
    }
}

/// A finding about the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// Topic: `memory`, `space`, ...
    pub what: &'static str,
    /// What was found.
    pub found: String,
    /// The fix, or an improvement: a command where possible.
    pub fix: Option<String>,
    /// The plan will not work, or much worse than it could.
    pub is_trouble: bool,
}

impl Finding {
    pub(crate) fn note(what: &'static str, found: impl Into<String>) -> Self {
        Finding { what, found: found.into(), fix: None, is_trouble: false }
    }

    pub(crate) fn trouble(what: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Finding { what, found: found.into(), fix: Some(fix.into()), is_trouble: true }
    }

    pub(crate) fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }
}

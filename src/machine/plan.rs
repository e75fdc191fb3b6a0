//! The plan, the findings, and the kernel's files.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The caches to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Processes on this machine, each with its own stores and memory.
    pub ranks: u32,
    /// The paths of the disk tier.
    pub paths: Vec<PathBuf>,
    /// Disk bytes per rank, over all its paths. 0: unknown.
    pub disk_bytes: u64,
    /// Host memory bytes per rank. 0: unknown.
    pub host_bytes: u64,
    /// Bytes that a rank may write to disk a day. 0: unknown, or no limit.
    pub write_bytes_a_day: u64,
    /// A path may be a file, as the library's may. Otherwise each is a folder.
    pub takes_files: bool,
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
    pub(super) fn note(what: &'static str, found: impl Into<String>) -> Self {
        Finding { what, found: found.into(), fix: None, is_trouble: false }
    }

    pub(super) fn trouble(what: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Finding { what, found: found.into(), fix: Some(fix.into()), is_trouble: true }
    }

    pub(super) fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }
}

/// The kernel's files, below a root.
pub(super) struct Kernel<'a> {
    pub(super) root: &'a Path,
}

impl Kernel<'_> {
    /// A file's text, trimmed; `None` if it does not exist.
    pub(super) fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok().map(|text| text.trim().to_owned())
    }

    /// The number that is a file's only content.
    pub(super) fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.parse().ok()
    }

    /// The rest of the first line that starts with `name`.
    pub(super) fn field(&self, path: &str, name: &str) -> Option<String> {
        let text = self.read(path)?;
        text.lines().find_map(|line| line.strip_prefix(name)).map(|rest| rest.trim().to_owned())
    }
}

/// Formats bytes for people.
pub(super) fn shown(bytes: u64) -> String {
    match [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")].iter().find(|(shift, _)| bytes >> shift > 0) {
        Some((shift, unit)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} bytes"),
    }
}

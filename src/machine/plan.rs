//! What is planned, what was found, and where the kernel says it.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// What is going to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Processes on this machine that open it, each with stores and memory of its own.
    pub ranks: u32,
    /// The paths of the disk tier.
    pub paths: Vec<PathBuf>,
    /// Bytes on disk of each rank, of all its paths together. 0: not known.
    pub disk_bytes: u64,
    /// Bytes of host memory of each rank. 0: not known.
    pub host_bytes: u64,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// What it is about: `memory`, `space`, ...
    pub what: &'static str,
    /// What was found.
    pub found: String,
    /// What mends it, or gets more out of it: a command where there is one.
    pub fix: Option<String>,
    /// What is planned will not work so, or much worse than it could.
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

/// The kernel's files.
pub(super) struct Kernel<'a> {
    pub(super) root: &'a Path,
}

impl Kernel<'_> {
    /// A file, trimmed; nothing where there is none.
    pub(super) fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok().map(|text| text.trim().to_owned())
    }

    /// A number that is a file's only content.
    pub(super) fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.parse().ok()
    }

    /// The rest of a file's line that begins so.
    pub(super) fn field(&self, path: &str, name: &str) -> Option<String> {
        let text = self.read(path)?;
        text.lines().find_map(|line| line.strip_prefix(name)).map(|rest| rest.trim().to_owned())
    }
}

/// Bytes for people.
pub(super) fn shown(bytes: u64) -> String {
    match [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")].iter().find(|(shift, _)| bytes >> shift > 0) {
        Some((shift, unit)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} bytes"),
    }
}

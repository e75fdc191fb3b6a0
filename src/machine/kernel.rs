//! The kernel's files.

use std::{fs, path::Path};

/// The kernel's files, below a root.
#[derive(Debug)]
pub struct Kernel<'a> {
    /// `/`, but for tests.
    pub root: &'a Path,
}

impl Kernel<'_> {
    /// A file's text, trimmed; `None` if it does not exist.
    pub fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok().map(|text| text.trim().to_owned())
    }

    /// The number that is a file's only content.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.parse().ok()
    }

    /// The rest of the first line that starts with `name`.
    pub fn field(&self, path: &str, name: &str) -> Option<String> {
        let text = self.read(path)?;
        text.lines().find_map(|line| line.strip_prefix(name)).map(|rest| rest.trim().to_owned())
    }
}

/// Formats bytes for people.
pub fn shown(bytes: u64) -> String {
    let units = [(50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.iter().find(|(shift, _)| bytes >> shift > 0) {
        Some((shift, unit)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} bytes"),
    }
}

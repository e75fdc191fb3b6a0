//! The file of a plot.

use std::path::Path;

use crate::{failure::Failure, output::OutputFile, shown::shown};

/// The file for a plot, found out to be writable before the run that it is to show.
pub fn create(path: &Path) -> Result<OutputFile, Failure> {
    if path.extension().is_none_or(|suffix| !suffix.eq_ignore_ascii_case("svg")) {
        return Err(Failure::usage(format!("--plot {}: expected a file name that ends in .svg", shown(path))));
    }
    OutputFile::create("--plot", path)
}

//! The command `kvhoist` in this process, for `python -m kvhoist` and for the script `kvhoist` of the wheel.

use std::ffi::OsString;

use kvhoist_cli::command::{self, EngineFinding};
use pyo3::prelude::*;

/// Runs a command line, which begins with the program's name. Returns the exit status. `findings` are for the report of
/// the doctor.
#[pyfunction]
pub fn run_command(py: Python<'_>, arguments: Vec<OsString>, findings: Vec<EngineFinding>) -> u8 {
    py.detach(|| command::parse(arguments).map_or_else(|status| status, |parsed| parsed.run_for_engine(findings)))
}

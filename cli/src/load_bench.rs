//! `kvhoist load-bench`: the Python package's comparison of loaders, which are packages of Python.

use std::{
    ffi::OsString,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, Stdio},
};

use crate::{failure::Failure, shown::shown};

/// Flags of `kvhoist load-bench`: the Python package knows them.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoints in the format safetensors (files, folders, indexes), and flags; `--help` prints those.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "FILES")]
    arguments: Vec<OsString>,
}

/// Becomes the Python package's command.
pub fn run(args: &Args) -> Result<(), Failure> {
    let python = python();
    let has_package = "import importlib.util, sys; sys.exit(importlib.util.find_spec('kvhoist') is None)";
    let found = Command::new(&python).args(["-c", has_package]).stdin(Stdio::null()).status();
    let expected = "expected one with the package kvhoist, torch and the loaders to compare; install them there, or \
                    name another by KVHOIST_PYTHON";
    match found {
        Ok(status) if status.success() => {}
        Ok(_) => {
            return Err(Failure::usage(format!("found {} without the package kvhoist, {expected}", shown(&python))));
        }
        Err(error) => return Err(Failure::usage(format!("found no {} ({error}), {expected}", shown(&python)))),
    }
    let error = Command::new(&python).args(["-m", "kvhoist", "load-bench"]).args(&args.arguments).exec();
    Err(Failure::run(format!("{} cannot be started: {error}", shown(&python))))
}

/// The interpreter: `KVHOIST_PYTHON`, or that of the active virtual environment, or `python3`.
fn python() -> PathBuf {
    let given = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let environment = || given("VIRTUAL_ENV").map(|folder| folder.join("bin/python"));
    given("KVHOIST_PYTHON").or_else(environment).unwrap_or_else(|| "python3".into())
}

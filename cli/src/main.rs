//! The `kvhoist` command.

use std::process::ExitCode;

use kvhoist_cli::{BesideProgress, command, failure::Failure};
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

fn main() -> ExitCode {
    let parsed = match command::parse(std::env::args_os()) {
        Ok(parsed) => parsed,
        Err(status) => return status.into(),
    };
    let filter = match log_filter(std::env::var("KVHOIST_LOG").ok().as_deref(), parsed.log_default()) {
        Ok(filter) => filter,
        Err(failure) => return command::end(Err(failure)).into(),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| BesideProgress)
        // It would panic where standard error cannot be written.
        .log_internal_errors(false)
        .without_time()
        .init();
    parsed.run().into()
}

/// What `KVHOIST_LOG` selects, if it is set.
fn log_filter(given: Option<&str>, default: &str) -> Result<EnvFilter, Failure> {
    let given = given.unwrap_or(default);
    // A word alone that is no level would select the messages of a module of that name, and so none.
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    let known = given.split(',').all(|part| part.contains(['=', '[']) || is_level(part.trim()));
    EnvFilter::try_new(given).ok().filter(|_| known).ok_or_else(|| {
        Failure::usage(format!(
            "KVHOIST_LOG: found {given:?}, expected off, error, warn, info, debug or trace, or a level for each \
             module, such as warn,kvhoist_service=debug"
        ))
    })
}

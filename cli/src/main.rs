//! The `kvhoist` command.

mod bench;
mod columns;
mod curves;
mod doctor;
mod generator;
mod http;
mod inspect;
mod interrupt;
mod json;
mod manual;
mod output;
mod palette;
mod payload;
mod plot;
mod progress;
mod replay;
mod report;
mod serve;
mod settings;
mod socket;
mod space;
mod status;
mod store;
mod ticks;
mod top;
mod verify;
mod wipe;
mod workload;

use std::{io::Write, process::ExitCode};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, error::ErrorKind};
use kvhoist_cli::{failure, shown, size, trace};
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

use crate::failure::{EXIT_STATUS, Failure};

/// The version, and the commit that it was built from if it is known.
const VERSION: &str = env!("KVHOIST_VERSION");

/// Tiered cache for fixed-size blocks: GPU HBM, host DRAM, NVMe.
#[derive(Parser)]
#[command(name = "kvhoist", version = VERSION, after_help = EXIT_STATUS, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replay a trace of prefix chains through the cache and verify every byte that comes back.
    #[command(after_help = EXIT_STATUS)]
    Replay(Box<replay::Args>),
    /// Report the limits of this machine, the route that blocks take, and what prevents a faster one.
    #[command(after_help = EXIT_STATUS)]
    Doctor(doctor::Args),
    /// Measure the routes between disk, host memory and GPU against the bare hardware.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Bench(bench::Args),
    /// Print the format, the settings and the fill of a store. Changes nothing.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Inspect(inspect::Args),
    /// Run one cache for all processes of this node. SIGTERM drains the service, a second one ends it at once.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Serve(serve::Args),
    /// Print the spaces, the clients and the figures of a running service.
    #[command(after_help = EXIT_STATUS)]
    Status(status::Args),
    /// Remove a space of a running service.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Space(space::Args),
    /// Show the state and the rates of a running service until interrupted.
    #[command(after_help = EXIT_STATUS)]
    Top(top::Args),
    /// Print the completions of this command for a shell.
    #[command(after_help = manual::COMPLETIONS_HELP, arg_required_else_help = true)]
    Completions(manual::Completions),
    /// Write the manual: a page for this command, and one for each of its commands.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Man(manual::Man),
    /// Read a whole store and check every checksum. Changes nothing.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Verify(verify::Args),
    /// Remove a store for good: its files, or the superblocks of its devices.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Wipe(wipe::Args),
}

fn main() -> ExitCode {
    let filter = match log_filter(std::env::var("KVHOIST_LOG").ok().as_deref()) {
        Ok(filter) => filter,
        Err(failure) => return end(Err(failure)),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| progress::BesideProgress)
        // It would panic where standard error cannot be written.
        .log_internal_errors(false)
        .without_time()
        .init();
    let parsed = command(Cli::command()).try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return wrong_flags(&error),
    };
    end(match cli.command {
        Command::Man(args) => manual::pages(&args, Cli::command()),
        Command::Replay(args) => replay::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Completions(args) => manual::completions(&args, Cli::command()),
        Command::Doctor(args) => doctor::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Space(args) => space::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Wipe(args) => wipe::run(&args),
    })
}

/// What `KVHOIST_LOG` selects: warnings, if it is not set.
fn log_filter(given: Option<&str>) -> Result<EnvFilter, Failure> {
    let given = given.unwrap_or("warn");
    // A word alone that is no level would select the messages of a module of that name, and so none.
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    let known = given.split(',').all(|part| part.contains(['=', '[']) || is_level(part.trim()));
    EnvFilter::try_new(given).ok().filter(|_| known).ok_or_else(|| {
        Failure::usage(format!(
            "KVHOIST_LOG: found {given:?}, expected off, error, warn, info, debug or trace, or a level for each \
             module, such as warn,kvhoist::service=debug"
        ))
    })
}

/// Takes `-1` as the value of the flag before it, so that the refusal names that flag.
fn command(command: clap::Command) -> clap::Command {
    command
        .mut_args(|arg| if arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg })
        .mut_subcommands(self::command)
}

/// Prints the failure, if there is one. Returns the exit status.
fn end(result: Result<(), Failure>) -> ExitCode {
    let Err(failure) = result else { return ExitCode::SUCCESS };
    // If standard error cannot be written, the exit status is all that is left.
    drop(writeln!(std::io::stderr(), "kvhoist: {failure}"));
    ExitCode::from(failure.exit_status())
}

/// Wrong flags are one line, like every other error; help and version are printed as clap formats them.
fn wrong_flags(error: &clap::Error) -> ExitCode {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => end(output::emit(&text)),
        // Not 0: a script whose list of paths is empty has verified nothing.
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            drop(std::io::stderr().write_all(text.as_bytes()));
            ExitCode::from(Failure::USAGE)
        }
        _ => end(Err(Failure::usage(one_line(&text)))),
    }
}

/// An error of clap's as one line: a list on lines of its own follows its colon, a tip its sentence.
fn one_line(text: &str) -> String {
    let mut line = String::new();
    let said =
        |part: &&str| !part.is_empty() && !part.starts_with("Usage:") && !part.starts_with("For more information");
    for part in text.lines().map(str::trim).filter(said) {
        let values = part.strip_prefix("[possible values: ").and_then(|part| part.strip_suffix(']'));
        let part = part.strip_prefix("tip: ").or(part.strip_prefix("error: ")).unwrap_or(part);
        let between = match line.as_bytes().last() {
            None => "",
            Some(b':') => " ",
            Some(b'>') if part.starts_with('-') => ", ",
            Some(_) => "; ",
        };
        line.push_str(between);
        match values {
            Some(values) => line.extend(["expected one of ", values]),
            None => line.push_str(part),
        }
    }
    line + "; for the flags, try '--help'"
}

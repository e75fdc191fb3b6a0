//! The `kvhoist` command.

mod bench;
mod curves;
mod doctor;
mod generator;
mod http;
mod inspect;
mod interrupt;
mod output;
mod payload;
mod plot;
mod progress;
mod replay;
mod report;
mod serve;
mod settings;
mod space;
mod status;
mod store;
mod top;
mod verify;
mod wipe;
mod workload;

use std::{io::Write, process::ExitCode};

use clap::{Parser, Subcommand, error::ErrorKind};
use kvhoist_cli::{failure, shown, size, trace};

use crate::failure::{EXIT_STATUS, Failure};

/// The version, and the commit that it was built from where that is known.
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
    /// Tell what this machine gives, which way bytes will go on it, and why not a better one.
    #[command(after_help = EXIT_STATUS)]
    Doctor(doctor::Args),
    /// Measure the routes of this machine against its bare hardware.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Bench(bench::Args),
    /// Say what a store is and how full, from its superblocks and record tables. Changes nothing.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Inspect(inspect::Args),
    /// Own the drives for all processes of this node: clients connect at a socket. SIGTERM drains, a second one ends.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Serve(serve::Args),
    /// Say what a running service has and does: spaces, clients, hits.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Status(status::Args),
    /// Change what spaces a running service has.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Space(space::Args),
    /// Show what a running service does, again and again, until it is interrupted.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Top(top::Args),
    /// Read a whole store and check every checksum. Changes nothing.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Verify(verify::Args),
    /// Remove a store for good: its files, or the superblocks of its devices.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Wipe(wipe::Args),
}

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("KVHOIST_LOG").unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| progress::BesideProgress)
        // It would panic where standard error cannot be written.
        .log_internal_errors(false)
        .without_time()
        .init();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return wrong_flags(&error),
    };
    end(match cli.command {
        Command::Replay(args) => replay::run(&args),
        Command::Bench(args) => bench::run(&args),
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

/// Says why it failed, if it did, and with what status.
fn end(result: Result<(), Failure>) -> ExitCode {
    let Err(failure) = result else { return ExitCode::SUCCESS };
    // The status says it where standard error cannot be written.
    drop(writeln!(std::io::stderr(), "kvhoist: {failure}"));
    ExitCode::from(failure.exit_status())
}

/// Wrong flags are one line like every other error; help and version are what clap makes of them.
fn wrong_flags(error: &clap::Error) -> ExitCode {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => end(output::emit(&text)),
        // Not 0: a script whose list of paths is empty has verified nothing.
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            drop(std::io::stderr().write_all(text.as_bytes()));
            ExitCode::from(Failure::USAGE)
        }
        _ => {
            let words: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
            let line = words.join("; ");
            end(Err(Failure::usage(line.strip_prefix("error: ").unwrap_or(&line))))
        }
    }
}

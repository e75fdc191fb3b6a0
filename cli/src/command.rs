//! The command line: what it runs, and the exit status.

use std::{ffi::OsString, io::Write};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, error::ErrorKind};

#[cfg(feature = "remote")]
use crate::remote;
use crate::{
    bench, doctor,
    failure::{EXIT_STATUS, Failure},
    inspect, load_bench, ls, manual, output, replay, serve, space, status, top, verify, wipe,
};

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
    /// Load checkpoints by all loaders that Python has, and compare them: `python3 -m kvhoist load-bench`.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true, disable_help_flag = true)]
    LoadBench(load_bench::Args),
    /// List the stores below some paths: model, rank, size, fill, last write. Changes nothing.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Ls(ls::Args),
    /// Run one cache for all processes of this node. SIGTERM drains the service, a second one ends it at once.
    #[command(after_help = serve::EXIT_STATUS, arg_required_else_help = true)]
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
    /// Look at a store beyond the node, S3 or Redis, and delete from it.
    #[cfg(feature = "remote")]
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Remote(remote::Args),
    /// Print the completions of this command for a shell.
    #[command(after_help = manual::COMPLETIONS_HELP, arg_required_else_help = true)]
    Completions(manual::Completions),
    /// Write the manual: a page for this command, and one for each of its commands.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Man(manual::Man),
    /// Read a whole store and check every checksum. Changes nothing.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Verify(verify::Args),
    /// Remove a store for good: delete its files, and zero what it takes of its devices.
    ///
    /// Copies in an object store or in Redis (the setting `remote`) stay there for other nodes, and for a cache that is
    /// opened with the same namespace and block size; `kvhoist remote gc URL --namespace DIGEST --max-bytes 0` deletes
    /// them for all.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Wipe(wipe::Args),
}

/// A command line that was understood.
pub struct Parsed(Command);

/// Reads a command line, whose first argument is the program's name.
///
/// # Errors
/// The exit status, where help was asked for or the flags are wrong; what there was to say is printed.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Parsed, u8> {
    let matched = command(Cli::command()).try_get_matches_from(arguments);
    let parsed = matched.and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.map(|cli| Parsed(cli.command)).map_err(|error| wrong_flags(&error))
}

/// What an engine's package has found out: the subject, what was found, how to fix it, and whether it is a problem.
pub type EngineFinding = (String, String, Option<String>, bool);

impl Parsed {
    /// As [`run`](Self::run), with findings for the report of the doctor.
    pub fn run_for_engine(self, findings: Vec<EngineFinding>) -> u8 {
        let Command::Doctor(args) = self.0 else { return self.run() };
        let finding = |(what, found, fix, is_trouble)| doctor::Finding::of_engine(what, found, fix, is_trouble);
        end(doctor::run_for_engine(&args, findings.into_iter().map(finding).collect()))
    }

    /// What is logged where nobody says it. A service has a line for its start, its end, and each client. The doctor's
    /// report has a finding for what its stores would warn of.
    pub fn log_default(&self) -> &'static str {
        match self.0 {
            Command::Serve(_) => "warn,kvhoist=info,kvhoist_cli=info",
            Command::Doctor(_) => "error",
            _ => "warn",
        }
    }

    /// Runs it. Returns the exit status; a failure is printed.
    pub fn run(self) -> u8 {
        end(match self.0 {
            Command::Replay(args) => replay::run(&args),
            Command::Bench(args) => bench::run(&args),
            Command::Doctor(args) => doctor::run(&args),
            Command::Inspect(args) => inspect::run(&args),
            Command::Completions(args) => manual::completions(&args, Cli::command()),
            Command::LoadBench(args) => load_bench::run(&args),
            Command::Ls(args) => ls::run(&args),
            Command::Man(args) => manual::pages(&args, Cli::command()),
            #[cfg(feature = "remote")]
            Command::Remote(args) => remote::run(&args),
            Command::Serve(args) => serve::run(&args),
            Command::Space(args) => space::run(&args),
            Command::Status(args) => status::run(&args),
            Command::Top(args) => top::run(&args),
            Command::Verify(args) => verify::run(&args),
            Command::Wipe(args) => wipe::run(&args),
        })
    }
}

/// Takes `-1` as the value of the flag before it, so that the refusal names that flag.
fn command(command: clap::Command) -> clap::Command {
    command
        .mut_args(|arg| if arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg })
        .mut_subcommands(self::command)
}

/// Prints the failure, if there is one. Returns the exit status.
pub fn end(result: Result<(), Failure>) -> u8 {
    let Err(failure) = result else { return 0 };
    // If standard error cannot be written, the exit status is all that is left.
    drop(writeln!(std::io::stderr(), "kvhoist: {failure}"));
    failure.exit_status()
}

/// Wrong flags are one line, like every other error; help and version are printed as clap formats them.
fn wrong_flags(error: &clap::Error) -> u8 {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => end(output::emit(&text)),
        // Not 0: a script whose list of paths is empty has verified nothing.
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            drop(std::io::stderr().write_all(text.as_bytes()));
            Failure::USAGE
        }
        _ => end(Err(Failure::usage(one_line(&text)))),
    }
}

/// The words of Rust's parsers of numbers, which clap passes on, as those of all other errors.
fn in_words(part: &str) -> String {
    let Some((flag, said)) = part.rsplit_once(": ") else { return part.to_owned() };
    let range = said.split_once(" is not in ").and_then(|(_, range)| range.split_once("..="));
    let expected = match (said, range) {
        (_, Some((least, most))) => format!("expected {least} to {most}"),
        ("invalid digit found in string" | "cannot parse integer from empty string", _) => {
            "expected a whole number, 0 or more".into()
        }
        (said, _) if said.starts_with("number too large") => "expected a smaller number".into(),
        (said, _) if said.starts_with("invalid float") => "expected a number".into(),
        _ => return part.to_owned(),
    };
    format!("{flag}: {expected}")
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
            None => line.push_str(&in_words(part)),
        }
    }
    line + "; for the flags, try '--help'"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_doctor_logs_nothing_that_its_report_says() {
        let default = |words: &[&str]| match parse(words.iter().map(Into::into)) {
            Ok(parsed) => parsed.log_default(),
            Err(status) => panic!("{words:?}: exit status {status}"),
        };
        assert_eq!(default(&["kvhoist", "doctor"]), "error");
        assert_eq!(default(&["kvhoist", "replay"]), "warn");
    }
}

//! `kvhoist completions` and `kvhoist man`: the command's flags for shells and for `man`.

use std::path::PathBuf;

use clap_complete::Shell;

use crate::{failure::Failure, output::emit, shown::shown};

/// Where each shell looks for its completions.
pub const COMPLETIONS_HELP: &str = "\
Where they go, for one user:
  bash  ~/.local/share/bash-completion/completions/kvhoist
  zsh   _kvhoist in a folder of $fpath
  fish  ~/.config/fish/completions/kvhoist.fish

Exit status:
  0    success
  1    standard output cannot be written
  2    no such shell
  130  interrupted";

/// Flags of `kvhoist completions`.
#[derive(clap::Args)]
pub struct Completions {
    /// The shell.
    shell: Shell,
}

/// Flags of `kvhoist man`.
#[derive(clap::Args)]
pub struct Man {
    /// The folder for the pages: kvhoist.1, kvhoist-replay.1 and so on. /usr/local/share/man/man1 is where `man` looks.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Prints the completions of `command`.
pub fn completions(args: &Completions, mut command: clap::Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "kvhoist", &mut script);
    emit(&String::from_utf8_lossy(&script))
}

/// Writes the pages of `command`.
pub fn pages(args: &Man, command: clap::Command) -> Result<(), Failure> {
    clap_mangen::generate_to(command, &args.folder).map_err(|error| {
        Failure::usage(format!("man {}: {error}; name a folder that can be written", shown(&args.folder)))
    })
}

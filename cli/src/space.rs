//! `kvhoist space`: the spaces of a running service.

use std::path::PathBuf;

use kvhoist::service::{remove_space, status};

use crate::{
    failure::{EXIT_STATUS, Failure},
    output::emit,
    shown::shown,
    size::parse_bytes,
};

/// Flags of `kvhoist space`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Remove a space of this user with all its blocks. Refused while a client is attached to it.
    #[command(after_help = EXIT_STATUS)]
    Rm {
        /// The service's socket.
        #[arg(long, value_name = "FILE")]
        socket: PathBuf,
        /// Block size of the space, if several spaces have the name.
        #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
        block_bytes: Option<usize>,
        /// Remove the space of this name that users share. The user who made it may, and the service's.
        #[arg(long)]
        shared: bool,
        /// Name of the space.
        #[arg(value_name = "NAME")]
        name: String,
    },
}

/// Runs the subcommand.
pub fn run(args: &Args) -> Result<(), Failure> {
    let Command::Rm { socket, block_bytes, shared, name } = &args.command;
    let sizes: Vec<u64> = status(socket)?
        .spaces
        .iter()
        .filter(|space| space.namespace == *name && space.shared == *shared)
        .map(|space| space.block_bytes)
        .filter(|size| block_bytes.is_none_or(|wanted| wanted as u64 == *size))
        .collect();
    match sizes[..] {
        [size] => {
            remove_space(socket, name, size, *shared)?;
            emit(&format!("kvhoist: removed {name:?} of {size}-byte blocks\n"))
        }
        [] => Err(Failure::usage(format!(
            "space rm: found no such space at {}, expected one that `kvhoist status` lists",
            shown(socket)
        ))),
        _ => {
            let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
            Err(Failure::usage(format!(
                "space rm: found spaces with blocks of {} bytes under this name, expected one; add --block-bytes",
                sizes.join(" and ")
            )))
        }
    }
}

//! `kvhoist space`: the spaces of a running service.

use std::path::PathBuf;

use kvhoist::service::{remove_space, status};

use crate::{failure::Failure, output::emit, shown::shown, size::parse_bytes};

/// Flags of `kvhoist space`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Remove a space of this user with all its blocks, for good. No client may be attached to it.
    Rm {
        /// Where the service listens.
        #[arg(long, value_name = "FILE")]
        socket: PathBuf,
        /// The size of its blocks, where several spaces have the name.
        #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
        block_bytes: Option<usize>,
        /// Remove the space of this name that users share. The user who made it may, and the service's.
        #[arg(long)]
        shared: bool,
        /// Its name.
        #[arg(value_name = "NAME")]
        name: String,
    },
}

/// Does what the flags say.
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
        _ => Err(Failure::usage(format!(
            "space rm: found spaces of {sizes:?} bytes a block with this name, expected one; say --block-bytes"
        ))),
    }
}

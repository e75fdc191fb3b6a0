//! `kvhoist space`: the spaces of a running service.

use std::collections::BTreeSet;

use kvhoist_service::{SpaceStatus, remove_space};

use crate::{
    failure::{EXIT_STATUS, Failure},
    output::emit,
    shown::shown,
    size::parse_bytes,
    socket::Socket,
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
        #[command(flatten)]
        socket: Socket,
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
    let spaces = socket.status()?.spaces;
    let sizes = sizes(&spaces, name, *shared, *block_bytes);
    match sizes[..] {
        [size] => {
            remove_space(&socket.path(), name, size, *shared)?;
            emit(&format!("kvhoist: removed {name:?} of {size}-byte blocks\n"))
        }
        [] => Err(Failure::usage(format!(
            "space rm: found no such space at {}, expected one that `kvhoist status` lists{}",
            shown(&socket.path()),
            others(&spaces, name)
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

/// The block sizes of the spaces of this name, each once. Users have spaces of their own: the service removes the one
/// of the user that asks. With user namespaces only the service knows that user by the number that `status` shows.
fn sizes(spaces: &[SpaceStatus], name: &str, shared: bool, block_bytes: Option<usize>) -> Vec<u64> {
    let named = spaces.iter().filter(|space| space.namespace == name && space.shared == shared);
    let sizes: BTreeSet<u64> = named.map(|space| space.block_bytes).collect();
    sizes.into_iter().filter(|size| block_bytes.is_none_or(|wanted| wanted as u64 == *size)).collect()
}

/// The spaces of this name that the flags leave out, for the end of a sentence.
fn others(spaces: &[SpaceStatus], name: &str) -> String {
    let named = spaces.iter().filter(|space| space.namespace == name);
    let named: BTreeSet<String> = named
        .map(|space| {
            format!("{}-byte blocks{}", space.block_bytes, if space.shared { " that users share" } else { "" })
        })
        .collect();
    if named.is_empty() {
        return String::new();
    }
    let named: Vec<String> = named.into_iter().collect();
    format!("; of this name it has one of {}: see --shared and --block-bytes", named.join(", one of "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spaces_of_several_users_with_one_name_and_block_size_are_one_choice() {
        let space = |uid, block_bytes, shared| SpaceStatus {
            namespace: "a".into(),
            uid,
            block_bytes,
            shared,
            ..SpaceStatus::default()
        };
        let spaces = [space(1, 4096, false), space(2, 4096, false), space(2, 8192, false), space(2, 16384, true)];
        assert_eq!(sizes(&spaces[..2], "a", false, None), [4096]);
        assert_eq!(sizes(&spaces, "a", false, None), [4096, 8192]);
        assert_eq!(sizes(&spaces, "a", false, Some(4096)), [4096]);
        assert_eq!(sizes(&spaces, "a", true, None), [16384]);
        assert!(sizes(&spaces, "b", false, None).is_empty());
        assert_eq!(others(&spaces, "b"), "");
        let said = others(&spaces[2..], "a");
        assert!(
            said.contains("one of 16384-byte blocks that users share, one of 8192-byte blocks: see --shared"),
            "{said}"
        );
    }
}

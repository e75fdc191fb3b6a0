//! `kvhoist wipe`: removes a store.

use std::{
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
};

use kvhoist::store::{Shape, Store};

use crate::{
    failure::Failure,
    ls::{SPACE, refuse_what_is_above},
    output::emit,
    progress::Progress,
    shown::{plain, shown},
    size::show_bytes,
    store::uuid,
};

/// Flags of `kvhoist wipe`.
#[derive(clap::Args)]
pub struct Args {
    /// All directories, files or block devices of one store, in any order. The same again finishes a wipe that was cut
    /// off.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Remove the store without asking.
    #[arg(long)]
    yes: bool,
    /// Print no progress.
    #[arg(long)]
    quiet: bool,
}

/// Removes a store if it is one, is not in use, and the user confirms.
pub fn run(args: &Args) -> Result<(), Failure> {
    if !args.yes && !io::stdin().is_terminal() {
        return Err(Failure::usage(
            "wipe: found no terminal to ask at; add --yes to remove the store without a question",
        ));
    }
    refuse_what_is_above(&args.paths)?;
    // A space's folder, or its store there. Only the one below the service's first path has the file.
    let is_space = |path: &PathBuf| {
        let folder = if path.is_file() { path.parent() } else { Some(&**path) };
        folder.is_some_and(|folder| folder.join(SPACE).is_file() || has_name_of_space(folder))
    };
    if let Some(path) = args.paths.iter().find(|path| is_space(path)) {
        return Err(Failure::usage(format!(
            "{}: found a space of a service, expected a store of an engine or a program; remove it by `kvhoist space \
             rm` while the service runs",
            shown(path)
        )));
    }
    let (mut told, mut shown) = (String::new(), None);
    let confirm = |shape: Option<&Shape>, paths: &[PathBuf], gone: &[&Path]| {
        told = describe(shape, paths, gone);
        if args.yes && !gone.is_empty() {
            // One of them may be mistyped, or the mount point of a drive that is not mounted.
            drop(writeln!(io::stderr(), "kvhoist: removing {told}"));
        }
        args.yes || is_meant(&told)
    };
    let wiped = Store::at(&args.paths).wipe(confirm, |done, total| {
        let (done, total) = ((done >> 20) as usize, (total >> 20) as usize);
        shown.get_or_insert_with(|| Progress::new(total, "MiB", args.quiet)).update(done, || "zeroed".into());
    })?;
    drop(shown);
    match wiped {
        true => emit(&format!("removed {told}\n")),
        false => Err(Failure::run("nothing was removed")),
    }
}

/// True for a folder that is named as a service names those of its spaces: by 12 bytes of a hash.
fn has_name_of_space(folder: &Path) -> bool {
    let number = folder.file_name().and_then(|name| name.to_str()?.strip_prefix("space-"));
    number.is_some_and(|number| number.len() == 24 && number.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

fn describe(shape: Option<&Shape>, paths: &[PathBuf], gone: &[&Path]) -> String {
    let paths: Vec<String> = paths.iter().map(|path| shown(path)).collect();
    let gone: Vec<String> = gone.iter().map(|path| shown(path)).collect();
    if !gone.is_empty() {
        return format!("the rest of a store, at {} (gone already: {})", paths.join(", "), gone.join(", "));
    }
    let what = shape.map_or_else(
        || "a damaged or unfinished store".to_owned(),
        |shape| {
            let (namespace, block) = (plain(&shape.namespace), show_bytes(shape.block_bytes));
            format!("store {} of namespace {namespace}, {} slots of {block}", uuid(shape), shape.slots)
        },
    );
    format!("{what}, at {}", paths.join(", "))
}

fn is_meant(told: &str) -> bool {
    // A question that cannot be printed is not answered.
    let asked = write!(io::stderr(), "Remove {told}, for good? Type yes: ").is_ok();
    let mut answer = String::new();
    asked && io::stdin().read_line(&mut answer).is_ok() && answer.trim() == "yes"
}

//! `kvhoist ls`: the stores below some paths.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use kvhoist::{
    DirectIo,
    internals::disk::{
        FILE_NAME as STORE,
        format::{HEAD_BYTES, pair::SuperblockPair, superblock::Superblock},
    },
    store::{Inspection, Store},
};
use serde_json::{Value, json};

use crate::{
    failure::Failure,
    output::emit,
    shown::{plain, shown},
    size::show_bytes,
};

/// The name of the file that describes a service's space, beside that of its store.
pub const SPACE: &str = "space";

/// How deep below a path stores are looked for, and in how many folders.
const DEPTH: usize = 4;
const FOLDERS_MAX: usize = 65_536;

/// Flags of `kvhoist ls`.
#[derive(clap::Args)]
pub struct Args {
    /// Folders of engines and services, as in their settings: all paths of a store, in any order.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Print one JSON list instead of a table.
    #[arg(long)]
    json: bool,
}

/// A store: its folders, and what is in it, or in what state it is and why nothing else can be told.
struct Listed {
    folders: Vec<PathBuf>,
    found: Result<Inspection, (&'static str, kvhoist::Error)>,
    written: Option<SystemTime>,
}

/// Prints the stores, with what an operator chooses by. Changes nothing.
pub fn run(args: &Args) -> Result<(), Failure> {
    if let Some(path) = args.paths.iter().find(|path| !path.is_dir()) {
        return Err(Failure::usage(format!("{}: found no folder, expected one with stores below it", shown(path))));
    }
    let Below { stores, unread, is_cut } = below(&args.paths, FOLDERS_MAX);
    let stores: Vec<Listed> = stores.into_values().flat_map(apart).map(look).collect();
    emit(&match (args.json, stores.is_empty()) {
        (true, _) => format!("{:#}\n", Value::Array(stores.iter().map(object).collect())),
        (false, true) => "no stores\n".into(),
        (false, false) => {
            let [size, full, written, in_use] = ["size", "full", "last written", "in use"];
            let rows: String = stores.iter().map(lines).collect();
            format!("{size:>11}{full:>8}  {written:16}{in_use:8}namespace (model, rank, pool)\n{rows}")
        }
    })?;
    let Some((first, why)) = unread.first() else { return Ok(()) };
    let (count, first) = (unread.len(), shown(first));
    let text = format!("stores may be missing: found folders that were not read ({count}), such as {first}: {why}");
    if is_cut {
        return Err(Failure::run(text));
    }
    drop(writeln!(std::io::stderr(), "kvhoist: {text}"));
    Ok(())
}

/// What lies below some paths.
struct Below {
    /// The folders with a store's file, each once, by where they lie below: a store has the same place below each path.
    stores: BTreeMap<PathBuf, Vec<PathBuf>>,
    /// Folders that were not looked into, and why.
    unread: Vec<(PathBuf, String)>,
    /// A path itself is among them, or there were too many folders.
    is_cut: bool,
}

/// Looks into at most so many folders below each path.
fn below(paths: &[PathBuf], folders_max: usize) -> Below {
    let mut found = Below { stores: BTreeMap::new(), unread: Vec::new(), is_cut: false };
    let mut seen = BTreeSet::new();
    for root in paths {
        let (mut folders, mut looked_at) = (vec![(root.clone(), 0)], 0);
        while let Some((folder, depth)) = folders.pop() {
            looked_at += 1;
            if folder.join(STORE).is_file() && seen.insert(fs::canonicalize(&folder).unwrap_or_else(|_| folder.clone()))
            {
                let place = folder.strip_prefix(root).unwrap_or(Path::new("")).to_owned();
                found.stores.entry(place).or_default().push(folder.clone());
            }
            let entries = match fs::read_dir(&folder) {
                Ok(entries) => entries,
                Err(error) => {
                    found.unread.push((folder, error.to_string()));
                    found.is_cut |= depth == 0;
                    continue;
                }
            };
            for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
                if depth == DEPTH {
                    found.unread.push((entry.path(), format!("deeper than the {DEPTH} folders that are looked into")));
                    break;
                }
                if looked_at + folders.len() == folders_max {
                    let why = format!("below {} are more than the {folders_max} that are looked into", shown(root));
                    found.unread.push((entry.path(), why));
                    found.is_cut = true;
                    break;
                }
                folders.push((entry.path(), depth + 1));
            }
        }
    }
    found
}

/// What to do about a folder that is no store's, but has stores of engines or of a service below it.
///
/// # Errors
/// [`Failure::USAGE`] with the first of them.
pub fn refuse_what_is_above(paths: &[PathBuf]) -> Result<(), Failure> {
    for path in paths.iter().filter(|path| path.is_dir() && !path.join(STORE).exists()) {
        let Below { stores, .. } = below(std::slice::from_ref(path), FOLDERS_MAX);
        if let Some(first) = stores.values().flatten().next() {
            let (path, count, first) = (shown(path), stores.len(), shown(first));
            let counted = if count == 1 { "1 store below it".into() } else { format!("{count} stores below it") };
            return Err(Failure::usage(format!(
                "{path}: found no store, and {counted}, expected the folder of a store, such as {first}; `kvhoist ls` \
                 lists them"
            )));
        }
    }
    Ok(())
}

/// Tells apart the stores that have one place below several paths, by the ids in their superblocks. Files without a
/// superblock are those that a store lacks, or of one store that is damaged or unfinished.
fn apart(folders: Vec<PathBuf>) -> Vec<Vec<PathBuf>> {
    let (mut by_id, mut others) = (BTreeMap::<_, (usize, Vec<PathBuf>)>::new(), Vec::new());
    for folder in folders {
        match superblock(&folder) {
            Some(superblock) => {
                let (members, folders) = by_id.entry(superblock.uuid).or_default();
                *members = usize::from(superblock.members);
                folders.push(folder);
            }
            None => others.push(folder),
        }
    }
    let mut lacking: Vec<_> = by_id.values_mut().filter(|(members, folders)| folders.len() < *members).collect();
    if let [(_, folders)] = &mut lacking[..] {
        folders.append(&mut others);
    }
    let mut stores: Vec<Vec<PathBuf>> = by_id.into_values().map(|(_, folders)| folders).collect();
    stores.extend((!others.is_empty()).then_some(others));
    stores.sort();
    stores
}

fn superblock(folder: &Path) -> Option<Superblock> {
    let mut head = [0; HEAD_BYTES];
    File::open(folder.join(STORE)).and_then(|file| file.read_exact_at(&mut head, 0)).ok()?;
    match SuperblockPair::decode(&head) {
        SuperblockPair::Valid { superblock, .. } => Some(superblock),
        _ => None,
    }
}

fn look(folders: Vec<PathBuf>) -> Listed {
    let written = |folder: &PathBuf| fs::metadata(folder.join(STORE)).and_then(|found| found.modified()).ok();
    let store = Store::at(&folders).direct_io(DirectIo::Prefer).allow_in_use(true);
    Listed { written: folders.iter().filter_map(written).max(), found: store.inspect_or_state(), folders }
}

fn lines(store: &Listed) -> String {
    let mut text = match &store.found {
        Ok(found) => {
            let size = found.members.iter().map(|member| member.bytes).sum();
            let full = 100.0 * found.full as f64 / f64::from(found.shape.slots);
            let written = store.written.map_or_else(|| "unknown".into(), ago);
            let in_use = if found.in_use { "yes" } else { "no" };
            let name = plain(&found.shape.namespace);
            format!("{:>11}{:>7.1}%  {written:16}{in_use:8}{name}\n", show_bytes(size), full)
        }
        Err((state, error)) => format!("{state:>11}{:>8}  {}\n", "", plain(&error.to_string())),
    };
    for folder in &store.folders {
        let of = if folder.join(SPACE).is_file() { " (a service's space)" } else { "" };
        text.push_str(&format!("{:21}{}{of}\n", "", shown(folder)));
    }
    text
}

fn object(store: &Listed) -> Value {
    let since_epoch = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let mut object = json!({
        "paths": store.folders.iter().map(|path| path.to_string_lossy()).collect::<Vec<_>>(),
        "last_written": store.written.map(since_epoch),
        "is_space": store.folders.iter().any(|folder| folder.join(SPACE).is_file()),
    });
    match &store.found {
        Ok(found) => {
            object["namespace"] = found.shape.namespace.as_str().into();
            object["bytes"] = found.members.iter().map(|member| member.bytes).sum::<u64>().into();
            object["slots"] = found.shape.slots.into();
            object["full"] = found.full.into();
            object["in_use"] = found.in_use.into();
        }
        Err((state, error)) => {
            object["state"] = (*state).into();
            object["error"] = error.to_string().into();
        }
    }
    object
}

/// How long ago something was, in the largest unit.
fn ago(time: SystemTime) -> String {
    let past = SystemTime::now().duration_since(time).unwrap_or(Duration::ZERO).as_secs();
    match past {
        0..60 => format!("{past} s ago"),
        60..3600 => format!("{} min ago", past / 60),
        3600..86_400 => format!("{} h ago", past / 3600),
        _ => format!("{} days ago", past / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_looked_into_is_said_for_each_path() {
        let folder = tempfile::tempdir().expect("a folder");
        let roots = ["a", "b"].map(|name| folder.path().join(name));
        for root in &roots {
            fs::create_dir_all(root.join("model/rank")).expect("made");
            fs::write(root.join("model/rank").join(STORE), "").expect("written");
        }
        let Below { stores, unread, is_cut } = below(&roots, 3);
        assert_eq!((stores.len(), unread.len(), is_cut), (1, 0, false), "{unread:?}");
        assert!(stores.values().all(|folders| folders.len() == roots.len()), "{stores:?}");
        let Below { stores, unread, is_cut } = below(&roots, 1);
        assert_eq!((stores.len(), unread.len(), is_cut), (0, 2, true));
        assert!(
            unread.iter().all(|(path, why)| path.ends_with("model") && why.contains("more than the 1 ")),
            "{unread:?}"
        );
        let gone = below(&[folder.path().join("gone")], 3);
        assert!(gone.is_cut && gone.unread[0].1.contains("No such file"), "{:?}", gone.unread);
    }
}

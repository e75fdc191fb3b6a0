//! A service's folders, sizes and engines, compared with the machine before anything is made.

use std::{
    collections::HashSet,
    fs,
    io::{self, ErrorKind},
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use kvhoist::{
    EngineMode, StorageKind,
    internals::{io::uring, machine::shown},
};
use kvhoist_doctor::{disk_bytes, is_on_root, memory_bytes};

use super::config::ServerConfig;
use crate::error::{Error, Result};

/// The folders that a start has made. A service that is refused removes them again, as far as they are empty.
#[must_use]
pub(super) struct Made(Vec<PathBuf>);

impl Made {
    /// The service runs: its folders stay.
    pub(super) fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for folder in self.0.iter().rev() {
            drop(fs::remove_dir(folder));
        }
    }
}

/// Checks that the machine has the engines, the disk and the memory of a service, and makes folders of which only the
/// last part is missing: a missing parent is a drive that is not mounted.
///
/// # Errors
/// [`Error::Store`] for a path that is no folder and cannot become one, [`Error::Config`] for an engine or a size that
/// the machine does not have, [`Error::Io`].
pub(super) fn prepare(config: &ServerConfig) -> Result<Made> {
    check_engines(config)?;
    let places = config.paths.iter().map(|path| place(path)).collect::<Result<Vec<_>>>()?;
    once_each(&config.paths, &places)?;
    if let Some(most) = memory_bytes().filter(|&most| config.host_bytes > most) {
        let expected = format!("{} at most, the memory of this machine or of its cgroup", size(most));
        return Err(Error::config("host_bytes", size(config.host_bytes), expected));
    }
    if let Some(most) = disk_bytes(&places).filter(|&most| config.capacity_bytes > most) {
        let most = size(most);
        let expected = format!("{most} at most, which the file systems of the paths have, each path the same part");
        return Err(Error::config("capacity_bytes", size(config.capacity_bytes), expected));
    }
    let mut made = Made(Vec::new());
    for path in &config.paths {
        match fs::DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => made.0.push(path.clone()),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(Error::io("create", path, error)),
        }
    }
    warn_of_root(config);
    Ok(made)
}

/// Refuses engines that every space would ask for in vain.
fn check_engines(config: &ServerConfig) -> Result<()> {
    if config.cache.disk.storage == StorageKind::Uring {
        uring::probe().map_err(|error| uring::refused(&error))?;
    }
    if config.cache.device.cufile == EngineMode::On {
        let expected = "auto or off: blocks of a service reach a device through host memory, where others find them";
        return Err(Error::config("cufile", "on", expected));
    }
    Ok(())
}

/// For people, and exactly: what is refused may be a little too much.
fn size(bytes: u64) -> String {
    format!("{} ({bytes} bytes)", shown(bytes))
}

/// Refuses two names of one folder: its drive would have two parts of the capacity. `places` as of [`place`].
fn once_each(paths: &[PathBuf], places: &[PathBuf]) -> Result<()> {
    let mut known = HashSet::new();
    for (path, place) in paths.iter().zip(places) {
        let found = fs::metadata(place).map_err(|error| Error::io("stat", place, error))?;
        let new_name = path.file_name().filter(|_| place != path);
        if !known.insert((found.dev(), found.ino(), new_name)) {
            return Err(Error::config("paths", format!("{} twice", path.display()), "each folder once"));
        }
    }
    Ok(())
}

/// The folder that a path is, or that it will be made in.
fn place(path: &Path) -> Result<PathBuf> {
    let refused = |found: String| {
        let expected = "a folder, or a new name in one that exists";
        Error::store(
            path,
            found,
            expected,
            "mount the missing drive, create the folder (mkdir -m 700), or name another",
        )
    };
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Ok(path.to_owned()),
        Ok(_) => Err(refused("something else than a folder".into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            match parent.is_dir() {
                true => Ok(parent.to_owned()),
                false => Err(refused(format!("no folder {}", parent.display()))),
            }
        }
        Err(error) => Err(refused(format!("no way to it ({error})"))),
    }
}

/// Warns of stores that will fill the root file system, as those of a drive that is not mounted do.
fn warn_of_root(config: &ServerConfig) {
    let bytes = config.capacity_bytes / config.paths.len().max(1) as u64;
    for path in config.paths.iter().filter(|path| is_on_root(path)) {
        tracing::warn!(
            path = %path.display(), bytes,
            "the path is on the root file system, whose room its stores take; a drive that belongs there is not mounted"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(paths: &[PathBuf]) -> ServerConfig {
        ServerConfig {
            paths: paths.to_vec(),
            host_bytes: 1 << 20,
            capacity_bytes: 2 << 20,
            ..ServerConfig::new("socket")
        }
    }

    #[test]
    fn only_the_last_part_of_a_path_is_made() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        prepare(&config(&[path("kv")])).expect("made").keep();
        assert!(path("kv").is_dir());
        drop(prepare(&config(&[path("kv"), path("more")])).expect("made"));
        assert!(path("kv").is_dir() && !path("more").exists(), "what a start has made goes with it");
        let refused = prepare(&config(&[path("mnt/nvme/kv")])).err().expect("no drive is mounted");
        assert!(refused.to_string().contains("found no folder") && !path("mnt").exists(), "{refused}");
        fs::write(path("file"), "").expect("written");
        for wrong in ["file", "file/kv"] {
            let refused = prepare(&config(&[path("new"), path(wrong)])).err().expect(wrong);
            assert!(matches!(refused, Error::Store { .. }), "{refused}");
        }
        assert!(!path("new").exists(), "nothing is made for a service that is refused");
    }

    #[test]
    fn a_folder_with_two_names_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        fs::create_dir(path("old")).expect("made");
        std::os::unix::fs::symlink(path("old"), path("link")).expect("a link");
        for (one, other) in [("old", "old/"), ("old", "link"), ("new", "new/"), ("old/new", "link/new")] {
            let refused = prepare(&config(&[path(one), path(other)])).err().expect("one folder");
            assert!(matches!(refused, Error::Config { field: "paths", .. }), "{refused}");
            assert!(!path("new").exists() && !path("old/new").exists(), "nothing is made");
        }
        drop(prepare(&config(&[path("old"), path("new"), path("old/new")])).expect("three folders"));
    }

    #[test]
    fn sizes_that_the_machine_does_not_have_are_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let good = config(&[directory.path().join("a"), directory.path().join("b")]);
        for (field, spoiled) in [
            ("host_bytes", ServerConfig { host_bytes: 1 << 60, ..good.clone() }),
            ("capacity_bytes", ServerConfig { capacity_bytes: 1 << 60, ..good.clone() }),
        ] {
            match prepare(&spoiled).map(drop) {
                Err(Error::Config { field: found, expected, .. }) => {
                    assert!(found == field && expected.contains(" at most, "), "{found}: {expected}");
                }
                other => panic!("{field}: {other:?}"),
            }
        }
        // Two paths of one file system have its room together.
        let (one, both) = (disk_bytes(&good.paths[..1]), disk_bytes(&good.paths));
        assert_eq!(one.or(both), None, "nothing was made");
        let place = [directory.path().to_owned(), directory.path().to_owned()];
        assert_eq!(disk_bytes(&place), disk_bytes(&place[..1]));
    }
}

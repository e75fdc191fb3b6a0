//! Temporary folders of a command, which go with it however it ends.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Mutex,
};

use tempfile::TempDir;

use crate::shown::{reason, shown};

/// Those that there are now.
static ALL: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A temporary folder, removed when it is dropped.
pub struct Scratch(TempDir);

impl Scratch {
    /// Makes one in a folder, or where the system has such.
    pub fn new(prefix: &str, parent: Option<&Path>) -> io::Result<Self> {
        let parent = parent.map_or_else(std::env::temp_dir, Path::to_owned);
        let folder = tempfile::Builder::new().prefix(prefix).tempdir_in(parent)?;
        ALL.lock().expect("nothing panics under it").push(folder.path().to_owned());
        Ok(Scratch(folder))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mut all = ALL.lock().expect("nothing panics under it");
        // Under the lock: no end of the process comes in the middle of it.
        drop(fs::remove_dir_all(self.path()));
        all.retain(|path| path != self.path());
    }
}

/// Removes all of them, before a process ends at once. One that cannot be removed is named.
pub fn remove_all() {
    for path in &*ALL.lock().expect("nothing panics under it") {
        // Another thread may make a file in it meanwhile.
        if let Err(error) = fs::remove_dir_all(path).or_else(|_| fs::remove_dir_all(path)) {
            let path = shown(path);
            drop(writeln!(io::stderr(), "kvhoist: {path} is left: {}; remove it", reason(&error)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_at_an_end_is_removed() {
        let folder = tempfile::tempdir().expect("a directory");
        let scratch = Scratch::new("kvhoist-test-", Some(folder.path())).expect("made");
        fs::write(scratch.path().join("kvhoist.store"), "blocks").expect("written");
        remove_all();
        assert!(!scratch.path().exists());
        drop(scratch);
        assert!(ALL.lock().expect("no panic").iter().all(|path| !path.starts_with(folder.path())));
    }
}

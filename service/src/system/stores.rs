//! The stores of a space that is not open.

use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use kvhoist::{
    Config,
    internals::disk::{
        FILE_NAME, ReadOnlyFile,
        format::{
            HEAD_BYTES,
            survey::{Found, survey},
        },
        open_read_only,
    },
};

use super::is_own_folder;
use crate::error::{Error, Result};

/// The bytes of the stores in the folders of a space; all that there are where that cannot be known.
pub(super) fn bytes(folders: &[PathBuf]) -> u64 {
    let of = |path: &PathBuf| find(path).map_or(u64::MAX, |found| found.unwrap_or(0));
    folders.iter().map(of).fold(0, u64::saturating_add)
}

/// The bytes of the store in a folder of a space, if there is one. Needs no descriptor.
pub(super) fn find(path: &Path) -> io::Result<Option<u64>> {
    let found = is_own_folder(path).and_then(|own| match own {
        true => fs::symlink_metadata(path.join(FILE_NAME)).map(|store| Some(store.len())),
        false => Ok(None),
    });
    match found {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        found => found,
    }
}

/// Whether the files in the folders of a space would be opened as its store, by their superblocks.
///
/// # Errors
/// As an open's, for settings that are right; none for a shortage of descriptors, which passes.
pub(super) fn look(config: &Config) -> Result<()> {
    let mut stores = Vec::with_capacity(config.disk.paths.len());
    for disk in &config.disk.paths {
        let path = disk.path.join(FILE_NAME);
        let store = match fs::symlink_metadata(&path) {
            // An open makes it.
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            _ => match open_read_only(&path, config.disk.direct_io, true) {
                Err(Error::Io { source, .. }) if SHORTAGES.map(Some).contains(&source.raw_os_error()) => return Ok(()),
                opened => Some(opened?),
            },
        };
        stores.push((path, store));
    }
    let new = |path| Found { path, bytes: 0, device: false, head: &[0; HEAD_BYTES] };
    let found = stores.iter().map(|(path, store)| store.as_ref().map_or_else(|| new(path), ReadOnlyFile::found));
    survey(&found.collect::<Vec<_>>(), config).map(drop)
}

const SHORTAGES: [i32; 2] = [libc::EMFILE, libc::ENFILE];

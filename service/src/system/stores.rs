//! The stores of a space that is not open.

use std::{
    fs,
    io::{self, ErrorKind, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use kvhoist::{
    Config,
    internals::disk::{
        FILE_NAME,
        format::{
            HEAD_BYTES,
            survey::{Found, survey},
        },
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

/// Whether the files in the folders of a space would be opened as its store, by their superblocks. It takes no lock, so
/// that no open waits for it.
///
/// # Errors
/// As an open's, for settings that are right.
pub(super) fn look(config: &Config) -> Result<()> {
    let stores: Vec<Store> = config.disk.paths.iter().map(|disk| Store::read(&disk.path)).collect::<Result<_>>()?;
    let found = stores.iter().map(|Store { path, bytes, head }| Found { path, bytes: *bytes, device: false, head });
    survey(&found.collect::<Vec<_>>(), config).map(drop)
}

/// A file of a store.
struct Store {
    path: PathBuf,
    bytes: u64,
    head: Box<[u8; HEAD_BYTES]>,
}

impl Store {
    /// Of a file that is not there, as of an empty one: an open makes it.
    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE_NAME);
        // No link, as of an open; a pipe would wait for a writer.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let mut begin = Vec::with_capacity(HEAD_BYTES);
        let read = fs::OpenOptions::new().read(true).custom_flags(flags).open(&path).and_then(|file| {
            let bytes = file.metadata()?.len();
            file.take(HEAD_BYTES as u64).read_to_end(&mut begin)?;
            Ok(bytes)
        });
        let bytes = match read {
            Err(error) if error.kind() == ErrorKind::NotFound => 0,
            read => read.map_err(|error| Error::io("read", &path, error))?,
        };
        let mut head = Box::new([0; HEAD_BYTES]);
        head[..begin.len()].copy_from_slice(&begin);
        Ok(Store { path, bytes, head })
    }
}

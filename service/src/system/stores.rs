//! The stores of a space that is not open.

use std::{
    fs,
    io::{self, ErrorKind},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use kvhoist::{
    Config,
    internals::disk::{
        FILE_NAME,
        format::{
            HEAD_BYTES, PAGE_BYTES, SUPERBLOCK_OFFSETS,
            pair::{SuperblockPair, UNREADABLE_COPY},
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
/// As an open's, for settings that are right; none for a shortage, which passes.
pub(super) fn look(config: &Config) -> Result<()> {
    let mut stores = Vec::with_capacity(config.disk.paths.len());
    for disk in &config.disk.paths {
        let path = disk.path.join(FILE_NAME);
        match read_head(&path) {
            Ok((bytes, head)) => stores.push((path, bytes, head)),
            // An open makes it.
            Err(error) if error.kind() == ErrorKind::NotFound => stores.push((path, 0, Box::new([0; HEAD_BYTES]))),
            Err(error) if SHORTAGES.map(Some).contains(&error.raw_os_error()) => return Ok(()),
            Err(error) => return Err(Error::io("read", &path, error)),
        }
    }
    let found = stores.iter().map(|(path, bytes, head)| Found { path, bytes: *bytes, device: false, head });
    survey(&found.collect::<Vec<_>>(), config).map(drop)
}

const SHORTAGES: [i32; 3] = [libc::EMFILE, libc::ENFILE, libc::ENOMEM];

/// The size of a store, and its superblocks, of which the drive may not return one.
fn read_head(path: &Path) -> io::Result<(u64, Box<[u8; HEAD_BYTES]>)> {
    // No link, as of an open; a pipe would wait for a writer.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let (mut head, mut failed) = (Box::new([0; HEAD_BYTES]), None);
    for (copy, offset) in head.chunks_exact_mut(PAGE_BYTES).zip(SUPERBLOCK_OFFSETS) {
        if let Err(error) = file.read_at(copy, offset)
            && failed.replace(error).is_none()
        {
            copy.copy_from_slice(&UNREADABLE_COPY);
        }
    }
    match failed {
        Some(error) if !matches!(SuperblockPair::decode(&head), SuperblockPair::Valid { .. }) => Err(error),
        _ => Ok((file.metadata()?.len(), head)),
    }
}

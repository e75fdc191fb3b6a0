//! The files of an open that can still fail.

use std::{io, os::unix::fs::FileExt};

use super::{
    super::format::{
        PAGE_BYTES, SUPERBLOCK_OFFSETS,
        pair::SuperblockPair,
        superblock::{StoreState, Superblock},
    },
    path::Opened,
};
use crate::memory::AlignedBuf;

/// The files of an open that can still fail. Dropped without [`keep`](Self::keep), those that the open created are
/// removed, and those that were empty are empty again. Where others are a part of the store, such as a device, or the
/// creation cannot be taken back, those that have a superblock by then stay: a later open finishes the creation.
pub(crate) struct Unkept(Vec<Opened>);

impl Unkept {
    pub(super) fn new(files: Vec<Opened>) -> Self {
        Unkept(files)
    }

    /// Keeps the files: the cache is open.
    pub(crate) fn keep(mut self) {
        self.0.iter_mut().for_each(Opened::keep);
    }

    /// Takes a creation back by its steps in reverse, each over all members before the next: superblocks A are forming,
    /// then superblocks B are zero. Wherever this is cut off, a later open finishes the creation or begins anew; after
    /// it, it begins anew, whichever files are gone.
    fn take_back(&self) -> io::Result<()> {
        for offset in SUPERBLOCK_OFFSETS {
            for opened in &self.0 {
                let superblock = match SuperblockPair::decode(opened.head()?.first_chunk().expect("a head")) {
                    SuperblockPair::Valid { superblock, .. } => superblock,
                    // No member is whole yet.
                    SuperblockPair::Blank | SuperblockPair::Torn => continue,
                    SuperblockPair::Bad(_) => return Err(io::ErrorKind::InvalidData.into()),
                };
                let mut page = AlignedBuf::zeroed(PAGE_BYTES);
                if offset == SUPERBLOCK_OFFSETS[0] {
                    let forming = Superblock { state: StoreState::Forming, sequence: 1, ..superblock };
                    page.copy_from_slice(&forming.encode());
                }
                opened.file.write_all_at(&page, offset)?;
            }
            self.0.iter().try_for_each(|opened| opened.file.sync_data())?;
        }
        Ok(())
    }
}

impl Drop for Unkept {
    fn drop(&mut self) {
        // A single file goes at once.
        let goes = self.0.iter().all(Opened::is_undone) && (self.0.len() == 1 || self.take_back().is_ok());
        if !goes {
            self.0.iter_mut().filter(|file| file.is_undone() && file.has_superblock()).for_each(Opened::keep);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        path::{Path, PathBuf},
        sync::Arc,
    };

    use tokio::{runtime::Builder, task::LocalSet};

    use super::{
        super::{open_files, open_files_unkept},
        *,
    };
    use crate::{
        config::{Config, DirectIo, DiskPath},
        disk::{FILE_NAME, StoreFile, recover},
        io::Files,
    };

    /// Makes a store of its files, or opens it; whether it is new.
    fn recovered(files: &[StoreFile], config: &Config) -> bool {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let recovered = LocalSet::new().block_on(&runtime, async {
            let handles = files.iter().map(|file| Arc::clone(&file.file)).collect();
            let storage = Files::by_calls(handles, 2).expect("threads");
            recover(&storage, files, config, &(), &mut |_, _| ()).await
        });
        recovered.expect("a store").is_new
    }

    /// Fails the open of a new store on two paths, after `meddle`. What a later open finds: whether the files were
    /// there, and whether the store is new.
    fn fails_then_opens(meddle: impl FnOnce(&mut Unkept, &[PathBuf; 2])) -> ([bool; 2], bool) {
        let folder = tempfile::tempdir().expect("a folder");
        let folders = ["a", "b"].map(|name| folder.path().join(name));
        folders.iter().for_each(|folder| fs::create_dir(folder).expect("a new folder"));
        let config = Config::default().block_bytes(4096).direct_io(DirectIo::Prefer);
        let config = config.disks(folders.iter().map(|folder| DiskPath::with_blocks(folder, 40)).collect());
        let paths = folders.map(|folder| folder.join(FILE_NAME));
        let (files, mut unkept) = open_files_unkept(&config).expect("new files");
        assert!(recovered(&files, &config));
        drop(files);
        meddle(&mut unkept, &paths);
        drop(unkept);
        let aside = aside(&paths[1]);
        if aside.exists() {
            fs::rename(aside, &paths[1]).expect("back in place");
        }
        let there = paths.map(|path| path.exists());
        let files = open_files(&config).expect("no path misses a part of a store");
        (there, recovered(&files, &config))
    }

    fn aside(path: &Path) -> PathBuf {
        path.with_extension("aside")
    }

    #[test]
    fn a_later_open_succeeds_whichever_files_of_a_failed_one_are_there() {
        assert_eq!(fails_then_opens(|_, _| ()), ([false, false], true));
        // The second is not removed: its path names it no longer.
        let not_removed = |_: &mut Unkept, paths: &[PathBuf; 2]| {
            fs::rename(&paths[1], aside(&paths[1])).expect("renamed");
        };
        assert_eq!(fails_then_opens(not_removed), ([false, true], true));
        // Nor is it written.
        let not_written = |unkept: &mut Unkept, paths: &[PathBuf; 2]| {
            unkept.0[1].file = File::open(&paths[1]).expect("to read").into();
        };
        assert_eq!(fails_then_opens(not_written), ([true, true], false));
    }
}

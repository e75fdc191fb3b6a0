//! Removing a store for good.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};

use super::{
    Options, Store,
    open::{Opened, Rest, Shape, geometry, open_rest, reword},
};
use crate::{
    config::DirectIo,
    disk::{
        ReadOnlyFile, cannot_change, cannot_open, check_one_name, check_writable,
        format::{HEAD_BYTES, is_zero, pair::SuperblockPair, survey::check_no_foreign_copy},
        is_held, is_missing, open_read_only,
    },
    error::{Error, Result},
};

/// Bytes of a device that are zeroed at a time.
const PART_BYTES: u64 = 1 << 30;

/// Bytes in which all file systems, volumes and partition tables begin; btrfs, for one, leaves the first 64 KiB.
const FOREIGN_BYTES: u64 = 1 << 20;

impl Store {
    /// Removes the store if `confirm` returns true: deletes its files, and zeros its superblocks, records and blocks on
    /// its devices; what lies behind them on a device stays. Returns whether it did.
    ///
    /// `confirm` gets the store's identity and geometry (`None` if it is too damaged to be opened, in part gone, or
    /// what an open left that was killed while it created the store), its files and devices, and those paths that are
    /// gone already, as after a wipe that was cut off: they have no file, or are devices of zeros, and stay as they
    /// are. Other content of a directory stays. No process can open the store meanwhile. `progress` gets the bytes of
    /// devices that are zeroed, and those of all: a device that cannot zero itself is written. How the store would be
    /// read ([`allow_in_use`](Self::allow_in_use) and the rest) does not matter here.
    ///
    /// # Errors
    /// [`Error::Store`] if the paths are not exactly those of one store, or nothing is left of it, or a process has it
    /// open; if a file has a second hard link, under which its data would stay; if another program has written over a
    /// superblock of a device; if both of a device are damaged, which say where the store ends on it. [`Error::Io`],
    /// after which a part of the store may already be gone. It can be repeated with the same paths until all is gone:
    /// superblocks go last.
    pub fn wipe(
        &self,
        confirm: impl FnOnce(Option<&Shape>, &[PathBuf], &[&Path]) -> bool,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<bool> {
        let (gone, rest): (Vec<_>, Vec<_>) = self.paths().into_iter().partition(|path| is_gone(path));
        // Where nothing is left, the open says what there is.
        let (gone, rest) = if rest.is_empty() { (rest, gone) } else { (gone, rest) };
        let rest = open_rest(&rest, gone.len(), &Options::default());
        let rest = rest.map_err(|refused| close_it(refused.error))?;
        let is_unfinished = matches!(rest, Rest::Unfinished(_));
        let (shape, files) = match rest {
            Rest::Opened(Opened::Store(store)) => (Some(store.shape), store.files),
            Rest::Opened(Opened::Lost { files, .. }) | Rest::Unfinished(files) => (None, files),
        };
        let _locks = files.iter().map(lock).collect::<Result<Vec<_>>>()?;
        let extents = files.iter().filter(|file| file.device).map(|file| Ok((file, extent(file, is_unfinished)?)));
        let extents = extents.collect::<Result<Vec<_>>>()?;
        let paths: Vec<PathBuf> = files.iter().map(|file| file.path.clone()).collect();
        if !confirm(shape.as_ref(), &paths, &gone) {
            return Ok(false);
        }
        // All, and until the end, before anything is written: they may be part of something else by now.
        let devices = extents.into_iter().map(|(file, extent)| Ok((file, extent, claim(file)?)));
        let devices = devices.collect::<Result<Vec<_>>>()?;
        let (mut done, total) = (0, devices.iter().map(|(_, extent, _)| extent).sum());
        for (file, extent, device) in &devices {
            let part = |bytes| {
                done += bytes;
                progress(done, total);
            };
            zero(device, *extent, part).map_err(|error| reword(cannot_change("zero", &file.path, error)))?;
        }
        for (file, _, device) in &devices {
            let cleared = device.write_all_at(&[0; HEAD_BYTES], 0).and_then(|()| device.sync_all());
            cleared.map_err(|error| reword(cannot_change("write", &file.path, error)))?;
        }
        files.iter().filter(|file| !file.device).try_for_each(remove)?;
        Ok(true)
    }
}

/// Whether nothing is left at a path: no file, or a device of zeros. Anything else is the open's to accept or to
/// refuse, such as a file of zeros of which a killed open was about to make a store.
fn is_gone(path: &Path) -> bool {
    if is_missing(path).unwrap_or(false) {
        return true;
    }
    let Ok(file) = open_read_only(path, DirectIo::Prefer, true) else { return false };
    if !file.device || file.in_use {
        return false;
    }
    let mut bytes = Vec::new();
    // Not by the descriptor that is open already, whose direct I/O wants aligned memory.
    let read = File::open(&file.path).and_then(|file| file.take(FOREIGN_BYTES).read_to_end(&mut bytes));
    read.is_ok() && is_zero(&bytes)
}

/// Takes the exclusive lock, which also excludes readers, and returns the descriptor that has it.
fn lock(file: &ReadOnlyFile) -> Result<File> {
    let failed = |error| Error::io("lock", &file.path, error);
    // NFS and CIFS lock exclusively by a descriptor that is open for writing only.
    let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;
    let writable = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&file.path);
    let writable = writable.map_err(|error| reword(cannot_open(&file.path, error)))?;
    let metadata = writable.metadata().map_err(|error| Error::io("stat", &file.path, error))?;
    check_writable(&file.path, &metadata).map_err(reword)?;
    check_one_name(&file.path, &metadata).map_err(reword)?;
    // The readers' lock of this process would be in the way.
    file.file.unlock().map_err(failed)?;
    match writable.try_lock() {
        Ok(()) => Ok(writable),
        Err(TryLockError::WouldBlock) => {
            let found = "a lock on it: another process is reading the store";
            Err(Error::store(&file.path, found, "a store that is not open", CLOSE))
        }
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

/// Bytes from the start of a device that are the store's; what follows them may be somebody else's. Of an `unfinished`
/// store only the superblocks were written: its record table is zeros.
fn extent(file: &ReadOnlyFile, unfinished: bool) -> Result<u64> {
    check_no_foreign_copy(&file.found()).map_err(reword)?;
    let SuperblockPair::Valid { superblock, .. } = SuperblockPair::decode(file.head()) else {
        return Err(Error::store(
            &file.path,
            "two damaged superblocks, and so nothing that says where the store ends on this device",
            "a sound superblock",
            "if all of the device may go, zero it (blkdiscard --zeroout); then wipe the rest of the store, naming this \
             path too",
        ));
    };
    let bytes = if unfinished { HEAD_BYTES as u64 } else { geometry(&superblock).bytes };
    Ok(bytes.min(file.bytes))
}

/// Opens a device that nobody else has: a lock is that of a node of it, of which a container may have its own.
fn claim(file: &ReadOnlyFile) -> Result<File> {
    let flags = libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let device = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&file.path);
    let device = device.map_err(|error| reword(cannot_open(&file.path, error)))?;
    let mut head = [0; HEAD_BYTES];
    device.read_exact_at(&mut head, 0).map_err(|error| Error::io("read", &file.path, error))?;
    if head != *file.head() {
        return Err(changed(&file.path, "other superblocks than a moment ago"));
    }
    Ok(device)
}

fn changed(path: &Path, found: &str) -> Error {
    Error::store(path, found, "a store that stays in its place", "look at it, and wipe again")
}

/// Zeros a device from behind its superblocks up to `len`; `progress` gets the bytes of each part.
fn zero(device: &File, len: u64, mut progress: impl FnMut(u64)) -> io::Result<()> {
    // A drive that frees blocks, and reads zeros then, does that in no time; the kernel writes them for any other.
    let free = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let write = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    let mut start = HEAD_BYTES as u64;
    while start < len {
        let bytes = PART_BYTES.min(len - start);
        match fallocate(device, free, start, bytes) {
            Err(Errno::OPNOTSUPP) => fallocate(device, write, start, bytes),
            freed => freed,
        }?;
        start += bytes;
        progress(bytes);
    }
    device.sync_all()
}

fn remove(file: &ReadOnlyFile) -> Result<()> {
    let path = &file.path;
    let failed = |op| move |error| Error::io(op, path, error);
    let ours = file.file.metadata().map_err(failed("stat"))?;
    let now = fs::symlink_metadata(path).map_err(failed("stat"))?;
    if (now.dev(), now.ino()) != (ours.dev(), ours.ino()) {
        return Err(changed(path, "another file than a moment ago"));
    }
    check_one_name(path, &now).map_err(reword)?;
    fs::remove_file(path).map_err(|error| reword(cannot_change("remove", path, error)))?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent).and_then(|parent| parent.sync_all()).map_err(failed("fsync the directory of"))
}

/// The fix where a store is in use.
const CLOSE: &str = "close what has it open first (lsof names it)";

/// Rewords the refusal of a store in use.
fn close_it(error: Error) -> Error {
    let is_held = is_held(&error);
    match error {
        Error::Store { path, found, expected, .. } if is_held => Error::store(path, found, expected, CLOSE),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_descriptor_that_has_the_lock_is_open_for_writing() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("store");
        fs::write(&path, [0; HEAD_BYTES]).expect("written");
        let file = open_read_only(&path, DirectIo::Prefer, false).expect("open");
        let locked = lock(&file).expect("nobody else has it");
        locked.set_len(1).expect("open for writing");
        let other = File::open(&path).expect("open");
        assert!(matches!(other.try_lock_shared(), Err(TryLockError::WouldBlock)), "it excludes readers");
        drop(locked);
        other.try_lock_shared().expect("the lock was that descriptor's");
        // A look that has begun meanwhile.
        let refused = lock(&file).expect_err("another has it");
        assert!(refused.to_string().contains("reading the store") && refused.to_string().ends_with(CLOSE), "{refused}");
    }

    #[test]
    fn only_a_store_in_use_is_to_be_closed() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("kvhoist.store");
        fs::write(&path, [0; HEAD_BYTES]).expect("written");
        let held = File::open(&path).expect("open");
        held.lock().expect("nobody has it");
        let wipe = || Store::at([&path]).wipe(|_, _, _| panic!("nobody is asked"), |_, _| {});
        let refused = wipe().expect_err("it is locked").to_string();
        assert!(refused.ends_with(CLOSE), "{refused}");
        let other = Error::store(&path, "a store with block_bytes = 4096", "block_bytes = 8192", "name every path");
        assert!(close_it(other).to_string().ends_with("; name every path"));
    }

    #[test]
    fn a_refusal_names_no_setting_of_a_cache() {
        let refused = |errno| reword(cannot_open(Path::new("a"), io::Error::from_raw_os_error(errno))).to_string();
        for errno in [libc::EROFS, libc::EACCES, libc::EBUSY, libc::ENOSPC] {
            let refused = refused(errno);
            assert!(!refused.contains("disks"), "{refused}");
        }
        assert!(refused(libc::EROFS).contains("; remount it for writing"), "{}", refused(libc::EROFS));
    }
}

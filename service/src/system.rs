//! What the service takes from the system beside its sockets: files of spaces, caches, threads, and mappings.

mod stores;
#[cfg(test)]
mod tests;

use std::{
    fs,
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    pin::Pin,
    time::Duration,
};

use kvhoist::{Cache, Config};
use rustix::{
    fs::{AtFlags, Mode, OFlags, openat, renameat, statat, unlinkat},
    io::Errno,
    process::{PidfdFlags, getpid, pidfd_open},
};
use tokio::sync::oneshot;

use super::{
    helpers,
    memory::{Mapped, map},
    peers::own_uid,
    protocol::Failure,
};

use crate::error::{Error, Result};

/// The name of a space's file, in its folder below the first path.
pub(super) const FILE_NAME: &str = "space";
/// The name that it has until it is complete.
const NEW_FILE_NAME: &str = "space.new";
/// A hundred times what its fields take.
const FILE_BYTES_MAX: u64 = 64 << 10;
pub(super) const FOLDER_PREFIX: &str = "space-";

/// How often memory is unmapped that the kernel refuses to unmap, and the pause between.
const UNMAP_TRIES: u32 = 10;
const UNMAP_PAUSE: Duration = Duration::from_secs(1);

/// The result of something that takes long.
pub type Later<T> = Pin<Box<dyn Future<Output = T>>>;

/// What there is of a space whose folders were to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Made {
    /// Its folders and its file.
    Space,
    /// Nothing new: a space that is to be new has a file already, and stores of so many bytes.
    Others(u64),
}

/// The system as the service uses it. The simulation has another one.
pub trait System {
    /// The files of the spaces below a path: where each one is, and its text, or why it cannot be read.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn spaces(&self, path: &Path) -> Result<Vec<(PathBuf, Result<String>)>>;

    /// Makes those folders of a space that are missing, and a file with `text` in the first, if there are any: where
    /// the file is missing. It is complete or absent after a crash at any moment.
    ///
    /// # Errors
    /// [`Error::Io`]. Of a new space nothing stays then.
    fn make_space(&self, folders: Vec<PathBuf>, text: String, is_new: bool) -> Later<Result<Made>>;

    /// Removes the file and the folders of a space that this service has made and could not open, but never a store.
    /// False if there is one, or may be, or the file stays: it takes its disk, and is a space at the next start.
    fn forget_space(&self, folders: Vec<PathBuf>) -> Later<bool>;

    /// What the stores in the folders of a space take, bytes; all that there are where that cannot be known.
    fn store_bytes(&self, folders: &[PathBuf]) -> u64;

    /// Removes the folders of a space with all they hold, in this order.
    fn remove_space(&self, folders: Vec<PathBuf>) -> Later<Result<()>>;

    /// Whether the cache of a space could be opened, by what is first in its stores.
    ///
    /// # Errors
    /// As those of an open.
    fn look(&self, _config: Config) -> Later<Result<()>> {
        Box::pin(async { Ok(()) })
    }

    /// Opens the cache of a space.
    fn open_cache(&self, config: Config) -> Later<Result<Cache>>;

    /// Runs work that takes long on another thread. Where none can be started, on one that there is.
    fn run(&self, work: Box<dyn FnOnce() + Send>);

    /// Maps a range of a client's memfd, guarded.
    ///
    /// # Errors
    /// As [`map`].
    fn map(&self, fd: &OwnedFd, offset: u64, len: u64) -> Result<Mapped, Failure>;

    /// A descriptor that is readable once this process has ended, with all that its devices do; `None` where nothing
    /// but its own thread moves blocks.
    ///
    /// # Errors
    /// The system's.
    fn process(&self) -> io::Result<Option<OwnedFd>> {
        Ok(None)
    }

    /// Unmaps memory of a client. The future is polled to its end.
    ///
    /// # Safety
    /// The range is a whole mapping that the service has made; nothing uses it any longer, and nothing will.
    unsafe fn unmap(&self, start: *mut u8, len: usize) -> Later<()>;
}

/// Runs work on another thread; `None` if it panicked.
pub(super) async fn on_thread<T: Send + 'static>(
    system: &dyn System,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (ended, end) = oneshot::channel();
    system.run(Box::new(move || drop(ended.send(work()))));
    end.await.ok()
}

/// This machine. Used in a tokio runtime.
pub(super) struct Machine;

impl Machine {
    /// With a thread for work that takes long.
    ///
    /// # Errors
    /// [`Error::Io`] where the system starts none.
    pub(super) fn start() -> Result<Self> {
        helpers::start().map_err(|error| Error::io("start a thread of", "the service", error))?;
        Ok(Machine)
    }
}

impl System for Machine {
    fn spaces(&self, path: &Path) -> Result<Vec<(PathBuf, Result<String>)>> {
        let entries = fs::read_dir(path).map_err(|error| Error::io("open", path, error))?;
        let mut files = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|error| Error::io("read", path, error))?;
            if !entry.file_name().to_string_lossy().starts_with(FOLDER_PREFIX) {
                continue;
            }
            let path = entry.path();
            let own = is_own_folder(&path);
            if let Ok(false) = own {
                tracing::warn!(path = %path.display(), "a link or another user's folder is not served");
                continue;
            }
            let text = own.and_then(|_| find_folder(&path)).and_then(|(folder, found)| {
                let text = read_whole(&folder)?;
                check_writers(&found).map(|()| text)
            });
            match text {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                text => {
                    let file = path.join(FILE_NAME);
                    let text = text.map_err(|error| Error::io("read", &file, error));
                    files.push((file, text));
                }
            }
        }
        Ok(files)
    }

    fn make_space(&self, folders: Vec<PathBuf>, text: String, is_new: bool) -> Later<Result<Made>> {
        let make = move || make_folders(&folders, &text, is_new);
        Box::pin(async { on_thread(&Machine, make).await.unwrap_or(Err(Error::Closed)) })
    }

    fn forget_space(&self, folders: Vec<PathBuf>) -> Later<bool> {
        let forget = move || forget_folders(&folders);
        Box::pin(async { on_thread(&Machine, forget).await.unwrap_or(false) })
    }

    fn store_bytes(&self, folders: &[PathBuf]) -> u64 {
        stores::bytes(folders)
    }

    fn remove_space(&self, folders: Vec<PathBuf>) -> Later<Result<()>> {
        let remove = move || folders.iter().try_for_each(|folder| remove_folder(folder));
        Box::pin(async { on_thread(&Machine, remove).await.unwrap_or(Err(Error::Closed)) })
    }

    fn look(&self, config: Config) -> Later<Result<()>> {
        Box::pin(async { on_thread(&Machine, move || stores::look(&config)).await.unwrap_or(Ok(())) })
    }

    fn open_cache(&self, config: Config) -> Later<Result<Cache>> {
        Box::pin(Cache::open(config))
    }

    fn run(&self, work: Box<dyn FnOnce() + Send>) {
        helpers::run(work);
    }

    fn map(&self, fd: &OwnedFd, offset: u64, len: u64) -> Result<Mapped, Failure> {
        map(fd, offset, len)
    }

    fn process(&self) -> io::Result<Option<OwnedFd>> {
        Ok(Some(pidfd_open(getpid(), PidfdFlags::empty())?))
    }

    unsafe fn unmap(&self, start: *mut u8, len: usize) -> Later<()> {
        let start = start.expose_provenance();
        let unmap = move || {
            // SAFETY: the caller promises that it is a mapping of this length which is in use nowhere.
            let refused = unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(start), len) };
            if refused == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
        };
        // Large mappings take long.
        Box::pin(async move {
            for _ in 0..UNMAP_TRIES {
                match on_thread(&Machine, unmap).await.unwrap_or(Ok(())) {
                    Ok(()) => return,
                    // A mapping that the kernel has joined with another is divided first, which takes one more.
                    Err(error) => tracing::warn!(%error, len, "a client's memory is not unmapped yet"),
                }
                tokio::time::sleep(UNMAP_PAUSE).await;
            }
            tracing::error!(len, "a client's memory could not be unmapped; it counts against the limits no longer");
        })
    }
}

/// Makes the folders of a space that are missing, and its file.
fn make_folders(folders: &[PathBuf], text: &str, is_new: bool) -> Result<Made> {
    let make = |path: &PathBuf| {
        match fs::DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.map_err(|error| Error::io("create", path, error))?,
        }
        open_folder(path).map_err(|error| Error::io("open", path, error))
    };
    let Some((path, others)) = folders.split_first() else { return Ok(Made::Space) };
    let folder = make(path)?;
    // A removal that failed in the end may have removed it.
    let is_missing = match statat(&folder, FILE_NAME, AtFlags::SYMLINK_NOFOLLOW) {
        Err(error) if error == Errno::NOENT => true,
        found => found.map(|_| false).map_err(|error| Error::io("stat", path.join(FILE_NAME), error.into()))?,
    };
    if is_new && !is_missing {
        // They have the capacity that this file names.
        return Ok(Made::Others(stores::bytes(folders)));
    }
    let write = || {
        let written = write_whole(&folder, text.as_bytes());
        let written = written.and_then(|()| path.parent().map_or(Ok(()), sync_folder));
        if is_new && written.is_err() {
            _ = unlinkat(&folder, FILE_NAME, AtFlags::empty());
        }
        written.map_err(|error| Error::io("write", path.join(FILE_NAME), error))
    };
    let made = others.iter().try_for_each(|path| make(path).map(drop));
    let made = made.and_then(|()| if is_missing { write() } else { Ok(()) });
    if is_new && made.is_err() {
        folders.iter().for_each(|path| drop(fs::remove_dir(path)));
    }
    made.map(|()| Made::Space)
}

/// Removes the file and the folders of a space that was made, unless there is a store in one of them, or one cannot be
/// looked into, or the file stays.
fn forget_folders(folders: &[PathBuf]) -> bool {
    if folders.iter().any(|path| !matches!(stores::find(path), Ok(None))) {
        return false;
    }
    let Some(first) = folders.first() else { return true };
    let removed = open_folder(first).and_then(|folder| Ok(unlinkat(folder, FILE_NAME, AtFlags::empty())?));
    let is_gone = match removed {
        Ok(()) => true,
        // No space has its file below a link.
        Err(error) => matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
    };
    // As far as they are empty.
    folders.iter().for_each(|path| drop(fs::remove_dir(path)));
    is_gone
}

/// Whether a folder of the service's user is there, and no link and no other user's, which whoever may write to the
/// path can make: that takes no disk of the spaces.
fn is_own_folder(path: &Path) -> io::Result<bool> {
    let found = fs::symlink_metadata(path)?;
    Ok(found.is_dir() && found.uid() == own_uid())
}

/// Opens a folder, and no link, which others who may write to the path may have put in its place.
fn find_folder(path: &Path) -> io::Result<(fs::File, fs::Metadata)> {
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let opened = fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
    let folder = opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotADirectory => {
            let text = "found a link or a file, expected the folder of a space; remove it, or move it away";
            io::Error::new(error.kind(), text)
        }
        _ => error,
    })?;
    let found = folder.metadata()?;
    Ok((folder, found))
}

/// Opens a folder of a space.
fn open_folder(path: &Path) -> io::Result<fs::File> {
    let (folder, found) = find_folder(path)?;
    check_writers(&found).map(|()| folder)
}

/// Refuses a folder that another user may write to, who would put links in it.
fn check_writers(found: &fs::Metadata) -> io::Result<()> {
    let own = own_uid();
    if found.uid() == own && found.mode() & 0o022 == 0 {
        return Ok(());
    }
    let (owner, mode) = (found.uid(), found.mode() & 0o777);
    let text = format!(
        "found a folder of user {owner} and of mode {mode:o}, expected one of the service's user, {own}, to which \
         nobody else may write; remove it, move it away, or correct its owner and mode"
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

/// Removes a folder of a space for good, the file that makes it one last: until then it is known, with the disk of its
/// stores.
fn remove_folder(path: &Path) -> Result<()> {
    let remove = || {
        let (folder, _) = match find_folder(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        // This very folder, whatever takes its name meanwhile.
        for entry in fs::read_dir(format!("/proc/self/fd/{}", folder.as_raw_fd()))? {
            let entry = entry?;
            let removed = match entry.file_type()?.is_dir() {
                true => fs::remove_dir_all(entry.path()),
                false if entry.file_name() != FILE_NAME => fs::remove_file(entry.path()),
                false => Ok(()),
            };
            // Another may remove them too.
            removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })?;
        }
        folder.sync_all()?;
        fs::remove_dir_all(path)?;
        path.parent().map_or(Ok(()), sync_folder)
    };
    remove().map_err(|error| Error::io("remove", path, error))
}

fn sync_folder(path: &Path) -> io::Result<()> {
    fs::File::open(path)?.sync_all()
}

/// Opens a file in a folder of a space, and no link.
fn open_in(folder: &fs::File, name: &str, flags: OFlags) -> io::Result<fs::File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(folder, name, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// Writes the file of a space: complete or absent after a crash at any moment.
fn write_whole(folder: &fs::File, bytes: &[u8]) -> io::Result<()> {
    // A crash may have left one.
    match unlinkat(folder, NEW_FILE_NAME, AtFlags::empty()) {
        Err(error) if error != Errno::NOENT => return Err(error.into()),
        _ => {}
    }
    let mut file = open_in(folder, NEW_FILE_NAME, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    renameat(folder, NEW_FILE_NAME, folder, FILE_NAME)?;
    folder.sync_all()
}

/// Reads the file of a space.
fn read_whole(folder: &fs::File) -> io::Result<String> {
    // A pipe would wait for a writer.
    let file = open_in(folder, FILE_NAME, OFlags::RDONLY | OFlags::NONBLOCK)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "found no regular file"));
    }
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

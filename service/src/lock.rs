//! The files whose locks a service holds: one at its socket, one below each path.

use std::{
    fs::{self, File, Metadata, OpenOptions, TryLockError},
    io::{self, Read},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt, OpenOptionsExt},
    },
    path::{self, Path, PathBuf},
};

use kvhoist::internals::disk::cannot_open;

use crate::{
    error::{Error, Result},
    peers::own_uid,
};

/// The longest path of a socket that is read in a lock's file.
const SOCKET_BYTES_MAX: u64 = 4096;

/// A file that is locked until it is dropped. A service that is refused removes it again.
#[derive(Debug)]
pub(super) struct ServiceLock {
    file: File,
    path: PathBuf,
    is_kept: bool,
}

impl ServiceLock {
    /// Takes the lock of a service that listens at `socket`; `of` is what it is for. `None` where the file system is
    /// read-only and has no such file, of a lock that is not `needed`.
    ///
    /// # Errors
    /// [`Error::Store`] if another service has it, or there is no regular file, or none may be made; [`Error::Io`].
    pub(super) fn take(path: PathBuf, of: &Path, socket: &Path, needed: bool) -> Result<Option<Self>> {
        loop {
            let existed = fs::symlink_metadata(&path).is_ok();
            let Some(Opened { file, found, is_writable }) = open(&path, of, needed)? else { return Ok(None) };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(held(&file, of, is_writable)),
                Err(TryLockError::Error(error)) => return Err(Error::io("lock", path, error)),
            }
            // Whoever was refused meanwhile has removed the file: the next one would lock another.
            if fs::symlink_metadata(&path).is_ok_and(|now| is_same(&now, &found)) {
                // For who is refused; the lock needs neither room for it nor the right to write. Another name of the
                // file, or another owner, would make it a file that is no lock's.
                if is_writable && found.nlink() == 1 && found.uid() == own_uid() {
                    let socket = path::absolute(socket).unwrap_or_else(|_| socket.to_owned());
                    drop(file.set_len(0).and_then(|()| file.write_all_at(socket.as_os_str().as_bytes(), 0)));
                }
                return Ok(Some(ServiceLock { file, path, is_kept: existed }));
            }
        }
    }

    /// The service runs: its file stays.
    pub(super) fn keep(&mut self) {
        self.is_kept = true;
    }
}

impl Drop for ServiceLock {
    fn drop(&mut self) {
        let is_ours = || is_same(&fs::symlink_metadata(&self.path).ok()?, &self.file.metadata().ok()?).then_some(());
        if !self.is_kept && is_ours().is_some() {
            drop(fs::remove_file(&self.path));
        }
    }
}

/// Why a service is refused that another one is in the way of, which has written into its lock's file where it listens.
/// Where the file system is read-only that service may not have written, but an earlier one.
fn held(file: &File, of: &Path, is_writable: bool) -> Error {
    let mut socket = Vec::new();
    let read = file.take(SOCKET_BYTES_MAX).read_to_end(&mut socket);
    let listens = if is_writable { "listens" } else { "may listen" };
    let found = match read {
        Ok(1..) => {
            format!("another service's, which {listens} at {}", String::from_utf8_lossy(&socket).escape_debug())
        }
        _ => "another service's".into(),
    };
    Error::store(of, found, "one that no service has", "use that service, or end it")
}

/// The file of a lock.
struct Opened {
    file: File,
    found: Metadata,
    is_writable: bool,
}

/// The file of a lock, made where there is none; `None` where a read-only file system has none that is `needed`.
fn open(path: &Path, of: &Path, needed: bool) -> Result<Option<Opened>> {
    let mut options = OpenOptions::new();
    // A link, a pipe or a device that another user has put there is not followed, waited for, or locked.
    options.read(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let mut is_writable = true;
    let opened = match options.clone().create(true).write(true).truncate(false).open(path) {
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem && !needed => match options.open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => {
                is_writable = false;
                opened
            }
        },
        opened => opened,
    };
    let file = opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let parent = path.parent().unwrap_or(path).display();
            let todo = "create it (mkdir), or name another place";
            Error::store(of, format!("no folder {parent} that takes files"), "a folder that exists", todo)
        }
        _ => cannot_open(path, error).with_settings_named(&[("disks", "paths")]),
    })?;
    let found = file.metadata().map_err(|error| Error::io("stat", path, error))?;
    match found.is_file() {
        true => Ok(Some(Opened { file, found, is_writable })),
        false => Err(Error::store(path, "a file that is no regular one", "a service's lock", "remove it")),
    }
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_no_link_and_no_pipe() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        let take = |name: &str| ServiceLock::take(path(name), &path("s"), &path("s"), true);
        take("good").expect("a new one").expect("needed");
        std::os::unix::fs::symlink(path("elsewhere"), path("link")).expect("a link");
        take("link").expect_err("a link is not followed");
        assert!(!path("elsewhere").exists(), "nothing is made where a link points to");
        let name = std::ffi::CString::new(path("pipe").into_os_string().into_encoded_bytes()).expect("no zero");
        // SAFETY: plain system call; the name outlives it.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        take("pipe").expect_err("a pipe is not waited for");
    }

    #[test]
    fn only_a_service_that_was_refused_removes_what_it_made() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("lock");
        let take = |socket: &str| {
            let taken = ServiceLock::take(path.clone(), directory.path(), Path::new(socket), true);
            taken.map(|lock| lock.expect("needed"))
        };
        fs::write(&path, "/run/an earlier one with a longer name").expect("written");
        let earlier = take("/run/s").expect("free");
        let refused = take("/run/t").expect_err("held").to_string();
        assert!(refused.contains("another service's, which listens at /run/s, expected"), "{refused}");
        fs::write(&path, "/run/\u{1b}[2J\n".repeat(4096)).expect("written");
        let refused = take("/run/t").expect_err("held").to_string();
        assert!(refused.contains(r"at /run/\u{1b}[2J\n/run/") && refused.len() < 16_384, "{refused}");
        drop(earlier);
        fs::write(&path, "not a lock's alone").expect("written");
        fs::hard_link(&path, directory.path().join("also")).expect("a link");
        drop(take("/run/s").expect("free"));
        assert_eq!(fs::read_to_string(&path).expect("there"), "not a lock's alone");
        fs::remove_file(&path).expect("it was there before");
        let take = || take("s");
        let held = take().expect("free");
        take().expect_err("held");
        assert!(path.exists(), "the holder's file is left alone");
        drop(held);
        assert!(!path.exists(), "nothing is left behind");
        let mut held = take().expect("free");
        held.keep();
        drop(held);
        assert!(path.exists(), "that of a service that ran");
        drop(take().expect("free again"));
        assert!(path.exists(), "that of an earlier service");
    }
}

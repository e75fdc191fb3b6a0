//! The files whose locks a service holds: one at its socket, one below each path.

use std::{
    fs::{self, File, Metadata, OpenOptions, TryLockError},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use crate::error::{Error, Result};

/// A file that is locked until it is dropped. A service that is refused removes it again.
#[derive(Debug)]
pub(super) struct ServiceLock {
    file: File,
    path: PathBuf,
    is_kept: bool,
}

impl ServiceLock {
    /// Takes the lock of a service; `of` is what it is for.
    ///
    /// # Errors
    /// [`Error::Store`] if another service has it, or there is no regular file; [`Error::Io`].
    pub(super) fn take(path: PathBuf, of: &Path) -> Result<Self> {
        loop {
            let existed = fs::symlink_metadata(&path).is_ok();
            let (file, found) = open(&path, of)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let todo = "use that service, or end it";
                    return Err(Error::store(of, "another service's", "one that no service has", todo));
                }
                Err(TryLockError::Error(error)) => return Err(Error::io("lock", path, error)),
            }
            // Whoever was refused meanwhile has removed the file: the next one would lock another.
            if fs::symlink_metadata(&path).is_ok_and(|now| is_same(&now, &found)) {
                return Ok(ServiceLock { file, path, is_kept: existed });
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

fn open(path: &Path, of: &Path) -> Result<(File, Metadata)> {
    // A link, a pipe or a device that another user has put there is not followed, waited for, or locked.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let opened = OpenOptions::new().create(true).write(true).truncate(false).mode(0o600).custom_flags(flags).open(path);
    let file = opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let parent = path.parent().unwrap_or(path).display();
            let todo = "create it (mkdir), or name another place";
            Error::store(of, format!("no folder {parent} that takes files"), "a folder that exists", todo)
        }
        _ => Error::io("open", path, error),
    })?;
    let found = file.metadata().map_err(|error| Error::io("stat", path, error))?;
    match found.is_file() {
        true => Ok((file, found)),
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
        let take = |name: &str| ServiceLock::take(path(name), &path("s"));
        take("good").expect("a new one");
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
        let take = || ServiceLock::take(path.clone(), directory.path());
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

//! The lock of a store: one writer, or several readers.

use std::{
    fs::{File, TryLockError},
    io,
    path::Path,
    process,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::path::{self, Opened};
use crate::error::{Error, Result};

/// How long a reader waits for the lock, and how often an open retries.
const WAIT: Duration = Duration::from_secs(1);
pub(super) const POLL: Duration = Duration::from_millis(5);

/// What is found where the store is open elsewhere.
const HELD: &str = "a lock on it: the store is open in another process, or a second time in this one";

/// Whether an open was refused because the store is open elsewhere.
pub(crate) fn is_held(error: &Error) -> bool {
    matches!(error, Error::Store { found, .. } if found == HELD)
}

/// A lock on an open file, held until this is dropped.
///
/// `flock` locks the open file description, which a forked child shares: closing only the parent's descriptor would
/// leave the store locked while the child lives.
#[derive(Debug)]
pub(super) struct Lock {
    file: Arc<File>,
    process: u32,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // A child must not release its parent's lock. If another clone of the file is open, the lock stays until that
        // is closed.
        if self.process == process::id() && Arc::strong_count(&self.file) == 1 {
            // If unlocking fails, the last close releases the lock.
            drop(self.file.unlock());
        }
    }
}

/// Opens the configured path, creates a missing file, and waits for the exclusive lock for as long as `wait`.
///
/// Retries if the path names another file once the lock is held: the process that created this file may have been
/// refused and have removed it.
pub(super) fn open_exclusive(configured: &Path, wait: Duration) -> Result<Opened> {
    let give_up = Instant::now() + wait;
    loop {
        if let Some(mut opened) = path::open(configured, give_up)?
            && take(&mut opened, File::try_lock, give_up)?
        {
            return Ok(opened);
        }
        if Instant::now() >= give_up {
            return Err(replaced(configured));
        }
    }
}

/// Waits for the shared lock of readers.
pub(super) fn shared(opened: &mut Opened) -> Result<()> {
    if take(opened, File::try_lock_shared, Instant::now() + WAIT)? { Ok(()) } else { Err(replaced(&opened.path)) }
}

/// Takes the lock with `try_lock`. False if the path no longer names the locked file.
///
/// After a crash the kernel ends a killed process's I/O, and releases its lock, shortly after the process is gone: an
/// immediate restart waits for that instead of failing.
fn take(
    opened: &mut Opened,
    try_lock: fn(&File) -> std::result::Result<(), TryLockError>,
    give_up: Instant,
) -> Result<bool> {
    loop {
        match try_lock(&opened.file) {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if Instant::now() < give_up => thread::sleep(POLL),
            Err(TryLockError::WouldBlock) => {
                return Err(Error::store(
                    opened.path.clone(),
                    HELD,
                    "a store that is not open",
                    "close the other cache first, or choose another path in `disks`",
                ));
            }
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(TryLockError::Error(error)) => return Err(Error::io("lock", &opened.path, error)),
        }
    }
    opened.locked(Lock { file: Arc::clone(&opened.file), process: process::id() });
    opened.is_in_place()
}

fn replaced(path: &Path) -> Error {
    Error::store(
        path,
        "a file that was removed or replaced while it was opened",
        "a file that stays in its place",
        "open again",
    )
}

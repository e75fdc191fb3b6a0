//! The lock of a store: one process writes, or several look.

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

/// How long the lock of a store is waited for, and how often it is tried.
const WAIT: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(5);

/// A lock on an open file, held until this is dropped.
///
/// `flock` locks the open file, which a forked child shares: closing the parent's descriptor alone would leave the
/// store locked for as long as the child lives.
#[derive(Debug)]
pub(super) struct Lock {
    file: Arc<File>,
    process: u32,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // A child must not release its parent's lock. Where somebody still has the file, the lock goes with it.
        if self.process == process::id() && Arc::strong_count(&self.file) == 1 {
            // What cannot be unlocked is unlocked by the last close.
            drop(self.file.unlock());
        }
    }
}

/// Who else may have the store open.
#[derive(Debug, Clone, Copy)]
enum Hold {
    /// Nobody.
    Exclusive,
    /// Those who only read.
    Shared,
}

/// Opens what is configured, creates a file that is missing, and waits for the exclusive lock.
///
/// Opens again where the path came to name another file meanwhile: another process may have been refused and removed
/// the file that it had created.
pub(super) fn open_exclusive(configured: &Path) -> Result<Opened> {
    let give_up = Instant::now() + WAIT;
    loop {
        if let Some(mut opened) = path::open(configured)?
            && take(&mut opened, Hold::Exclusive, give_up)?
        {
            return Ok(opened);
        }
        if Instant::now() >= give_up {
            return Err(replaced(configured));
        }
    }
}

/// Waits for the lock that those who only read share.
pub(super) fn shared(opened: &mut Opened) -> Result<()> {
    if take(opened, Hold::Shared, Instant::now() + WAIT)? { Ok(()) } else { Err(replaced(&opened.path)) }
}

/// Takes the lock. False where the path no longer names the file that was locked.
///
/// The kernel ends the I/O of a killed process, and with it its lock, a little after the process
/// is gone: a restart right after a crash waits for that instead of failing.
fn take(opened: &mut Opened, hold: Hold, give_up: Instant) -> Result<bool> {
    loop {
        let taken = match hold {
            Hold::Exclusive => opened.file.try_lock(),
            Hold::Shared => opened.file.try_lock_shared(),
        };
        match taken {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if Instant::now() < give_up => thread::sleep(POLL),
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Store {
                    path: opened.path.clone(),
                    found: "a lock on it: the store is open in another process, or a second time in this one".into(),
                    expected: "a store that nobody has open".into(),
                    action: "close the other cache first, or choose another path in `disks`".into(),
                });
            }
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(TryLockError::Error(error)) => return Err(Error::io("lock", &opened.path, error)),
        }
    }
    opened.locked(Lock { file: Arc::clone(&opened.file), process: process::id() });
    opened.is_in_place()
}

fn replaced(path: &Path) -> Error {
    Error::Store {
        path: path.into(),
        found: "another file than a moment ago: it was removed or replaced while it was opened".into(),
        expected: "a file that stays in its place".into(),
        action: "open again".into(),
    }
}

//! [`FileClient`]: files that the service of this node holds in memory, for readers of whole files.

mod line;
#[cfg(test)]
mod tests;

use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{PathBuf, absolute},
    ptr::{NonNull, null_mut},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kvhoist::internals::service::Home;
use kvhoist_files::{Arrival, SourceFile};
use rustix::{
    fs::{SealFlags, fcntl_get_seals, fstat},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

use self::line::Line;
use super::{
    held::memory::{HEARTBEAT_BYTES, NEVER, PAGE_BYTES, arrived_at, memory_bytes},
    protocol::{PATH_BYTES_MAX, Reply, Request},
    query::{greet, unexpected},
};
use crate::error::{Error, Result, ServiceFault};

/// How long the service may take to answer, and a file to grow: it is read by its reader itself after that.
const PATIENCE: Duration = Duration::from_secs(10);
/// What arrives in a microsecond where drives are fast: who waits for more sleeps as long as that takes.
const BYTES_PER_US: u64 = 16_000;
const SLEEP_US: (u64, u64) = (250, 10_000);

/// A connection to a node's service for files: the service reads each file once for all of its clients, and holds it in
/// memory while one of them reads it, or longer.
///
/// Cheap to clone. Usable from any thread; a forked child cannot use it. A file that the service cannot hold, or no
/// longer, is read from its drive: nothing fails for want of the service but [`connect`](Self::connect) and
/// [`hold`](Self::hold).
#[derive(Clone)]
pub struct FileClient(Arc<Inner>);

struct Inner {
    line: Line,
    next_id: AtomicU64,
    home: Home,
}

impl FileClient {
    /// Connects to the service at `socket`. Blocks the thread if the service hangs: for at most 10 s until it accepts
    /// the connection, and 10 s until it answers.
    ///
    /// # Errors
    /// As [`status`](crate::status).
    pub fn connect(socket: impl Into<PathBuf>) -> Result<Self> {
        let path = socket.into();
        let stream = greet(&path)?;
        Ok(FileClient::of(Line::new(path, stream, PATIENCE)))
    }

    fn of(line: Line) -> Self {
        FileClient(Arc::new(Inner { line, next_id: AtomicU64::new(1), home: Home::here() }))
    }

    /// The file, whose bytes are read from the service's memory as far as they are there. With `keep` they stay when
    /// nobody reads them any more, until the service needs the memory.
    ///
    /// The service lets go of the file when the last clone of the returned one is dropped, or this process ends. Blocks
    /// the thread while the service opens the file, and those that other threads want before, for at most 10 s in all.
    /// A connection that breaks is of no use any more: later holds return the same error at once.
    ///
    /// # Errors
    /// [`Error::Service`]: [`ServiceFault::Capacity`] without room in the service's host memory, [`ServiceFault::Busy`]
    /// for too many files that are held, or open in this process,
    /// [`ServiceFault::Argument`] for a path that is another file there, and for a file whose changes are not all
    /// stamped (on tmpfs, a block device), [`ServiceFault::Permission`] for a service of another user,
    /// [`ServiceFault::Away`], [`ServiceFault::Timeout`]. [`Error::Argument`] for an empty file, or a path that is too
    /// long or not UTF-8. [`Error::Closed`] in a forked child.
    pub fn hold(&self, file: &SourceFile, keep: bool) -> Result<SourceFile> {
        let inner = &*self.0;
        if !inner.home.is_here() {
            return Err(Error::Closed);
        }
        let identity = file.identity();
        let path = absolute(file.path()).ok().and_then(|path| path.into_os_string().into_string().ok());
        let path = path.filter(|path| path.len() <= PATH_BYTES_MAX && identity.size > 0).ok_or_else(|| {
            let found = format!("{} bytes at {}", identity.size, file.path().display());
            Error::argument(
                "file",
                found,
                format!("a file of a byte or more, with a path in UTF-8 of {PATH_BYTES_MAX}"),
            )
        })?;
        let request = Request::Hold {
            keep,
            device: identity.device,
            inode: identity.inode,
            size: identity.size,
            changed_s: identity.changed_s.cast_unsigned(),
            changed_ns: identity.changed_ns.cast_unsigned(),
            path,
        };
        let hold = inner.next_id.fetch_add(1, Ordering::Relaxed);
        let memory = match inner.line.ask(hold, &request)? {
            (Reply::Held, Some(memory)) => memory,
            (Reply::Held, None) => {
                inner.line.let_go(hold);
                let text = "file: found no descriptor with the file, expected one: raise `ulimit -n` of this process";
                return Err(Error::service(ServiceFault::Busy, text));
            }
            (Reply::Failed(failure), _) => return Err(failure.into()),
            (other, _) => return Err(unexpected(&other)),
        };
        // From here on the drop lets go.
        let held = Held { client: Arc::clone(&self.0), hold, page: None, is_lost: AtomicBool::new(false) };
        let held = held.map(&memory, identity.size)?;
        Ok(file.with_copy(File::from(memory), held))
    }
}

debug_fields!(FileClient, client => socket: client.0.line.path());

/// A file in the service's memory.
struct Held {
    client: Arc<Inner>,
    /// The request that holds it.
    hold: u64,
    /// The page that says how far it is read, and whether its turn will come.
    page: Option<NonNull<u8>>,
    /// The service is gone, or hangs: what has not arrived will not.
    is_lost: AtomicBool,
}

// SAFETY: the page is a mapping, which is the same on every thread, and read as an atomic number only.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

impl Held {
    fn map(mut self, memory: &OwnedFd, size: u64) -> Result<Self> {
        let wrong = |error: io::Error| self.client.line.lost(&error);
        let found = fstat(memory).map_err(|error| wrong(error.into()))?.st_size.cast_unsigned();
        let seals = fcntl_get_seals(memory).map_err(|error| wrong(error.into()))?;
        if found != memory_bytes(size) || !seals.contains(SealFlags::SHRINK | SealFlags::FUTURE_WRITE) {
            let text = format!("{found} bytes of memory, sealed by {seals:?}");
            return Err(wrong(io::Error::new(io::ErrorKind::InvalidData, text)));
        }
        // SAFETY: a new mapping at an address of the kernel's choice, of memory that is sealed against shrinking.
        let page = unsafe {
            mmap(null_mut(), PAGE_BYTES as usize, ProtFlags::READ, MapFlags::SHARED, memory, arrived_at(size))
        };
        self.page = NonNull::new(page.map_err(|error| wrong(error.into()))?.cast());
        Ok(self)
    }

    fn arrived(&self) -> u64 {
        self.number(0)
    }

    fn number(&self, at: u64) -> u64 {
        let Some(page) = self.page else { return NEVER };
        // SAFETY: the mapping, which stays until the drop; the service writes to it as an atomic number too.
        unsafe { AtomicU64::from_ptr(page.as_ptr().add(at as usize).cast()) }.load(Ordering::Acquire)
    }
}

impl Arrival for Held {
    fn wait(&self, end: u64, given_up: &AtomicBool) -> bool {
        let (mut seen, mut since) = ((0, 0), Instant::now());
        loop {
            let (arrived, heartbeat) = (self.arrived(), self.number(HEARTBEAT_BYTES));
            if arrived == NEVER || arrived >= end {
                return arrived != NEVER;
            }
            if self.is_lost.load(Ordering::Relaxed) || given_up.load(Ordering::Relaxed) {
                return false;
            }
            if (arrived, heartbeat) != seen {
                (seen, since) = ((arrived, heartbeat), Instant::now());
            }
            if self.client.line.is_over() || since.elapsed() > PATIENCE {
                self.is_lost.store(true, Ordering::Relaxed);
                // What came just before the hang-up is there.
                return self.arrived() != NEVER && self.arrived() >= end;
            }
            let us = ((end - arrived) / BYTES_PER_US).clamp(SLEEP_US.0, SLEEP_US.1);
            thread::sleep(Duration::from_micros(us));
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(page) = self.page {
            // SAFETY: the mapping, which nobody uses any more.
            _ = unsafe { munmap(page.as_ptr().cast(), PAGE_BYTES as usize) };
        }
        // The connection, and maybe its lock, is the parent's.
        if self.client.home.is_here() {
            self.client.line.let_go(self.hold);
        }
    }
}

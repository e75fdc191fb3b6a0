//! The reactor's runtime: a ring where the kernel gives one, a plain current-thread runtime else.

use std::{fs::File, future::Future, io, sync::Arc};

use tokio::task::LocalSet;

use super::io::{
    AnyStorage,
    blocking::Blocking,
    uring::{self, Uring},
};
use crate::{
    config::{Config, StorageKind},
    error::{Error, Result},
    memory::Arena,
};

/// Operations that the ring takes at once. The byte budgets are what bounds the disk's load.
const RING_ENTRIES: u32 = 1024;

/// File descriptors that a runtime with a ring takes: the ring, epoll, the wake-up, and tokio's pair for signals.
const DESCRIPTORS: usize = 12;

/// Has writes past `RLIMIT_FSIZE` fail with `EFBIG` on this thread and those that it starts, instead of ending the
/// process: the limit may be lowered when the store is open. The rest of the process keeps its disposition.
pub(crate) fn refuse_size_signal() {
    let mut signals = std::mem::MaybeUninit::uninit();
    // SAFETY: the set is initialized by the first call, and read by the others; the mask is this thread's own.
    let refused = unsafe {
        libc::sigemptyset(signals.as_mut_ptr());
        libc::sigaddset(signals.as_mut_ptr(), libc::SIGXFSZ);
        libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), std::ptr::null_mut())
    };
    assert_eq!(refused, 0, "a signal of every system");
}

/// What runs the reactor's tasks.
pub(crate) enum Reactor {
    Uring(uring::Runtime),
    Plain(tokio::runtime::Runtime),
}

impl Reactor {
    /// Picks the runtime that `config` wants, on the thread that will run it.
    pub(crate) fn new(config: &Config) -> Result<Self> {
        let wants_ring = match config.storage {
            StorageKind::Blocking => false,
            StorageKind::Uring => true,
            StorageKind::Auto => !config.disks.is_empty(),
        };
        if wants_ring {
            check_descriptors()?;
            match uring::runtime(RING_ENTRIES) {
                Ok(runtime) => return Ok(Reactor::Uring(runtime)),
                Err(error) if config.storage == StorageKind::Uring => {
                    return Err(Error::Config {
                        field: "storage",
                        found: format!("uring, and a system that refuses it ({error})"),
                        expected: "a system with io_uring, or storage = auto or blocking".into(),
                    });
                }
                Err(error) => tracing::warn!(
                    %error,
                    threads = config.blocking_threads,
                    "io_uring is refused; the disk tier is served by threads that call pread and pwrite"
                ),
            }
        }
        let mut builder = tokio::runtime::Builder::new_current_thread();
        if config.device_blocks > 0 {
            // An RDMA device tells of its completions by a descriptor.
            check_descriptors()?;
            builder.enable_io();
        }
        let runtime = builder.enable_time().build();
        runtime.map(Reactor::Plain).map_err(|source| Error::io("start a runtime", "", source))
    }

    /// The storage engine that goes with the runtime. Call inside [`block_on`](Reactor::block_on).
    pub(crate) fn storage(&self, files: Vec<Arc<File>>, arena: &Arc<Arena>, threads: usize) -> io::Result<AnyStorage> {
        match self {
            Reactor::Uring(_) => {
                let regions = arena.chunks().to_vec();
                // SAFETY: the chunks are the arena's for all its life, and the arena is what is kept.
                unsafe { Uring::new(files, regions, Arc::clone(arena) as _) }.map(AnyStorage::Uring)
            }
            Reactor::Plain(_) => Self::pool(files, threads),
        }
    }

    /// The same without an arena: for buffers that come and go.
    pub(crate) fn storage_unregistered(&self, files: Vec<Arc<File>>, threads: usize) -> io::Result<AnyStorage> {
        match self {
            Reactor::Uring(_) => {
                // SAFETY: there is no region that would have to stay mapped.
                unsafe { Uring::new(files, Vec::new(), Arc::new(())) }.map(AnyStorage::Uring)
            }
            Reactor::Plain(_) => Self::pool(files, threads),
        }
    }

    fn pool(files: Vec<Arc<File>>, threads: usize) -> io::Result<AnyStorage> {
        // Without files nothing will ever be asked of the threads.
        let threads = if files.is_empty() { 1 } else { threads };
        Blocking::new(files, threads).map(AnyStorage::Blocking)
    }

    /// Runs `future` to its end, and what it spawns locally meanwhile.
    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        match self {
            Reactor::Uring(runtime) => runtime.block_on(future),
            Reactor::Plain(runtime) => LocalSet::new().block_on(runtime, future),
        }
    }
}

/// Takes as many descriptors as a runtime needs, and gives them back: tokio panics where it gets none for its signals.
fn check_descriptors() -> Result<()> {
    let pipes: io::Result<Vec<_>> = (0..DESCRIPTORS / 2).map(|_| io::pipe()).collect();
    pipes.map(drop).map_err(|source| Error::io("find descriptors (raise `ulimit -n`) for", "the reactor", source))
}

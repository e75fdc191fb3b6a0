//! The reactor's runtime: io_uring if the kernel allows it, a plain current-thread runtime otherwise.

use std::{fs::File, future::Future, io, rc::Rc, sync::Arc};

use tokio::task::LocalSet;

use crate::{
    config::{Config, HeldFile, StorageKind},
    error::{Error, Result},
    io::{Files, Workers, uring},
    memory::Arena,
    shield::log,
};

/// Entries of the ring, and so its operations in flight. The byte budgets bound the disk's load.
const RING_ENTRIES: u32 = 1024;

/// File descriptors of a runtime with a ring: the ring, epoll, the wake-up, and tokio's socket pair for signals.
const DESCRIPTORS: usize = 12;

/// Makes writes past `RLIMIT_FSIZE` fail with `EFBIG` on this thread and its children, instead of killing the process
/// with SIGXFSZ: the limit may be lowered while the store is open. Other threads keep their signal disposition.
pub(crate) fn refuse_size_signal() {
    let mut signals = std::mem::MaybeUninit::uninit();
    // SAFETY: the first call initializes the set, the others read it; only this thread's mask changes.
    let refused = unsafe {
        libc::sigemptyset(signals.as_mut_ptr());
        libc::sigaddset(signals.as_mut_ptr(), libc::SIGXFSZ);
        libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), std::ptr::null_mut())
    };
    assert_eq!(refused, 0, "a signal of every system");
}

/// Runs the reactor's tasks.
pub(crate) enum Reactor {
    Uring(uring::Runtime),
    Plain(tokio::runtime::Runtime),
}

impl Reactor {
    /// Picks the runtime for `config`, on the thread that will run it.
    pub(crate) fn new(config: &Config) -> Result<Self> {
        let wants_ring = match config.disk.storage {
            StorageKind::Blocking => false,
            StorageKind::Uring => true,
            StorageKind::Auto => !config.disk.paths.is_empty(),
        };
        if wants_ring {
            check_descriptors()?;
            let held = config.disk.rings_hold.as_ref().map(HeldFile::as_fd);
            match uring::runtime(RING_ENTRIES, held) {
                Ok(runtime) => return Ok(Reactor::Uring(runtime)),
                Err(error) if config.disk.storage == StorageKind::Uring => {
                    return Err(uring::refused(&error));
                }
                Err(error) => {
                    let threads = config.disk.blocking_threads;
                    let what = "io_uring is refused; the disk tier uses threads that call pread and pwrite";
                    log(|| tracing::warn!(%error, threads, "{what}"));
                }
            }
        }
        let mut builder = tokio::runtime::Builder::new_current_thread();
        if config.device_slots() > 0 {
            // An RDMA device signals completions through a descriptor.
            check_descriptors()?;
            builder.enable_io();
        }
        let runtime = builder.enable_time().build();
        runtime.map(Reactor::Plain).map_err(|source| Error::io("start a runtime", "", source))
    }

    /// Whether there is a ring; without one, the disk tier is served by system calls of threads.
    pub(crate) fn has_ring(&self) -> bool {
        matches!(self, Reactor::Uring(_))
    }

    /// The storage for this runtime, which registers the memory of `arena` with the ring. Call inside
    /// [`block_on`](Reactor::block_on).
    pub(crate) fn storage(
        &self,
        files: Vec<Arc<File>>,
        arena: Option<&Arc<Arena>>,
        workers: Rc<Workers>,
    ) -> io::Result<Files> {
        match (self, arena) {
            (Reactor::Uring(_), Some(arena)) => {
                let regions = arena.chunks().to_vec();
                // SAFETY: the chunks belong to the arena for its whole life, and the storage keeps the arena.
                unsafe { Files::on_ring_with(files, regions, Arc::clone(arena) as _, workers) }
            }
            // SAFETY: there is no region that would have to stay mapped.
            (Reactor::Uring(_), None) => unsafe { Files::on_ring_with(files, Vec::new(), Arc::new(()), workers) },
            (Reactor::Plain(_), _) => Ok(Files::by_calls_of(files, workers)),
        }
    }

    /// Runs `future` to completion, together with the local tasks that it spawns.
    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        match self {
            Reactor::Uring(runtime) => runtime.block_on(future),
            Reactor::Plain(runtime) => LocalSet::new().block_on(runtime, future),
        }
    }
}

/// Checks that enough descriptors are free: without one for its signals, tokio panics.
fn check_descriptors() -> Result<()> {
    let pipes: io::Result<Vec<_>> = (0..DESCRIPTORS / 2).map(|_| io::pipe()).collect();
    pipes.map(drop).map_err(|source| Error::io("find descriptors (raise `ulimit -n`) for", "the reactor", source))
}

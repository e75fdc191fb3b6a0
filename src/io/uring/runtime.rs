//! The ring's runtime and its shutdown.

use std::{
    cell::{Cell, RefCell},
    fs::File,
    io,
    mem::ManuallyDrop,
    os::fd::BorrowedFd,
    rc::Rc,
    sync::Arc,
};

use kvhoist_base::runtime::OnRing;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Lent, OpKind, hold::hold_by_runtime, probe::probe};

/// A tokio-uring runtime that never frees memory the kernel may still use.
///
/// When its driver is dropped, tokio-uring drops the data of abandoned operations before it cancels them and waits.
/// Therefore this type first marks its ring as closing: data of operations is then deferred, and freed when the inner
/// runtime is gone, whose drop returns once every operation has completed. If that drop panics, the deferred data is
/// leaked.
pub struct Runtime {
    /// Present until drop.
    inner: Option<tokio_uring::Runtime>,
    ring: Rc<Ring>,
}

/// A runtime whose ring has `entries` entries (1 to 4096, rounded up to a power of two by the kernel), and as many
/// operations in flight. `held` is a file that the ring holds open until all of its operations have ended, also when
/// the process is killed.
///
/// Must be made on the thread that uses it: the kernel ties the ring to the thread.
///
/// # Errors
/// The kernel's error, with its cause and the fix, if it refuses rings ([`probe`]), this many entries, or to hold the
/// file.
pub fn runtime(entries: u32, held: Option<BorrowedFd<'_>>) -> io::Result<Runtime> {
    probe()?;
    let entries = entries.clamp(1, 4096);
    let mut modern = tokio_uring::uring_builder();
    modern.setup_single_issuer().setup_coop_taskrun();
    let inner = match build(entries, &modern) {
        // Kernels before 6.0 (single issuer) or 5.19 (cooperative task work) do not know these flags.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => match held {
            None => build(entries, &tokio_uring::uring_builder())?,
            Some(_) => return Err(io::Error::new(io::ErrorKind::Unsupported, HOLDS_NONE)),
        },
        other => other?,
    };
    if let Some(file) = held {
        hold_by_runtime(&inner, file)?;
    }
    // The others are left to reads, which wait for no write.
    let writes_max = (entries - entries / 4).max(1);
    let [permits, writes] = [entries, writes_max].map(|most| Arc::new(Semaphore::new(most as usize)));
    let ring = Ring { permits, writes, closing: Cell::new(false), deferred: RefCell::default() };
    Ok(Runtime { inner: Some(inner), ring: Rc::new(ring) })
}

/// Without a single issuer the ring of another thread could be taken for this one.
const HOLDS_NONE: &str =
    "io_uring of this kernel has no single issuer: Linux 6.0 or later is needed, or the blocking storage engine";

fn build(entries: u32, ring: &io_uring::Builder) -> io::Result<tokio_uring::Runtime> {
    let mut builder = tokio_uring::builder();
    builder.entries(entries).uring_builder(ring);
    tokio_uring::Runtime::new(&builder)
}

impl Runtime {
    /// Runs `future` to completion on this thread, together with all tasks spawned with `tokio::task::spawn_local`.
    ///
    /// # Panics
    /// If called inside a runtime, or if `future` panics.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let (_current, _yields) = (CurrentGuard(CURRENT.replace(Some(Rc::clone(&self.ring)))), OnRing::enter());
        self.inner.as_ref().expect("present until drop").block_on(future)
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.ring.closing.set(true);
        drop(self.inner.take());
        // Every operation has completed and the ring is closed: the deferred memory is ours again, and so is that of
        // futures which outlive the runtime.
        self.ring.closing.set(false);
        for deferred in self.ring.deferred.take() {
            drop(ManuallyDrop::into_inner(deferred));
        }
    }
}

thread_local! {
    /// The ring of the runtime that this thread is in.
    static CURRENT: RefCell<Option<Rc<Ring>>> = const { RefCell::new(None) };
}

/// Restores the previous ring when dropped.
struct CurrentGuard(Option<Rc<Ring>>);

impl Drop for CurrentGuard {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

/// What engines and operations share with their runtime.
pub(super) struct Ring {
    /// One permit per ring entry; shared by all engines on the ring.
    permits: Arc<Semaphore>,
    /// One permit per write or flush.
    writes: Arc<Semaphore>,
    closing: Cell<bool>,
    /// Data freed after the ring is closed, and leaked if closing fails.
    deferred: RefCell<Vec<ManuallyDrop<Deferred>>>,
}

/// The permits of an operation: to be in flight, and to be a write.
pub(super) type Turn = (OwnedSemaphorePermit, Option<OwnedSemaphorePermit>);

type Deferred = (Option<Lent>, Option<Arc<File>>);

impl Ring {
    /// The ring of the runtime that the caller is in.
    pub(super) fn current() -> io::Result<Rc<Ring>> {
        CURRENT.with_borrow(Clone::clone).ok_or_else(not_inside)
    }

    /// Refuses an operation that would be submitted to no ring or to another one.
    pub(super) fn check_current(self: &Rc<Self>) -> io::Result<()> {
        let current = CURRENT.with_borrow(|current| current.as_ref().is_some_and(|ring| Rc::ptr_eq(ring, self)));
        if current { Ok(()) } else { Err(not_inside()) }
    }

    /// Waits for the turn of an operation, which it has until the permits are dropped.
    pub(super) async fn turn(&self, kind: OpKind) -> Turn {
        const OPEN: &str = "the semaphores are never closed";
        let write = match kind {
            OpKind::Read => None,
            OpKind::Write | OpKind::Sync => Some(Arc::clone(&self.writes).acquire_owned().await.expect(OPEN)),
        };
        (Arc::clone(&self.permits).acquire_owned().await.expect(OPEN), write)
    }

    /// Frees an operation's data: now, or after the ring is closed if the runtime is shutting down.
    pub(super) fn release(&self, buf: Option<Lent>, file: Option<Arc<File>>) {
        if self.closing.get() {
            self.deferred.borrow_mut().push(ManuallyDrop::new((buf, file)));
        }
    }
}

fn not_inside() -> io::Error {
    io::Error::other(
        "the ring was used outside its runtime: call from inside io::uring::Runtime::block_on, on its thread",
    )
}

//! The reactor's ring, of the tokio-uring runtime.
//!
//! # Lifetime of memory
//! By the source of tokio-uring 0.5.0:
//! - *Future dropped, runtime lives.* `InFlightOneshot::drop` moves the operation's data into the driver, which drops
//!   it at the completion. This is what the engine needs.
//! - *Runtime dropped.* Tasks are dropped first, which moves their data into the driver as above. `Driver::drop` then
//!   cancels every operation and waits for all completions, but **before** that it drops the data of abandoned
//!   operations, to which the kernel may still write. So data dropped while [`Runtime`] shuts down is deferred, and
//!   freed when the driver is gone (see [`Runtime`]).
//!
//! The data of an operation is its [`Lent`], its file, and its permits to be in flight. A descriptor closed too early
//! could name another file by the time the kernel reads it.
//!
//! # Submission
//! Operations are submitted when the runtime parks, many at a time; otherwise tokio-uring submits only when the ring is
//! full. So a task that never lets the runtime park, because it loops over tokio's `yield_now`, keeps all I/O from
//! being submitted, without end if it waits for that I/O. [`yield_now`](super::yield_now) goes through the ring and
//! lets the runtime park.

mod buffers;
mod hold;
mod op;
mod probe;
mod runtime;
pub(crate) mod table;

pub(in crate::io) use hold::hold;
pub(in crate::io) use probe::is_in_memory;
pub use probe::{probe, refused};
pub use runtime::{Runtime, runtime};

use std::{any::Any, cell::RefCell, fs::File, io, os::fd::AsRawFd, ptr::NonNull, rc::Rc, sync::Arc};

use io_uring::{opcode, squeue, types};
use tokio_uring::UnsubmittedOneshot;

use self::{
    buffers::RingBuffers,
    op::{OpOutput, OpState},
    runtime::Ring,
    table::{Entry, Table},
};
use super::{memlock, transfer::TRANSFER_BYTES_MAX};
use crate::{block::OpKind, memory::Lent, shield::log};

/// Largest number of buffers that a ring can register through tokio-uring (`UIO_MAXIOV`); further regions are used
/// unregistered.
pub const REGIONS_MAX: usize = 1024;

/// The ring and its registered memory.
///
/// Used on the thread and inside the [`Runtime`] that it was made in. At most as many operations are in flight as the
/// ring has entries; further ones wait in order, and writes leave a part to reads. So neither the submission queue nor
/// the completion queue overflows.
pub(super) struct Uring {
    ring: Rc<Ring>,
    /// Registered memory. Operations on it use fixed buffers, identified by `Lent::fixed`.
    table: RefCell<Table<RingBuffers>>,
    /// Keeps the registered memory mapped as long as operations can be submitted.
    _keep_alive: Arc<dyn Any + Send + Sync>,
}

impl Uring {
    /// The ring of the current [`Runtime`], with registered memory: region `i` has the [`Lent::fixed`] number
    /// `Some(i)`; the kernel takes at most 1 GiB per region and [`REGIONS_MAX`] regions. If the kernel refuses them, a
    /// warning gives the reason and no operation uses a fixed buffer. A ring registers one table: a second engine on it
    /// has no registered memory.
    ///
    /// # Errors
    /// Called outside [`Runtime::block_on`].
    ///
    /// # Safety
    /// Every region must stay mapped, and to the same memory, while `keep_alive` lives. The engine and the runtime keep
    /// it until both are dropped.
    pub(super) unsafe fn new(
        regions: Vec<(NonNull<u8>, usize)>,
        keep_alive: Arc<dyn Any + Send + Sync>,
    ) -> io::Result<Self> {
        let ring = Ring::current()?;
        let regions = regions.into_iter().take(REGIONS_MAX);
        let entry = |(ptr, len): (NonNull<u8>, usize)| Entry::new(ptr.as_ptr(), len, Some(Arc::clone(&keep_alive)));
        let table = RefCell::new(Table::new(regions.map(entry).collect(), RingBuffers::default()));
        Ok(Uring { ring, table, _keep_alive: keep_alive })
    }

    /// Reads or writes once, with a fixed buffer if the memory is registered.
    pub(super) async fn operate(
        &self,
        kind: OpKind,
        file: &Arc<File>,
        offset: u64,
        buf: Lent,
    ) -> (io::Result<usize>, Lent) {
        let region = self.table.borrow().fixed(&buf);
        let (result, buf) = self.run(kind, file, entry(kind, file, offset, &buf, region), Some(buf)).await;
        let buf = buf.expect(GIVES_BACK);
        let is_unreachable = matches!(&result, Err(error) if error.raw_os_error() == Some(libc::EFAULT));
        if region.is_none() || !is_unreachable {
            return (result, buf);
        }
        // The region may have been unregistered before the operation was submitted.
        let (result, buf) = self.run(kind, file, entry(kind, file, offset, &buf, None), Some(buf)).await;
        (result, buf.expect(GIVES_BACK))
    }

    pub(super) async fn sync(&self, file: &Arc<File>) -> io::Result<()> {
        let entry = opcode::Fsync::new(types::Fd(file.as_raw_fd())).flags(types::FsyncFlags::DATASYNC).build();
        self.run(OpKind::Sync, file, entry, None).await.0.map(|_| ())
    }

    /// Waits for its turn, submits, and waits for the completion.
    async fn run(
        &self,
        kind: OpKind,
        file: &Arc<File>,
        entry: squeue::Entry,
        buf: Option<Lent>,
    ) -> (io::Result<usize>, Option<Lent>) {
        let turn = self.ring.turn(kind).await;
        if let Err(error) = self.ring.check_current() {
            return (Err(error), buf);
        }
        let state = OpState::new(buf, Arc::clone(file), turn, Rc::clone(&self.ring));
        UnsubmittedOneshot::new(state, OpOutput, entry).submit().await
    }

    /// As [`Storage::register`](super::Storage::register).
    ///
    /// # Safety
    /// As of it.
    pub(super) unsafe fn register(&self, start: NonNull<u8>, len: usize) -> Option<u16> {
        let refused = |error: &io::Error| {
            let refusal = memlock::refusal(len as u64, error);
            log(|| tracing::warn!("{refusal}; the region is used unregistered, which is slower"));
        };
        self.table.borrow_mut().add(start.as_ptr(), len).inspect_err(refused).ok()
    }

    pub(super) fn unregister(&self, first: u16, len: usize) {
        self.table.borrow_mut().remove(first, len);
    }

    pub(super) fn registered(&self) -> bool {
        self.table.borrow().is_registered()
    }
}

const GIVES_BACK: &str = "an operation returns its memory";

/// The ring entry of one operation. `region`: the number of the registered buffer that contains the memory.
pub(super) fn entry(kind: OpKind, file: &Arc<File>, offset: u64, buf: &Lent, region: Option<u16>) -> squeue::Entry {
    let (fd, ptr) = (types::Fd(file.as_raw_fd()), buf.as_ptr());
    let len = u32::try_from(buf.len().min(TRANSFER_BYTES_MAX)).expect("TRANSFER_BYTES_MAX fits in 31 bits");
    match (kind, region) {
        (OpKind::Read, Some(region)) => opcode::ReadFixed::new(fd, ptr, len, region).offset(offset).build(),
        (OpKind::Read, None) => opcode::Read::new(fd, ptr, len).offset(offset).build(),
        (OpKind::Write, Some(region)) => opcode::WriteFixed::new(fd, ptr, len, region).offset(offset).build(),
        (OpKind::Write, None) => opcode::Write::new(fd, ptr, len).offset(offset).build(),
        (OpKind::Sync, _) => unreachable!("a flush transfers nothing"),
    }
}

//! A simulated disk: files in memory, virtual time, faults from one seed or from a script.
//!
//! For tests of everything above the storage seam. It runs in a current-thread tokio runtime with a
//! paused clock, inside a `LocalSet`: every operation is a local task there, so that it goes on when
//! its future is dropped, and is cut off when the runtime is. The same seed and the same operations
//! in the same order give the same latencies, faults and log ([`Sim::log_digest`]).
//!
//! The simulation also holds callers to the seam's rules: memory under a read is filled with garbage
//! until the read is done, and a write panics if its memory changed while it was in flight.

mod disk;
mod faults;
mod log;
mod memory;
mod pins;
mod rng;
mod state;
#[cfg(test)]
mod tests;

pub use disk::SECTOR_BYTES;
pub use faults::{Fault, FaultKind, FaultRates, SimOptions};
pub use log::{Counts, Event, LogEntry};
pub use memory::Memory;
pub use rng::Rng;

use std::{any::Any, cell::RefCell, io, ops::Range, ptr::NonNull, rc::Rc, sync::Arc};

use kvhoist::internals::{
    io::{FileId, Lent, OpKind, OpenFile, Storage, in_parts},
    seams::{Entry, Table, log},
};
use tokio::sync::oneshot;

use state::{Plan, State};

/// A simulated storage and the handle to script it by; clones share everything.
#[derive(Clone)]
pub struct Sim(Rc<RefCell<State>>);

impl Sim {
    /// Storage with these files on the medium: zeros for a new store, or what
    /// [`crash`](Self::crash) left.
    pub fn new(seed: u64, files: Vec<Vec<u8>>, options: SimOptions) -> Self {
        Sim(Rc::new(RefCell::new(State::new(seed, files, options))))
    }

    /// Makes `fault` happen to the `nth` operation of `kind` (from 0, counted from the start of the
    /// simulation; [`counts`](Self::counts) tells how many there were), instead of what chance says.
    pub fn script(&self, kind: OpKind, nth: u64, fault: Fault) {
        self.0.borrow_mut().script(kind, nth, fault);
    }

    /// Makes `fault` happen to the next operation of `kind`.
    pub fn script_next(&self, kind: OpKind, fault: Fault) {
        let mut state = self.0.borrow_mut();
        let nth = state.counts().started[kind as usize];
        state.script(kind, nth, fault);
    }

    /// Makes every operation of `kind` that touches this place of the file fail with `EIO` from now on: a bad sector.
    pub fn break_place(&self, kind: OpKind, file: FileId, place: Range<u64>) {
        self.0.borrow_mut().break_place(kind, file, place);
    }

    /// Makes the next operation of this kind that the reactor asks for panic: a defect.
    pub fn panic_next(&self, kind: OpKind) {
        self.0.borrow_mut().panics_at = Some(kind);
    }

    /// Changes the faults by chance from now on.
    pub fn set_rates(&self, rates: FaultRates) {
        self.0.borrow_mut().set_rates(rates);
    }

    /// Lets every stalled operation go on; returns how many there were.
    pub fn release(&self) -> usize {
        let stalled = self.0.borrow_mut().take_stalled();
        // Receivers are gone where the runtime was dropped meanwhile.
        stalled.into_iter().map(|go| usize::from(go.send(()).is_ok())).sum()
    }

    /// Operations that wait for [`release`](Self::release).
    pub fn stalled(&self) -> usize {
        self.0.borrow().stalled()
    }

    /// Operations in flight, stalled ones among them.
    pub fn in_flight(&self) -> usize {
        self.0.borrow().in_flight()
    }

    /// True if an operation in flight uses a part of the range of memory.
    pub(crate) fn uses(&self, start: usize, len: usize) -> bool {
        self.0.borrow().uses(start, len)
    }

    /// The reads in flight into a range of memory: the place of each in the range, and the bytes that it brings.
    pub(crate) fn reads_in_flight(&self, start: usize, len: usize) -> Vec<(usize, Vec<u8>)> {
        self.0.borrow().reads_in_flight(start, len)
    }

    /// What addresses of reads and writes must be multiples of.
    pub fn memory_align_bytes(&self) -> usize {
        self.0.borrow().memory_align_bytes()
    }

    /// Operations so far, by what became of them.
    pub fn counts(&self) -> Counts {
        self.0.borrow().counts()
    }

    /// The newest entries of the operation log, oldest first.
    pub fn log(&self) -> Vec<LogEntry> {
        self.0.borrow().log().entries()
    }

    /// A digest of the whole log, the forgotten part too.
    pub fn log_digest(&self) -> u64 {
        self.0.borrow().log().digest()
    }

    /// What a reader would see of the file.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn contents(&self, file: FileId) -> Vec<u8> {
        self.0.borrow().disk(file).contents().to_vec()
    }

    /// The length of the file.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn file_bytes(&self, file: FileId) -> u64 {
        self.0.borrow().disk(file).contents().len() as u64
    }

    /// True if a reader would see nothing but zeros.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn is_zero(&self, file: FileId) -> bool {
        self.0.borrow().disk(file).is_zero(usize::MAX)
    }

    /// True if a reader would see nothing but zeros in the first `len` bytes of the file.
    pub(crate) fn begins_with_zeros(&self, file: FileId, len: u64) -> bool {
        self.0.borrow().disk(file).is_zero(usize::try_from(len).unwrap_or(usize::MAX))
    }

    /// Flips the bits of `mask` in a byte of the medium, unnoticed: rot.
    ///
    /// # Panics
    /// If there is no such file or byte.
    pub fn flip(&self, file: FileId, at: usize, mask: u8) {
        self.0.borrow_mut().disk_mut(file).flip(at, mask);
    }

    /// True if a power cut now would lose nothing of this file.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn is_durable(&self, file: FileId) -> bool {
        self.0.borrow().disk(file).is_clean()
    }

    /// What is on the medium if the power fails now, file by file.
    ///
    /// Synced writes are there. Each sector that was written and not synced holds its newest
    /// content, the one before that, or the synced one; each sector of a write in flight may have
    /// been written. Sectors of [`SECTOR_BYTES`] are never torn. The length of a file is never lost
    /// (stores are preallocated). Every call draws another outcome; the simulation goes on unharmed.
    pub fn crash(&self) -> Vec<Vec<u8>> {
        self.0.borrow_mut().crash()
    }

    /// Ends the simulation: what readers would see of the files, or with a `power_cut` what [`crash`](Self::crash)
    /// says. Takes the files instead of copying them; operations that are in flight must be polled no more.
    pub fn end(&self, power_cut: bool) -> Vec<Vec<u8>> {
        self.0.borrow_mut().end(power_cut)
    }

    /// Takes the lock that keeps a second cache from the files; `None` while another has it.
    pub(crate) fn try_lock(&self) -> Option<Locked> {
        let was_locked = self.0.borrow_mut().set_locked(true);
        (!was_locked).then(|| Locked(self.clone()))
    }

    /// Has the kernel pin the memory of a cache that opens the files, and nothing else.
    ///
    /// # Safety
    /// As [`Files::on_ring`](kvhoist::internals::io::Files::on_ring).
    pub(crate) unsafe fn pin_arena(
        &self,
        chunks: &[(NonNull<u8>, usize)],
        keep_alive: &Arc<dyn Any + Send + Sync>,
    ) -> bool {
        let entry = |&(ptr, len): &(NonNull<u8>, usize)| Entry::new(ptr.as_ptr(), len, Some(Arc::clone(keep_alive)));
        let mut state = self.0.borrow_mut();
        let pins = state.new_pins();
        let table = Table::new(chunks.iter().map(entry).collect(), pins);
        let registered = table.is_registered();
        state.table = table;
        registered
    }

    /// How often the kernel has refused to pin memory, for the cache that has the files open.
    pub fn pins_refused(&self) -> u64 {
        self.0.borrow().table.pinner().refused()
    }

    /// Refuses to pin this memory from now on, as a kernel does where nothing is mapped.
    pub fn unmap(&self, range: Range<usize>) {
        self.0.borrow_mut().table.pinner_mut().unmap(range);
    }

    /// An operation on memory that the kernel is said to have under a number fails where it has not.
    fn check_pinned(&self, buf: Option<&Lent>) -> io::Result<()> {
        let state = self.0.borrow();
        let unreachable =
            |buf: &Lent| state.table.fixed(buf).is_some_and(|place| !state.table.pinner().reaches(place, buf));
        if buf.is_some_and(unreachable) { Err(io::Error::from_raw_os_error(libc::EFAULT)) } else { Ok(()) }
    }

    /// Reads or writes all of the memory, whose owner is given back.
    pub(crate) async fn transfer_lent(
        &self,
        kind: OpKind,
        file: FileId,
        offset: u64,
        buf: Lent,
    ) -> (io::Result<()>, Lent) {
        in_parts(kind, file, offset, buf, async |at, buf| self.operate(kind, file, at, buf).await).await
    }

    /// Reads or writes once.
    pub(crate) async fn operate(
        &self,
        kind: OpKind,
        file: FileId,
        offset: u64,
        buf: Lent,
    ) -> (io::Result<usize>, Lent) {
        let (result, buf) = self.run(kind, file, offset, Some(buf)).await;
        (result, buf.expect("an operation gives back the memory it took"))
    }

    async fn run(&self, kind: OpKind, file: FileId, offset: u64, buf: Option<Lent>) -> Done {
        if let Err(error) = self.check_pinned(buf.as_ref()) {
            return (Err(error), buf);
        }
        let plan = match self.0.borrow_mut().start(kind, file, offset, buf.as_ref()) {
            Ok(plan) => plan,
            Err(error) => return (Err(error), buf),
        };
        let (answer, answered) = oneshot::channel();
        let state = Rc::clone(&self.0);
        tokio::task::spawn_local(async move {
            wait(&state, &plan).await;
            let result = state.borrow_mut().finish(plan, buf.as_ref());
            // The receiver may be gone; dropping the result frees the memory.
            drop(answer.send((result, buf)));
        });
        answered.await.expect("the task that answers lives as long as the runtime that polls this")
    }
}

/// The lock on the files, for as long as it lives.
pub(crate) struct Locked(Sim);

impl Drop for Locked {
    fn drop(&mut self) {
        self.0.0.borrow_mut().set_locked(false);
    }
}

type Done = (io::Result<usize>, Option<Lent>);

async fn wait(state: &RefCell<State>, plan: &Plan) {
    tokio::time::sleep(plan.latency).await;
    if matches!(plan.fault, Some(Fault::Stall | Fault::StalledError(_))) {
        let (go, may_go) = oneshot::channel();
        state.borrow_mut().stall(go);
        // An error means that the simulation itself is gone: nothing to wait for.
        let _ = may_go.await;
    }
}

impl Storage for Sim {
    fn name(&self) -> &'static str {
        "sim"
    }

    async fn transfer(&self, kind: OpKind, file: FileId, offset: u64, buf: Lent) -> io::Result<()> {
        let panics = self.0.borrow_mut().panics_at.take_if(|at| *at == kind).is_some();
        assert!(!panics, "a movement panics, on purpose");
        match kind {
            OpKind::Sync => self.run(kind, file, 0, None).await.0.map(|_| ()),
            _ => self.transfer_lent(kind, file, offset, buf).await.0,
        }
    }

    /// A stand-in, because workers find a simulated file by its id.
    fn file(&self, id: FileId) -> Option<OpenFile> {
        Some(OpenFile { file: Arc::clone(&self.0.borrow().stand_in), id, by_calls: false })
    }

    unsafe fn register(&self, start: NonNull<u8>, len: usize) -> Option<u16> {
        match self.0.borrow_mut().table.add(start.as_ptr(), len) {
            Ok(first) => Some(first),
            Err(error) => {
                log(|| tracing::warn!(%error, "memory is not registered"));
                None
            }
        }
    }

    fn unregister(&self, first: u16, len: usize) {
        self.0.borrow_mut().table.remove(first, len);
    }

    fn registered(&self) -> bool {
        self.0.borrow().table.is_registered()
    }
}

//! What the library keeps for its callers: files, ranges of device memory, batches.

use std::{
    ffi::{c_int, c_void},
    fs::{File, OpenOptions},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    ptr::null_mut,
    sync::Arc,
};

use super::{
    driver::Driver,
    library::{CufileFault, RawDescription, RawEntry, RawEvent, RawFile, check},
};
use crate::block::OpKind;

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
const KIND_DESCRIPTOR: u32 = 1;
/// `CUFILE_BATCH`.
const MODE_BATCH: u32 = 1;
/// `CUFILE_READ` and `CUFILE_WRITE`.
const OPERATIONS: [u32; 2] = [0, 1];
/// `CUFILE_WAITING` and so on.
const WAITING: u32 = 1;
const PENDING: u32 = 2;
const INVALID: u32 = 4;
const CANCELED: u32 = 8;
const COMPLETE: u32 = 16;
const TIMEOUT: u32 = 32;

/// A file that the library knows, kept open; forgotten when dropped.
pub(crate) struct Handle {
    driver: &'static Driver,
    raw: *mut c_void,
    /// What the library uses.
    _opened: File,
    /// Holds the store's lock for as long.
    _file: Arc<File>,
}

impl Handle {
    pub(crate) fn new(driver: &'static Driver, file: Arc<File>) -> Result<Self, CufileFault> {
        let opened = open_again(&file).map_err(|error| {
            CufileFault::new("open for cuFileHandleRegister", error.raw_os_error().unwrap_or(libc::EIO))
        })?;
        let mut raw = null_mut();
        let mut description = RawDescription {
            kind: KIND_DESCRIPTOR,
            handle: RawFile { _pointer: null_mut() },
            operations: std::ptr::null(),
        };
        description.handle.descriptor = opened.as_raw_fd() as c_int;
        // SAFETY: writes one handle; the description lives across the call, and the descriptor as long as the handle.
        let result = unsafe { (driver.library().functions.handle_register)(&mut raw, &mut description) };
        check("cuFileHandleRegister", result)?;
        Ok(Handle { driver, raw, _opened: opened, _file: file })
    }

    /// Moves `len` bytes between the file at `offset` and device memory, and waits for that; the bytes moved, which may
    /// be fewer.
    ///
    /// # Safety
    /// The range must be device memory of the current context, ours to read (for a write) or to write to (for a read),
    /// until this returns.
    pub(crate) unsafe fn transfer(
        &self,
        kind: OpKind,
        ptr: *mut u8,
        len: usize,
        offset: u64,
    ) -> Result<usize, CufileFault> {
        let functions = &self.driver.library().functions;
        let at = offset as i64;
        let (call, moved) = match kind {
            // SAFETY: the caller's promise; a file's offset fits.
            OpKind::Read => ("cuFileRead", unsafe { (functions.read)(self.raw, ptr.cast(), len, at, 0) }),
            // SAFETY: as above.
            OpKind::Write => ("cuFileWrite", unsafe { (functions.write)(self.raw, ptr.cast(), len, at, 0) }),
            OpKind::Sync => unreachable!("only reads and writes move bytes"),
        };
        usize::try_from(moved).map_err(|_| CufileFault::of_transfer(call, moved))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: registered in `new`, forgotten once; whoever transfers borrows the handle.
        unsafe { (self.driver.library().functions.handle_deregister)(self.raw) };
    }
}

/// The very same file by a descriptor of its own. The store's was opened with `O_NOFOLLOW`, which the library refuses
/// (5019); what `/proc` leads to is no name that anybody could have changed.
fn open_again(file: &File) -> std::io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path)
}

/// A range of device memory that the library has mapped for the drive; forgotten when dropped.
pub(crate) struct Registration {
    driver: &'static Driver,
    start: *mut u8,
}

impl Registration {
    /// # Safety
    /// The range must be device memory of the current context that lives longer than this.
    pub(crate) unsafe fn new(driver: &'static Driver, start: *mut u8, bytes: usize) -> Result<Self, CufileFault> {
        // SAFETY: the caller's promise.
        let result = unsafe { (driver.library().functions.buffer_register)(start.cast(), bytes, 0) };
        check("cuFileBufRegister", result)?;
        Ok(Registration { driver, start })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: registered in `new`, forgotten once, when no transfer uses it.
        let result = unsafe { (self.driver.library().functions.buffer_deregister)(self.start.cast()) };
        if let Err(fault) = check("cuFileBufDeregister", result) {
            tracing::debug!(%fault, "device memory stays registered");
        }
    }
}

/// Up to so many transfers at once.
pub(crate) struct Batch {
    driver: &'static Driver,
    raw: *mut c_void,
    entries: Vec<RawEntry>,
    events: Vec<RawEvent>,
}

/// One transfer of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchEntry {
    pub(crate) kind: OpKind,
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    pub(crate) offset: u64,
    /// Comes back with the event.
    pub(crate) cookie: usize,
}

/// The end of a transfer of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchEvent {
    pub(crate) cookie: usize,
    /// The bytes moved, which may be fewer than asked.
    pub(crate) result: Result<usize, CufileFault>,
}

impl Batch {
    pub(crate) fn new(driver: &'static Driver, capacity: u32) -> Result<Self, CufileFault> {
        let mut raw = null_mut();
        // SAFETY: writes one handle, given back when this is dropped.
        let result = unsafe { (driver.library().functions.batch_set_up)(&mut raw, capacity) };
        check("cuFileBatchIOSetUp", result)?;
        let nothing = RawEvent { cookie: null_mut(), status: 0, bytes: 0 };
        Ok(Batch { driver, raw, entries: Vec::new(), events: vec![nothing; capacity as usize] })
    }

    /// Hands transfers over: all of them, or none.
    ///
    /// # Safety
    /// Each range must be device memory of the current context, ours to read or to write to until its event has come,
    /// and the files must stay registered as long. There must never be more under way than the capacity.
    pub(crate) unsafe fn submit(
        &mut self,
        entries: impl Iterator<Item = (BatchEntry, *const Handle)>,
    ) -> Result<(), CufileFault> {
        self.entries.clear();
        self.entries.extend(entries.map(|(entry, file)| RawEntry {
            mode: MODE_BATCH,
            // The library ignores the offset to the base in batches: the exact address it is.
            base: entry.ptr.cast(),
            base_offset: 0,
            file_offset: entry.offset as i64,
            size: entry.len,
            // SAFETY: the caller's promise: a handle that is still registered.
            file: unsafe { (*file).raw },
            operation: OPERATIONS[usize::from(entry.kind == OpKind::Write)],
            cookie: std::ptr::without_provenance_mut(entry.cookie),
        }));
        let count = self.entries.len() as u32;
        // SAFETY: `count` entries that live across the call; for the rest the caller's promise.
        let result =
            unsafe { (self.driver.library().functions.batch_submit)(self.raw, count, self.entries.as_mut_ptr(), 0) };
        check("cuFileBatchIOSubmit", result)
    }

    /// Transfers that have ended since the last call; does not wait.
    pub(crate) fn poll(&mut self) -> Result<impl Iterator<Item = BatchEvent>, CufileFault> {
        let mut count = self.events.len() as u32;
        let mut no_time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes `count` events at most, for which there is room, and how many.
        let result = unsafe {
            let events = self.events.as_mut_ptr();
            (self.driver.library().functions.batch_status)(self.raw, 0, &mut count, events, &mut no_time)
        };
        check("cuFileBatchIOGetStatus", result)?;
        let events = &self.events[..(count as usize).min(self.events.len())];
        let ended = events.iter().filter(|event| !matches!(event.status, WAITING | PENDING));
        Ok(ended.map(|event| {
            let bytes = event.bytes.cast_signed();
            let result = match (event.status, usize::try_from(bytes)) {
                (COMPLETE, Ok(bytes)) => Ok(bytes),
                (COMPLETE, Err(_)) => Err(CufileFault::of_event("a transfer of a batch", bytes)),
                (INVALID, _) => Err(CufileFault::of_event("a transfer of a batch, found invalid", bytes)),
                (CANCELED, _) => Err(CufileFault::of_event("a transfer of a batch, canceled", bytes)),
                (TIMEOUT, _) => Err(CufileFault::of_event("a transfer of a batch, timed out", bytes)),
                _ => Err(CufileFault::of_event("a transfer of a batch, failed", bytes)),
            };
            BatchEvent { cookie: event.cookie.addr(), result }
        }))
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        // SAFETY: set up in `new`, given back once, when nothing is under way: it would wait for that.
        unsafe { (self.driver.library().functions.batch_destroy)(self.raw) };
    }
}

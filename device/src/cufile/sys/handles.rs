//! RAII wrappers of libcufile's objects: registered files, registered device memory, batches.

use std::{
    ffi::{c_int, c_void},
    fs::{File, OpenOptions},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    ptr::null_mut,
    sync::Arc,
};

use kvhoist_base::{block::OpKind, panics::log};
use rustix::fs::OFlags;

use super::{
    driver::Driver,
    library::{CufileError, RawDescription, RawEntry, RawEvent, RawFile, check},
};

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

/// A file registered with libcufile; deregistered when dropped.
pub(crate) struct Handle {
    driver: &'static Driver,
    raw: *mut c_void,
    /// The descriptor registered with libcufile.
    _opened: File,
    /// Keeps the store's lock.
    _file: Arc<File>,
}

impl Handle {
    pub(crate) fn new(driver: &'static Driver, file: Arc<File>) -> Result<Self, CufileError> {
        let opened = open_again(&file).map_err(|error| {
            CufileError::new("open for cuFileHandleRegister", error.raw_os_error().unwrap_or(libc::EIO))
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

    /// Transfers `len` bytes between the file at `offset` and device memory, synchronously. Returns the bytes
    /// transferred, which may be fewer.
    ///
    /// # Safety
    /// The range must be device memory of the current context, and ours to write to (for a read) or to read (for a
    /// write) until this returns.
    pub unsafe fn transfer(&self, kind: OpKind, ptr: *mut u8, len: usize, offset: u64) -> Result<usize, CufileError> {
        let functions = &self.driver.library().functions;
        let at = offset as i64;
        let (call, moved) = match kind {
            // SAFETY: the caller vouches for the range; a file's offset fits.
            OpKind::Read => ("cuFileRead", unsafe { (functions.read)(self.raw, ptr.cast(), len, at, 0) }),
            // SAFETY: the caller vouches for the range; a file's offset fits.
            OpKind::Write => ("cuFileWrite", unsafe { (functions.write)(self.raw, ptr.cast(), len, at, 0) }),
            OpKind::Sync => unreachable!("only reads and writes move bytes"),
        };
        usize::try_from(moved).map_err(|_| CufileError::of_transfer(call, moved))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: registered in `new`, deregistered once; a transfer borrows the handle.
        unsafe { (self.driver.library().functions.handle_deregister)(self.raw) };
    }
}

/// Opens the same file again through `/proc`, with the access that it has, for a descriptor without `O_NOFOLLOW`:
/// libcufile refuses that flag (5019). The `/proc` link leads to the open file itself, whatever its name means by now.
fn open_again(file: &File) -> std::io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let writes = rustix::fs::fcntl_getfl(file)?.contains(OFlags::RDWR);
    OpenOptions::new().read(true).write(writes).custom_flags(libc::O_DIRECT).open(path)
}

/// A range of device memory registered with libcufile; deregistered when dropped.
pub(crate) struct Registration {
    driver: &'static Driver,
    start: *mut u8,
}

impl Registration {
    /// # Safety
    /// The range must be device memory of the current context that outlives the registration.
    pub(crate) unsafe fn new(driver: &'static Driver, start: *mut u8, bytes: usize) -> Result<Self, CufileError> {
        // SAFETY: the caller vouches for the range.
        let result = unsafe { (driver.library().functions.buffer_register)(start.cast(), bytes, 0) };
        check("cuFileBufRegister", result)?;
        Ok(Registration { driver, start })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: registered in `new`, deregistered once, while no transfer uses it.
        let result = unsafe { (self.driver.library().functions.buffer_deregister)(self.start.cast()) };
        if let Err(fault) = check("cuFileBufDeregister", result) {
            log(|| tracing::debug!(%fault, "device memory stays registered"));
        }
    }
}

/// A cuFile batch of fixed capacity.
pub(crate) struct Batch {
    driver: &'static Driver,
    raw: *mut c_void,
    entries: Vec<RawEntry>,
    events: Vec<RawEvent>,
}

/// A transfer to submit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchEntry {
    pub(crate) kind: OpKind,
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    pub(crate) offset: u64,
    /// Returned with the event.
    pub(crate) cookie: usize,
}

/// A completed transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchEvent {
    pub(crate) cookie: usize,
    /// Bytes transferred, which may be fewer than requested.
    pub(crate) result: Result<usize, CufileError>,
}

impl Batch {
    pub(crate) fn new(driver: &'static Driver, capacity: u32) -> Result<Self, CufileError> {
        let mut raw = null_mut();
        // SAFETY: writes one handle, destroyed when this is dropped.
        let result = unsafe { (driver.library().functions.batch_set_up)(&mut raw, capacity) };
        check("cuFileBatchIOSetUp", result)?;
        let nothing = RawEvent { cookie: null_mut(), status: 0, bytes: 0 };
        Ok(Batch { driver, raw, entries: Vec::new(), events: vec![nothing; capacity as usize] })
    }

    /// Submits all transfers, or none.
    ///
    /// # Safety
    /// Each range must be device memory of the current context, ours to read or write until its event arrives, and the
    /// files must stay registered until then. Transfers in flight must never exceed the capacity.
    pub(crate) unsafe fn submit(
        &mut self,
        entries: impl Iterator<Item = (BatchEntry, *const Handle)>,
    ) -> Result<(), CufileError> {
        self.entries.clear();
        self.entries.extend(entries.map(|(entry, file)| RawEntry {
            mode: MODE_BATCH,
            // libcufile ignores `base_offset` in batches, so `base` is the exact address.
            base: entry.ptr.cast(),
            base_offset: 0,
            file_offset: entry.offset as i64,
            size: entry.len,
            // SAFETY: the caller vouches for a handle that is still registered.
            file: unsafe { (*file).raw },
            operation: OPERATIONS[usize::from(entry.kind == OpKind::Write)],
            cookie: std::ptr::without_provenance_mut(entry.cookie),
        }));
        let count = self.entries.len() as u32;
        // SAFETY: `count` entries that live across the call; the caller vouches for the rest.
        let result =
            unsafe { (self.driver.library().functions.batch_submit)(self.raw, count, self.entries.as_mut_ptr(), 0) };
        check("cuFileBatchIOSubmit", result)
    }

    /// Returns the transfers completed since the last call, without waiting.
    pub(crate) fn poll(&mut self) -> Result<impl Iterator<Item = BatchEvent>, CufileError> {
        let mut count = self.events.len() as u32;
        let mut no_time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes at most `count` events, for which there is room, and their number.
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
                (COMPLETE, Err(_)) => Err(CufileError::of_event("a transfer of a batch", bytes)),
                (INVALID, _) => Err(CufileError::of_event("a transfer of a batch, found invalid", bytes)),
                (CANCELED, _) => Err(CufileError::of_event("a transfer of a batch, canceled", bytes)),
                (TIMEOUT, _) => Err(CufileError::of_event("a transfer of a batch, timed out", bytes)),
                _ => Err(CufileError::of_event("a transfer of a batch, failed", bytes)),
            };
            BatchEvent { cookie: event.cookie.addr(), result }
        }))
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        // SAFETY: set up in `new`, destroyed once, with nothing in flight: it would wait for that.
        unsafe { (self.driver.library().functions.batch_destroy)(self.raw) };
    }
}

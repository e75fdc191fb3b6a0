//! `cuFileRead` as a peer: the library's own functions, called as its manual says.

use std::{
    ffi::{CStr, c_int, c_uint, c_void},
    io,
    os::fd::AsRawFd,
    time::Duration,
};

use kvhoist::internals::{
    device::cufile::Driver,
    gpu::{DeviceBuffer, Gpu},
    memory::DeviceMemory,
};

use crate::{
    cuda::{check_on_device, threads},
    drive::other,
    measure::Entrant,
    peers::{Places, THREADS},
};

/// How long its initialisation may take.
const OPEN_MAX: Duration = Duration::from_secs(10);

/// `CUfileError_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Status {
    status: c_int,
    cuda: c_int,
}

/// `CUfileDescr_t` of a descriptor.
#[repr(C)]
struct Description {
    kind: c_uint,
    descriptor: u64,
    operations: *const c_void,
}

type HandleRegister = unsafe extern "C" fn(*mut *mut c_void, *mut Description) -> Status;
type HandleDeregister = unsafe extern "C" fn(*mut c_void);
type BufferRegister = unsafe extern "C" fn(*const c_void, usize, c_int) -> Status;
type BufferDeregister = unsafe extern "C" fn(*const c_void) -> Status;
type Read = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, i64, i64) -> isize;

/// A file that the library knows.
struct Handle {
    raw: *mut c_void,
    deregister: HandleDeregister,
    read: Read,
}

// SAFETY: a handle of a library that may be called with it from any thread.
unsafe impl Sync for Handle {}

impl Handle {
    fn read(&self, to: &DeviceBuffer, offset: i64) -> io::Result<()> {
        // SAFETY: a registered file, and registered memory that only one thread uses.
        let read = unsafe { (self.read)(self.raw, to.base().as_ptr().cast(), to.bytes(), offset, 0) };
        if read == to.bytes() as isize {
            return Ok(());
        }
        Err(other(format!("cuFileRead: found {read}, expected {} bytes", to.bytes())))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: registered once, deregistered once, when no read is in flight.
        unsafe { (self.deregister)(self.raw) };
    }
}

/// A thread's block on the device, registered.
struct Lane {
    buffer: DeviceBuffer,
    deregister: BufferDeregister,
}

impl Drop for Lane {
    fn drop(&mut self) {
        // SAFETY: registered once, deregistered once, before the memory goes.
        unsafe { (self.deregister)(self.buffer.base().as_ptr().cast()) };
    }
}

/// A function of the library by its name. `F` must be its type.
fn find<F: Copy>(name: &CStr) -> io::Result<F> {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>(), "a function");
    let loaded = |library: &CStr| {
        // SAFETY: a name; looks up what is loaded and loads nothing.
        unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) }
    };
    let library = [c"libcufile.so.0", c"libcufile.so"].map(loaded).into_iter().find(|library| !library.is_null());
    let library = library.ok_or_else(|| other("libcufile is loaded under another name"))?;
    // SAFETY: a handle of a loaded library and a name.
    let function = unsafe { libc::dlsym(library, name.as_ptr()) };
    if function.is_null() {
        return Err(other(format!("libcufile has no {name:?}")));
    }
    // SAFETY: a function of that name, whose type is `F`; as long as a pointer, as was asserted.
    Ok(unsafe { std::mem::transmute_copy(&function) })
}

fn succeeded(call: &str, status: Status) -> io::Result<()> {
    if status.status == 0 { Ok(()) } else { Err(other(format!("{call}: {status:?}"))) }
}

/// `cuFileRead` into registered memory from [`THREADS`] threads.
///
/// # Errors
/// Without the library or a device, or where the library refuses the file (5027: no record of the block device in
/// `/run/udev/data`).
pub fn read(places: Places<'_>) -> io::Result<Entrant<'_>> {
    let gpu = Gpu::open(0).map_err(other)?;
    gpu.make_current().map_err(other)?;
    Driver::open(OPEN_MAX).map_err(other)?;
    let register: BufferRegister = find(c"cuFileBufRegister")?;
    let lane = |_| {
        let buffer = DeviceBuffer::new(gpu.clone(), places.block_bytes).map_err(other)?;
        let deregister = find(c"cuFileBufDeregister")?;
        // SAFETY: device memory of that length, which the lane deregisters before it goes.
        let status = unsafe { register(buffer.base().as_ptr().cast(), places.block_bytes, 0) };
        succeeded("cuFileBufRegister", status)?;
        Ok(Lane { buffer, deregister })
    };
    let lanes = (0..THREADS).map(lane).collect::<io::Result<Vec<_>>>()?;
    let handle = handle(places)?;
    let one = move |lane: &Lane, block: u64| {
        handle.read(&lane.buffer, (places.data_offset + block * places.block_bytes as u64) as i64)
    };
    let look = |lane: &Lane| check_on_device(&lane.buffer);
    Ok(threads(format!("cuFileRead, {THREADS} threads"), gpu, (places.blocks, places.block_bytes), lanes, one, look))
}

fn handle(places: Places<'_>) -> io::Result<Handle> {
    let register: HandleRegister = find(c"cuFileHandleRegister")?;
    let (deregister, read) = (find(c"cuFileHandleDeregister")?, find(c"cuFileRead")?);
    let descriptor = places.file.as_raw_fd() as u64;
    // CU_FILE_HANDLE_TYPE_OPAQUE_FD.
    let mut description = Description { kind: 1, descriptor, operations: std::ptr::null() };
    let mut raw = std::ptr::null_mut();
    // SAFETY: one handle is written; the description is read during the call.
    succeeded("cuFileHandleRegister", unsafe { register(&mut raw, &mut description) })?;
    Ok(Handle { raw, deregister, read })
}

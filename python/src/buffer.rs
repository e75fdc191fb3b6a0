//! Buffer objects: the memory of bytes, bytearray, memoryview, numpy arrays and whatever else exports it.
//!
//! The stable interface of Python has these functions since 3.11. Python 3.10 exports the same functions with the same
//! structure, which has not changed since 3.0, so they are declared here.

use std::{
    ffi::{c_char, c_int, c_void},
    mem::ManuallyDrop,
    ptr,
};

use kvhoist::Segment;
use pyo3::{PyTraverseError, PyVisit, ffi, prelude::*};

#[repr(C)]
struct RawBuffer {
    buf: *mut c_void,
    /// The exporter. Null once it was released, which `None` is.
    obj: ManuallyDrop<Option<Py<PyAny>>>,
    len: ffi::Py_ssize_t,
    itemsize: ffi::Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut ffi::Py_ssize_t,
    strides: *mut ffi::Py_ssize_t,
    suboffsets: *mut ffi::Py_ssize_t,
    internal: *mut c_void,
}

/// A plain view: contiguous bytes, without shape or format.
const PLAIN: c_int = 0;
const WRITABLE: c_int = 1;

// SAFETY: CPython's own declarations (`Include/pybuffer.h`), the same in every version that this module loads into.
unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawBuffer);
}

/// The exported memory of an object, whose address and size do not change until this is dropped.
pub struct Buffer {
    /// On the heap: an exporter may keep its address.
    raw: Box<RawBuffer>,
}

// SAFETY: an export belongs to no thread; its only use of the interpreter, the release, takes the lock.
unsafe impl Send for Buffer {}
// SAFETY: as above; shared access reads plain numbers.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Exports `object`'s memory, as contiguous bytes; to be written to if `writable`.
    ///
    /// # Errors
    /// The exporter's own: no buffer, not contiguous, read-only.
    pub fn new(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let mut raw = Box::new(RawBuffer {
            buf: ptr::null_mut(),
            obj: ManuallyDrop::new(None),
            len: 0,
            itemsize: 0,
            readonly: 0,
            ndim: 0,
            format: ptr::null_mut(),
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            suboffsets: ptr::null_mut(),
            internal: ptr::null_mut(),
        });
        // SAFETY: the interpreter's lock is held (`object` is bound to it), and `raw` is what the function fills.
        let result =
            unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *raw, if writable { WRITABLE } else { PLAIN }) };
        if result != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Buffer { raw })
    }

    /// Shows the exporter to the collector of cycles; but no memoryview, which CPython before 3.11.9 and 3.12.3 clears
    /// although it is exported, so that its release crashes (python/cpython#77894). A cycle with one stays until its
    /// transfers have ended.
    pub fn visit(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let exporter = self.raw.obj.as_ref();
        // SAFETY: a look at the type of an object that lives, in the collector, which has the interpreter's lock.
        let is_view = exporter.is_some_and(|object| unsafe { ffi::PyMemoryView_Check(object.as_ptr()) } != 0);
        if is_view { Ok(()) } else { visit.call(&*self.raw.obj) }
    }

    /// Its first byte.
    pub fn ptr(&self) -> *mut u8 {
        self.raw.buf.cast()
    }

    /// All of it.
    pub fn segment(&self) -> Segment {
        Segment { ptr: self.ptr(), len: self.len() }
    }

    /// Its bytes.
    pub fn len(&self) -> usize {
        usize::try_from(self.raw.len).unwrap_or(0)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Where there is no interpreter any longer the export stays, and the memory with it.
        let _ = Python::try_attach(|_py| {
            // SAFETY: filled by a successful call and released once, with the interpreter's lock held.
            unsafe { PyBuffer_Release(&raw mut *self.raw) };
        });
    }
}

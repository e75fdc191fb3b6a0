//! Ranges of files, and headers of safetensors files, for `kvhoist.files` and `kvhoist.safetensors`.

use std::{
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use kvhoist_files::{Canceller, Error, Memory, Mode, Options, Range, Report, SourceFile, Transfer, safetensors};
use kvhoist_service::FileClient;
use pyo3::{prelude::*, types::PyDict};

use crate::{
    buffer::Buffer,
    errors,
    process::ProcessLocal,
    wait::{SIGNALS_EVERY, interruptible},
};

/// A range of a file: its file's number, first byte there, first byte in memory, length.
type RawRange = (usize, u64, usize, usize);

/// Threads, bytes of the longest request, whether the page cache is asked, how reads come into device memory.
type Settings = (Option<usize>, Option<usize>, bool, String);

/// The exported memory of a buffer object.
#[pyclass(frozen, module = "kvhoist._native")]
pub struct FileMemory(Buffer);

#[pymethods]
impl FileMemory {
    #[new]
    fn new(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        Buffer::new(object, writable).map(FileMemory)
    }

    /// Its first byte.
    #[getter]
    fn address(&self) -> usize {
        self.0.ptr() as usize
    }

    /// Its size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.len()
    }
}

/// A file to be read.
#[pyclass(frozen, module = "kvhoist._native")]
pub struct FileSource(Option<SourceFile>);

impl FileSource {
    fn of(file: SourceFile) -> Self {
        FileSource(Some(file))
    }

    fn file(&self) -> &SourceFile {
        self.0.as_ref().expect("taken only by the drop")
    }
}

impl Drop for FileSource {
    fn drop(&mut self) {
        let file = self.0.take();
        // One that a service holds is let go of, which waits for another request to it: others need not wait for that.
        _ = Python::try_attach(|py| py.detach(|| drop(file)));
    }
}

#[pymethods]
impl FileSource {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| SourceFile::open(path)).map(FileSource::of).map_err(|error| to_python(py, &error))
    }

    /// The same file, as it is now.
    fn renewed(&self, py: Python<'_>) -> PyResult<Self> {
        py.detach(|| self.file().renewed()).map(FileSource::of).map_err(|error| to_python(py, &error))
    }

    /// Its length in bytes when it was opened.
    #[getter]
    fn size(&self) -> u64 {
        self.file().size()
    }

    /// What changes with another file, or another version of it, in its place: the inode, the length, and the last
    /// change in seconds and nanoseconds. The device is left out: processes in containers number it in other ways.
    #[getter]
    fn version(&self) -> (u64, u64, i64, i64) {
        let identity = self.file().identity();
        (identity.inode, identity.size, identity.changed_s, identity.changed_ns)
    }

    /// As [`SourceFile::direct_align`].
    #[getter]
    fn direct_align(&self) -> Option<u64> {
        self.file().direct_align()
    }

    /// The header of a safetensors file: tensors as (name, type, shape, first byte, bytes), what the file says of
    /// itself, and the first byte of the tensors.
    #[expect(clippy::type_complexity)] // Python's types
    fn tensors(
        &self,
        py: Python<'_>,
    ) -> PyResult<(Vec<(String, String, Vec<usize>, u64, usize)>, Vec<(String, String)>, u64)> {
        let header = py.detach(|| safetensors::header(self.file())).map_err(|error| to_python(py, &error))?;
        let tensors = header.tensors.into_iter().map(|one| (one.name, one.dtype, one.shape, one.offset, one.len));
        Ok((tensors.collect(), header.metadata, header.data_offset))
    }
}

/// A connection to a node's service that holds files.
#[pyclass(frozen, module = "kvhoist._native")]
pub struct FileService(FileClient);

#[pymethods]
impl FileService {
    #[new]
    fn new(py: Python<'_>, socket: PathBuf) -> PyResult<Self> {
        py.detach(|| FileClient::connect(socket)).map(FileService).map_err(|error| errors::to_python(py, &error))
    }

    /// The file, whose bytes come from the service's memory as far as they are there.
    fn hold(&self, py: Python<'_>, file: &FileSource, keep: bool) -> PyResult<FileSource> {
        let held = py.detach(|| self.0.hold(file.file(), keep));
        held.map(FileSource::of).map_err(|error| errors::to_python(py, &error))
    }
}

/// Ranges on their way.
#[pyclass(frozen, module = "kvhoist._native")]
pub struct FileTransfer {
    transfer: ProcessLocal<Mutex<Option<Transfer>>>,
    canceller: Canceller,
    /// What keeps their memory. Dropped after the transfer.
    _kept: Py<PyAny>,
}

#[pymethods]
impl FileTransfer {
    /// The numbers of ranges that have arrived since it was last asked, once there are some; none if none has within so
    /// many seconds; `None` after the last.
    #[pyo3(signature = (seconds = f64::INFINITY))]
    fn next_ranges(&self, py: Python<'_>, seconds: f64) -> PyResult<Option<Vec<usize>>> {
        let begun = Instant::now();
        let lock = self.lock(py)?;
        loop {
            let left = seconds - begun.elapsed().as_secs_f64();
            let timeout =
                Duration::try_from_secs_f64(left.max(0.0)).map_or(SIGNALS_EVERY, |left| left.min(SIGNALS_EVERY));
            let found = py.detach(|| match &*lock() {
                Some(transfer) => transfer.next_ranges(timeout),
                None => None,
            });
            match found {
                // Ended if a signal handler raises: its memory may be gone with the exception.
                Some(ranges) if ranges.is_empty() && left > 0.0 => {
                    py.check_signals().inspect_err(|_| py.detach(|| drop(lock().take())))?;
                }
                found => return Ok(found),
            }
        }
    }

    /// Waits for the end, and returns what was moved and how.
    fn wait(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        let lock = self.lock(py)?;
        let Some(transfer) = py.detach(|| lock().take()) else {
            return Err(errors::argument(py, "transfer", "one that was waited for", "one wait"));
        };
        let report = interruptible(py, transfer)?.map_err(|error| to_python(py, &error))?;
        to_dict(py, &report)
    }

    /// Begins no more requests, also while another thread waits for the end.
    fn cancel(&self) {
        self.canceller.cancel();
    }

    /// Bytes that have arrived, and all.
    fn progress(&self, py: Python<'_>) -> PyResult<Option<(u64, u64)>> {
        let lock = self.lock(py)?;
        let progress = py.detach(|| lock().as_ref().map(Transfer::progress));
        Ok(progress.map(|progress| (progress.bytes, progress.bytes_total)))
    }
}

impl FileTransfer {
    /// A transfer whose memory `kept` keeps.
    fn of(py: Python<'_>, transfer: kvhoist_files::Result<Transfer>, kept: Py<PyAny>) -> PyResult<Self> {
        let transfer = transfer.map_err(|error| to_python(py, &error))?;
        let canceller = transfer.canceller();
        Ok(FileTransfer { transfer: ProcessLocal::new(Mutex::new(Some(transfer))), canceller, _kept: kept })
    }

    /// What locks the transfer; an error in a forked child, whose parent may have held the lock.
    fn lock<'a>(&'a self, py: Python<'_>) -> PyResult<impl Fn() -> MutexGuard<'a, Option<Transfer>>> {
        let Some(transfer) = self.transfer.here() else {
            let message = "found a transfer of the process that forked this one, expected one of its own: its threads \
                           did not come along; read again in the child";
            return Err(errors::exception(py, "ForkError", message));
        };
        Ok(|| transfer.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for FileTransfer {
    fn drop(&mut self) {
        let Some(transfer) = self.transfer.here() else { return };
        let transfer = transfer.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Its threads need no interpreter, and others need not wait for them.
        _ = Python::try_attach(|py| py.detach(|| drop(transfer)));
    }
}

/// Starts to read ranges of files into memory, of a device where one is named.
#[pyfunction]
pub fn files_read(
    py: Python<'_>,
    files: Vec<PyRef<'_, FileSource>>,
    ranges: Vec<RawRange>,
    device: Option<u32>,
    settings: Settings,
    kept: Py<PyAny>,
) -> PyResult<FileTransfer> {
    let files = files.iter().map(|file| file.file().clone()).collect();
    let (ranges, memory, options) = (to_ranges(ranges), memory(device), options(py, settings)?);
    // SAFETY: `kept` keeps the memory, and is dropped after the transfer.
    let transfer = py.detach(|| unsafe { kvhoist_files::read(files, ranges, memory, &options) });
    FileTransfer::of(py, transfer, kept)
}

/// Starts to write a file of pieces of memory: (first byte, length).
#[pyfunction]
pub fn files_write(
    py: Python<'_>,
    path: PathBuf,
    pieces: Vec<(usize, usize)>,
    device: Option<u32>,
    settings: Settings,
    kept: Py<PyAny>,
) -> PyResult<FileTransfer> {
    let options = options(py, settings)?;
    // SAFETY: as in `files_read`.
    let transfer = py.detach(|| unsafe { kvhoist_files::write(path, &pieces, memory(device), &options) });
    FileTransfer::of(py, transfer, kept)
}

/// Starts to write ranges of an open file in place.
#[pyfunction]
pub fn files_write_at(
    py: Python<'_>,
    file: &FileSource,
    ranges: Vec<RawRange>,
    device: Option<u32>,
    settings: Settings,
    kept: Py<PyAny>,
) -> PyResult<FileTransfer> {
    let (ranges, options) = (to_ranges(ranges), options(py, settings)?);
    // SAFETY: as in `files_read`.
    let transfer = py.detach(|| unsafe { kvhoist_files::write_into(file.file(), &ranges, memory(device), &options) });
    FileTransfer::of(py, transfer, kept)
}

fn memory(device: Option<u32>) -> Memory {
    device.map_or(Memory::Host, Memory::Cuda)
}

fn to_ranges(ranges: Vec<RawRange>) -> Vec<Range> {
    ranges.into_iter().map(|(file, offset, address, len)| Range { file, offset, len, address }).collect()
}

fn options(py: Python<'_>, (threads, piece_bytes, page_cache, mode): Settings) -> PyResult<Options> {
    let mut options = Options::default();
    options.threads = threads;
    options.piece_bytes = piece_bytes;
    options.page_cache = page_cache;
    options.mode = match mode.as_str() {
        "auto" => Mode::Auto,
        "bounce" => Mode::Bounce,
        "cufile" => Mode::Cufile,
        _ => return Err(errors::argument(py, "mode", format!("{mode:?}"), "'auto', 'bounce' or 'cufile'")),
    };
    Ok(options)
}

fn to_dict(py: Python<'_>, report: &Report) -> PyResult<Py<PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("nbytes", report.bytes)?;
    dict.set_item("seconds", report.seconds)?;
    dict.set_item("page_cache_bytes", report.page_cache_bytes)?;
    dict.set_item("direct_bytes", report.direct_bytes)?;
    dict.set_item("buffered_bytes", report.buffered_bytes)?;
    dict.set_item("held_bytes", report.held_bytes)?;
    dict.set_item("cufile_bytes", report.cufile_bytes)?;
    dict.set_item("bounced_bytes", report.bounced_bytes)?;
    Ok(dict.unbind())
}

/// The exception for an error of a transfer.
fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let (name, errno) = match error {
        Error::Io { source, .. } => ("IoError", source.raw_os_error()),
        Error::Changed { .. } => ("IoError", None),
        Error::NoFile { .. } | Error::OutOfFile { .. } | Error::Format { .. } | Error::Argument(_) => {
            ("ArgumentError", None)
        }
        Error::Device(_) => ("UnavailableError", None),
        Error::Cancelled => ("CancelledError", None),
        _ => ("Error", None),
    };
    let exception = errors::exception(py, name, &error.to_string());
    let detail = errno.map_or(Ok(()), |errno| exception.value(py).setattr("errno", errno));
    detail.err().unwrap_or(exception)
}

//! The native half of the Python package `kvhoist`: the parts that need the engine or the interpreter's C interface.
//!
//! Every wait releases the interpreter's lock. The public interface is documented in
//! `kvhoist/_native.pyi` and in the Python half, which is thin on top of this.

mod answers;
mod blocks;
mod buffer;
mod cache;
mod client;
mod client_queue;
mod command;
mod convert;
mod errors;
mod files;
mod keys;
mod layers;
mod listing;
mod logs;
mod opened;
mod options;
mod process;
mod queue;
mod region;
mod wait;

use std::path::PathBuf;

use pyo3::prelude::*;

/// The native half of the package; use `kvhoist` instead.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("BYTES_EXPECTED", kvhoist::internals::size::EXPECTED)?;
    module.add("ENGINES", kvhoist::internals::device::engines_in_words())?;
    module.add_function(wrap_pyfunction!(parse_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(path_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(default_socket, module)?)?;
    module.add_function(wrap_pyfunction!(slots_on_each, module)?)?;
    module.add_function(wrap_pyfunction!(options::setting_names, module)?)?;
    module.add_function(wrap_pyfunction!(command::run_command, module)?)?;
    module.add_function(wrap_pyfunction!(machine_sizes, module)?)?;
    module.add_function(wrap_pyfunction!(is_on_root, module)?)?;
    module.add_function(wrap_pyfunction!(huge_pool_advice, module)?)?;
    module.add_function(wrap_pyfunction!(convert::metrics, module)?)?;
    module.add_class::<cache::PyCache>()?;
    module.add_class::<client::PyClient>()?;
    module.add_class::<listing::PyKeys>()?;
    module.add_class::<queue::PyQueue>()?;
    module.add_class::<region::PyRegion>()?;
    module.add_class::<answers::PyAnswers>()?;
    module.add_class::<layers::PyLayerLoad>()?;
    module.add_class::<layers::PyHeld>()?;
    module.add_class::<files::FileMemory>()?;
    module.add_class::<files::FileService>()?;
    module.add_class::<files::FileSource>()?;
    module.add_class::<files::FileTransfer>()?;
    module.add_function(wrap_pyfunction!(files::files_read, module)?)?;
    module.add_function(wrap_pyfunction!(files::files_write, module)?)?;
    module.add_function(wrap_pyfunction!(files::files_write_at, module)?)?;
    module.add_function(wrap_pyfunction!(keys::chunk_keys, module)?)?;
    module.add_function(wrap_pyfunction!(logs::logs_take, module)?)?;
    module.add_function(wrap_pyfunction!(logs::logs_end, module)?)?;
    module.add_function(wrap_pyfunction!(logs::logs_renew, module)?)?;
    logs::subscribe();
    Ok(())
}

/// As [`kvhoist::internals::size::parse_bytes`].
#[pyfunction]
fn parse_bytes(text: &str) -> Option<u64> {
    kvhoist::internals::size::parse_bytes(text)
}

/// As [`kvhoist_service::default_socket`].
#[pyfunction]
fn default_socket() -> String {
    kvhoist_service::default_socket().to_string_lossy().into_owned()
}

/// As [`kvhoist::DiskPath::file_bytes`].
#[pyfunction]
fn path_bytes(slots: u64, block_bytes: u64) -> u64 {
    kvhoist::DiskPath::file_bytes(slots, block_bytes)
}

/// As [`kvhoist::DiskPath::blocks_on_each`].
#[pyfunction]
fn slots_on_each(py: Python<'_>, capacity: u64, paths: usize, block_bytes: u64) -> PyResult<u32> {
    kvhoist::DiskPath::blocks_on_each(capacity, paths, block_bytes).map_err(|error| errors::to_python(py, &error))
}

/// The disk that stores on these paths can have, and the memory that this process can, bytes; `None` where the system
/// does not tell.
#[pyfunction]
fn machine_sizes(paths: Vec<PathBuf>) -> (Option<u64>, Option<u64>) {
    (kvhoist_doctor::disk_bytes(&paths), kvhoist_doctor::memory_bytes())
}

/// Whether a path lies on the root file system.
#[pyfunction]
fn is_on_root(path: PathBuf) -> bool {
    kvhoist_doctor::is_on_root(&path)
}

/// What puts the pool of this version of an engine into huge pages.
#[pyfunction]
fn huge_pool_advice(engine: &str, version: &str) -> Option<&'static str> {
    kvhoist_doctor::huge_pool_advice(engine, version)
}

//! The native half of the Python package `kvhoist`: what needs the engine or the interpreter's C interface.
//!
//! Everything that waits does so without the interpreter's lock. What people call is documented in
//! `kvhoist/_native.pyi` and in the Python half, which is thin on top of this.

mod blocks;
mod buffer;
mod cache;
mod convert;
mod errors;
mod keys;
mod logs;
mod options;
mod process;
mod queue;
mod region;
mod wait;

use pyo3::prelude::*;

/// The native half of the package; use `kvhoist` instead.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<cache::PyCache>()?;
    module.add_class::<queue::PyQueue>()?;
    module.add_class::<region::PyRegion>()?;
    module.add_function(wrap_pyfunction!(logs::logs_take, module)?)?;
    module.add_function(wrap_pyfunction!(logs::logs_end, module)?)?;
    module.add_function(wrap_pyfunction!(logs::logs_renew, module)?)?;
    logs::subscribe();
    Ok(())
}

//! What a build without the cargo feature `cuda` has in place of `cuda`: errors.

use std::{fs::File, io};

use kvhoist::internals::{gpu::Gpu, memory::DeviceMemory};

use crate::{drive::other, measure::Entrant, peers::Places};

/// As with the feature.
///
/// # Errors
/// Always.
pub fn memory(_bytes: usize) -> io::Result<Box<dyn DeviceMemory>> {
    Err(absent())
}

/// As with the feature.
///
/// # Errors
/// Always.
pub fn pread_and_copy(_places: Places<'_>) -> io::Result<Entrant<'_>> {
    Err(absent())
}

/// As with the feature.
///
/// # Errors
/// Always.
pub fn pread_and_copy_of<'a>(
    _blocks: (u64, usize),
    _sums: bool,
    _place: impl Fn(u64) -> (&'a File, u64) + Sync + 'a,
) -> io::Result<Entrant<'a>> {
    Err(absent())
}

fn absent() -> io::Error {
    // There is one where another crate of the build has the feature.
    Gpu::open(0).map_or_else(other, |_| other("the benches were built without the cargo feature `cuda`"))
}

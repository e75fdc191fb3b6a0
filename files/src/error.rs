//! What went wrong, with the file and the place.

use std::{io, path::PathBuf, sync::Arc};

/// Why a file could not be read or written.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused an operation on a file.
    #[error("{op} {path}: {source}")]
    Io {
        /// What was tried: `open`, `read`, `write`, ...
        op: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: Arc<io::Error>,
    },
    /// The path names no file and no block device.
    #[error("{path}: found {found}, expected a file or a block device")]
    NoFile {
        /// The path.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// A range does not lie in its file.
    #[error("{path}: found a range from {offset} to {end}, expected one in the file's {size} bytes")]
    OutOfFile {
        /// The file.
        path: PathBuf,
        /// The range's start.
        offset: u64,
        /// The range's end.
        end: u128,
        /// The file's length.
        size: u64,
    },
    /// The file was written to, shortened or lengthened while it was read: what was read is of no use.
    #[error("{path}: the file was changed while it was read; read it again once its writer has finished")]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The file is no safetensors file, or a damaged one.
    #[error("{path}: {problem}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What was found and what was expected.
        problem: String,
    },
    /// A wrong argument.
    #[error("{0}")]
    Argument(String),
    /// The device cannot be used, or refused a copy.
    #[error("the device: {0}")]
    Device(String),
    /// The transfer was cancelled.
    #[error("the transfer was cancelled")]
    Cancelled,
}

impl Error {
    pub(crate) fn io(op: &'static str, path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        Error::Io { op, path: path.into(), source: Arc::new(source.into()) }
    }
}

//! The errors of the library, which are the service's too.

pub(crate) use kvhoist::{Error, ServiceFault};

/// The result type of this crate's fallible functions.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

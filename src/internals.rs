//! What only this project's tools, tests, fuzzers and benches use. No promise holds for it: anything here may change in
//! any release.

#[cfg(feature = "sim")]
pub use crate::cache::seams;
#[cfg(feature = "rdma")]
pub use crate::device::rdma;
pub use crate::{
    cache::{pin_region, validate},
    device::cuda as gpu,
};

/// The state of a service, for the program that runs it, and the bytes on its socket.
pub mod service {
    pub use crate::service::report::{OpenSpace, ServiceReport};

    #[cfg(feature = "sim")]
    pub mod seams {
        pub use crate::service::seams::*;
    }

    pub mod protocol {
        pub use crate::service::protocol::*;
    }
}

pub mod error {
    /// The error with the names that a layer's users know its settings by: `("disks.blocks", "capacity")` makes it
    /// mention `capacity`. Replaces the error's field, and names in backticks in its text.
    pub fn with_settings_named(error: crate::Error, names: &[(&'static str, &'static str)]) -> crate::Error {
        error.with_settings_named(names)
    }
}

macro_rules! export {
    ($($module:ident)*) => {
        $(pub mod $module {
            pub use crate::$module::*;
        })*
    };
}

export! { block checksum config device disk index io machine memory size }

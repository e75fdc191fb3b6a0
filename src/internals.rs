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

/// What the node's service (`kvhoist-service`) takes beyond the public API, with the hidden methods of its types.
pub mod service {
    pub use crate::{
        cache::{LayerReports, MemoryOwner, Parked, Ranges},
        config::HeldFile,
        device::{
            check_device_of,
            cuda::{Gates, Gpu, IPC_HANDLE_BYTES, ImportedMemory, discover, uuid_text},
        },
        fork::{Home, HomeBound},
        memory::{Guard, MemoryKind},
        shield::shield,
        state::KeepWalk,
    };
}

/// What `kvhoist remote verify` reads objects by.
pub mod remote {
    pub use crate::remote::format::blocks_of_object;
}

/// What exporters of a cache's figures show.
pub mod exported {
    pub use crate::cache::{Kind, Metric, Sample, WEAR, metrics};
}

macro_rules! export {
    ($($module:ident)*) => {
        $(pub mod $module {
            pub use crate::$module::*;
        })*
    };
}

export! { block checksum config device disk index io machine memory size }

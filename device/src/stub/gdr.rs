//! What a build without the cargo feature `rdma` has in place of the engine that copies through an RDMA device: a type
//! without values.

#![expect(missing_docs, reason = "said in the module that this one stands in for")]

use std::{sync::Arc, time::Duration};

use kvhoist_base::{
    error::{Error, Result},
    memory::{Arena, DeviceMemory},
};

use crate::{CopyBatch, CopyEngine, EngineMode, GdrOptions, GdrStatus, Offered, cuda::Gpu, not_built};

/// The engine that copies through an RDMA device: none in this build.
pub enum GdrCopy {}

impl GdrCopy {
    pub async fn open_for(
        _mode: EngineMode,
        _options: &GdrOptions,
        _arena: &Arc<Arena>,
        _pool: Arc<dyn DeviceMemory>,
        _gpu: Option<Arc<Gpu>>,
    ) -> Result<Self> {
        Err(Error::unavailable("gdr", not_built("rdma")))
    }

    pub fn is_up(&self) -> bool {
        match *self {}
    }

    pub fn status(&self) -> &GdrStatus {
        match *self {}
    }

    pub async fn offer(&self, _batch: CopyBatch) -> Offered {
        match *self {}
    }
}

impl CopyEngine for GdrCopy {
    fn name(&self) -> &'static str {
        match *self {}
    }

    async fn copy(&self, _batch: CopyBatch) -> (Result<()>, CopyBatch) {
        match *self {}
    }

    fn cost(&self, _batch: &CopyBatch) -> Duration {
        match *self {}
    }
}

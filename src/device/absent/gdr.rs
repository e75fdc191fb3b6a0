//! What a build without the cargo feature `rdma` has in place of the engine that copies through an RDMA device: a type
//! without values.

use std::{sync::Arc, time::Duration};

use crate::{
    config::DeviceConfig,
    device::{CopyBatch, CopyEngine, GdrStatus, Offered, cuda::Gpu, not_built},
    error::{Error, Result},
    memory::{Arena, DeviceMemory},
};

/// The engine that copies through an RDMA device: none in this build.
pub enum GdrCopy {}

impl GdrCopy {
    pub(crate) async fn open_for(
        _config: &DeviceConfig,
        _arena: &Arc<Arena>,
        _pool: Arc<dyn DeviceMemory>,
        _gpu: Option<Arc<Gpu>>,
    ) -> Result<Self> {
        Err(Error::unavailable("gdr", not_built("rdma")))
    }

    pub(crate) fn is_up(&self) -> bool {
        match *self {}
    }

    pub(crate) fn status(&self) -> &GdrStatus {
        match *self {}
    }

    pub(crate) async fn offer(&self, _batch: CopyBatch) -> Offered {
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

//! The device tier and what copies to it: a CUDA device, or host memory that plays one.

use std::sync::Arc;

use crate::{
    block::Layout,
    config::{Config, DeviceKind},
    copy::{
        AnyCopy, Memcpy,
        cuda::{CopyMethod, CudaCopy, CudaCopyOptions},
    },
    error::{Error, Result},
    gpu::{DeviceBuffer, Gpu},
    tier::{
        arena::Arena,
        device::{DevicePool, PoolLayout},
    },
};

/// The variable that goes before [`Config::copy`].
const COPY_VARIABLE: &str = "KVHOIST_COPY";

/// Opens the device that `config` wants.
pub(super) fn open(config: &Config, arena: &Arc<Arena>) -> Result<(Option<DevicePool>, Option<Arc<Gpu>>, AnyCopy)> {
    let simulated = || Ok((simulated(config)?, None, AnyCopy::Memcpy(Memcpy::new())));
    if config.device_blocks == 0 || config.device == DeviceKind::Simulated {
        return simulated();
    }
    let options = CudaCopyOptions { method: method(config)?, blocks_max: config.copy_blocks_max };
    match Gpu::open(config.device_ordinal) {
        Ok(gpu) => {
            let layout = PoolLayout::new(config.device_blocks, layout(config)?)?;
            let memory = DeviceBuffer::new(Arc::clone(&gpu), layout.bytes())?;
            let copy = CudaCopy::new(&gpu, arena, options)?;
            tracing::info!(device = %gpu.device(), slots = config.device_blocks, "the device tier is a CUDA device");
            Ok((Some(DevicePool::new(Box::new(memory), layout)?), Some(gpu), AnyCopy::Cuda(copy)))
        }
        Err(error) if config.device == DeviceKind::Auto => {
            tracing::warn!(%error, "the device tier is simulated in host memory");
            simulated()
        }
        Err(error) => Err(error),
    }
}

fn layout(config: &Config) -> Result<Layout> {
    match &config.device_layout {
        Some(layout) => Ok(layout.clone()),
        None => Layout::contiguous(config.block_bytes),
    }
}

/// The pool in host memory, if there is to be one.
pub(super) fn simulated(config: &Config) -> Result<Option<DevicePool>> {
    match config.device_blocks {
        0 => Ok(None),
        slots => DevicePool::simulated(slots, layout(config)?).map(Some),
    }
}

fn method(config: &Config) -> Result<Option<CopyMethod>> {
    match std::env::var_os(COPY_VARIABLE) {
        None => Ok(config.copy),
        Some(name) if name == "auto" => Ok(None),
        Some(name) => name.to_str().and_then(CopyMethod::from_name).map(Some).ok_or_else(|| Error::Config {
            field: COPY_VARIABLE,
            found: name.to_string_lossy().into_owned(),
            expected: "auto, loop, batch or kernel".into(),
        }),
    }
}

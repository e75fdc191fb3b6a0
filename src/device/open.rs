//! Opens the device tier (a CUDA device, or a simulated one) and its copy engine, with an RDMA device beside it.

use std::{sync::Arc, time::Duration};

use serde::de::{DeserializeOwned, IntoDeserializer, value};

use super::{
    AnyCopy, CudaCopyOptions, DevicePool, GdrOptions, GdrState, GdrStatus, Memcpy, PoolLayout, cuda::Gpu, gdr::GdrCopy,
};
use crate::{
    block::Layout,
    config::{Config, CopyMethod, DeviceConfig, DeviceKind, EngineMode},
    error::{Error, Result},
    memory::Arena,
    metrics::CopyMetrics,
    shield::log,
};

/// The environment variable that takes precedence over [`DeviceConfig::copy`].
const COPY_VARIABLE: &str = "KVHOIST_COPY";

/// The environment variable that takes precedence over [`DeviceConfig::gdr`].
const GDR_VARIABLE: &str = "KVHOIST_GDR";

/// Device memory is exported to RDMA devices in pages of this size.
const DEVICE_PAGE_BYTES: usize = 2 << 20;

/// The opened device tier.
pub(crate) struct Opened {
    /// The slots, if there is a device tier.
    pub(crate) pool: Option<DevicePool>,
    pub(crate) gpu: Option<Arc<Gpu>>,
    pub(crate) copy: AnyCopy,
    pub(crate) gdr: GdrStatus,
}

/// Opens the device tier of `config`.
pub(crate) async fn open(
    config: &Config,
    arena: &Arc<Arena>,
    metrics: &Arc<CopyMetrics>,
    host_copies: Memcpy,
) -> Result<Opened> {
    let device = DeviceConfig { gdr: gdr_mode(config)?, ..config.device.clone() };
    let (pool, gpu, copy) = open_base(config, arena, device.gdr, metrics, host_copies)?;
    let off = |reason: &str| GdrStatus::new(GdrState::Off(reason.into()));
    let memory = match (device.gdr, &pool, &gpu) {
        (EngineMode::Off, ..) => Err("it is set to off"),
        (EngineMode::On, None, _) => {
            return Err(Error::config(
                "gdr",
                "on, without a device tier",
                "device_blocks of 1 at least, or gdr = auto or off",
            ));
        }
        (_, None, _) => Err("there is no device tier"),
        (EngineMode::Auto, _, None) => Err("the device is simulated in host memory, which the processor copies faster"),
        (_, Some(pool), _) => Ok(pool.shared_memory()),
    };
    let memory = match memory {
        Ok(memory) => memory,
        Err(reason) => return Ok(Opened { pool, gpu, copy, gdr: off(reason) }),
    };
    let options = GdrOptions {
        device: device.gdr_device,
        stuck_after: Duration::from_millis(device.gdr_stuck_ms),
        ..GdrOptions::default()
    };
    match GdrCopy::open_for(device.gdr, &options, arena, memory, gpu.clone()).await {
        Ok(engine) => {
            let gdr = engine.status().clone();
            let copy = copy.with_gdr(engine, device.gdr, device.copy_prefer);
            Ok(Opened { pool, gpu, copy, gdr })
        }
        Err(error) if device.gdr == EngineMode::Auto => {
            let reason = match error {
                Error::Unavailable { reason, .. } => reason,
                other => other.to_string(),
            };
            log(|| tracing::debug!(reason, "no copies go through an RDMA device"));
            Ok(Opened { pool, gpu, copy, gdr: off(&reason) })
        }
        Err(error) => Err(error),
    }
}

type Base = (Option<DevicePool>, Option<Arc<Gpu>>, AnyCopy);

fn open_base(
    config: &Config,
    arena: &Arc<Arena>,
    gdr: EngineMode,
    metrics: &Arc<CopyMetrics>,
    host_copies: Memcpy,
) -> Result<Base> {
    let simulated = || Ok((simulated(config)?, None, AnyCopy::new(host_copies.clone(), Arc::clone(metrics))));
    if config.device_slots() == 0 || config.device.kind == DeviceKind::Simulated {
        return simulated();
    }
    let options = CudaCopyOptions { method: method(config)?, blocks_max: config.device.copy_blocks_max };
    match Gpu::open(config.device.ordinal) {
        Ok(gpu) => {
            let layout = PoolLayout::new(config.device_slots(), layout(config)?)?;
            let page = if gdr == EngineMode::Off { 1 } else { DEVICE_PAGE_BYTES };
            let bytes = layout.bytes().next_multiple_of(page);
            let (memory, cuda) = gpu.open_pool(options, arena, bytes)?;
            let pool = DevicePool::new(memory, layout)?;
            let copy = AnyCopy::new(host_copies, Arc::clone(metrics)).with_cuda(cuda);
            Ok((Some(pool), Some(gpu), copy))
        }
        Err(error) if config.device.kind == DeviceKind::Auto => {
            log(|| tracing::warn!(%error, "the device tier is simulated in host memory"));
            simulated()
        }
        Err(error) => Err(error),
    }
}

fn layout(config: &Config) -> Result<Layout> {
    match &config.device.layout {
        Some(layout) => Ok(layout.clone()),
        None => Layout::contiguous(config.block_bytes),
    }
}

/// The pool of a simulated device, if `config` has a device tier.
pub(crate) fn simulated(config: &Config) -> Result<Option<DevicePool>> {
    match config.device_slots() {
        0 => Ok(None),
        slots => DevicePool::simulated(slots, layout(config)?).map(Some),
    }
}

fn method(config: &Config) -> Result<Option<CopyMethod>> {
    if std::env::var_os(COPY_VARIABLE).is_some_and(|name| name == "auto") {
        return Ok(None);
    }
    Ok(from_variable(COPY_VARIABLE, "auto, loop, batch or kernel")?.or(config.device.copy))
}

fn gdr_mode(config: &Config) -> Result<EngineMode> {
    Ok(from_variable(GDR_VARIABLE, "auto, on or off")?.unwrap_or(config.device.gdr))
}

/// The choice that an environment variable names, if it is set.
fn from_variable<T: DeserializeOwned>(variable: &'static str, expected: &str) -> Result<Option<T>> {
    let Some(found) = std::env::var_os(variable) else { return Ok(None) };
    let found = found.to_string_lossy();
    let choice = T::deserialize(IntoDeserializer::<value::Error>::into_deserializer(&*found));
    choice.map(Some).map_err(|_| Error::config(variable, &found, expected))
}

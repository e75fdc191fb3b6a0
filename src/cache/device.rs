//! The device tier and what copies to it: a CUDA device, or host memory that plays one, with an RDMA device beside it.

use std::{sync::Arc, time::Duration};

use crate::{
    block::Layout,
    config::{Config, CopyMethod, DeviceKind, GdrMode},
    device::{
        AnyCopy, DevicePool, Memcpy, PoolLayout,
        cuda::{
            DeviceBuffer, Gpu,
            copy::{CudaCopy, CudaCopyOptions},
        },
        gdr::{GdrCopy, GdrMemory, GdrOptions, GdrState, GdrStatus},
    },
    error::{Error, Result},
    memory::Arena,
    metrics::CopyMetrics,
};

/// The variable that goes before [`Config::copy`].
const COPY_VARIABLE: &str = "KVHOIST_COPY";

/// The variable that goes before [`Config::gdr`].
const GDR_VARIABLE: &str = "KVHOIST_GDR";

/// Memory of the device is exported by its own pages.
const DEVICE_PAGE_BYTES: usize = 2 << 20;

/// The device tier, if there is one, the device that it is on, and what copies.
pub(super) struct Opened {
    pub(super) pool: Option<DevicePool>,
    pub(super) gpu: Option<Arc<Gpu>>,
    pub(super) copy: AnyCopy,
    pub(super) gdr: GdrStatus,
}

/// Opens the device that `config` wants.
pub(super) async fn open(
    config: &Config,
    arena: &Arc<Arena>,
    metrics: &Arc<CopyMetrics>,
    host_copies: Memcpy,
) -> Result<Opened> {
    let mode = gdr_mode(config)?;
    let (pool, gpu, copy) = open_base(config, arena, mode, metrics, host_copies)?;
    let off = |reason: &str| GdrStatus::new(GdrState::Off(reason.into()));
    let reason = match (mode, &pool, &gpu) {
        (GdrMode::Off, ..) => Some("it is set to off"),
        (GdrMode::On, None, _) => {
            return Err(Error::config(
                "gdr",
                "on, without a device tier",
                "device_blocks of 1 at least, or gdr = auto or off",
            ));
        }
        (_, None, _) => Some("there is no device tier"),
        (GdrMode::Auto, _, None) => Some("host memory plays the device; the processor copies it better"),
        _ => None,
    };
    if let Some(reason) = reason {
        return Ok(Opened { pool, gpu, copy, gdr: off(reason) });
    }
    let options = GdrOptions {
        device: config.device.gdr_device.clone(),
        stuck_after: Duration::from_millis(config.device.gdr_stuck_ms),
        ..GdrOptions::default()
    };
    let memory = GdrMemory {
        arena: Some(Arc::clone(arena)),
        pool: pool.as_ref().map(DevicePool::shared_memory),
        gpu: gpu.clone(),
    };
    let opened = async {
        let engine = GdrCopy::open(&options, memory).await?;
        if let (GdrMode::Auto, Some(pool)) = (mode, &pool) {
            engine.calibrate(arena, &pool.shared_memory()).await?;
        }
        Ok::<_, Error>(engine)
    };
    match opened.await {
        Ok(engine) => {
            let gdr = engine.status().clone();
            let copy = copy.with_gdr(engine, mode, config.device.copy_prefer);
            Ok(Opened { pool, gpu, copy, gdr })
        }
        Err(error) if mode == GdrMode::Auto => {
            let reason = match error {
                Error::Unavailable { reason, .. } => reason,
                other => other.to_string(),
            };
            tracing::debug!(reason, "no copies go through an RDMA device");
            Ok(Opened { pool, gpu, copy, gdr: off(&reason) })
        }
        Err(error) => Err(error),
    }
}

type Base = (Option<DevicePool>, Option<Arc<Gpu>>, AnyCopy);

fn open_base(
    config: &Config,
    arena: &Arc<Arena>,
    gdr: GdrMode,
    metrics: &Arc<CopyMetrics>,
    host_copies: Memcpy,
) -> Result<Base> {
    let simulated = || Ok((simulated(config)?, None, AnyCopy::memcpy(host_copies.clone(), Arc::clone(metrics))));
    if config.device_slots() == 0 || config.device.kind == DeviceKind::Simulated {
        return simulated();
    }
    let options = CudaCopyOptions { method: method(config)?, blocks_max: config.device.copy_blocks_max };
    match Gpu::open(config.device.ordinal) {
        Ok(gpu) => {
            let layout = PoolLayout::new(config.device_slots(), layout(config)?)?;
            let page = if gdr == GdrMode::Off { 1 } else { DEVICE_PAGE_BYTES };
            let memory = DeviceBuffer::new(Arc::clone(&gpu), layout.bytes().next_multiple_of(page))?;
            let copy = CudaCopy::new(&gpu, arena, options)?;
            tracing::info!(device = %gpu.device(), slots = config.device_slots(), "the device tier is a CUDA device");
            let pool = DevicePool::new(Box::new(memory), layout)?;
            Ok((Some(pool), Some(gpu), AnyCopy::cuda(copy.with_host(host_copies.clone()), Arc::clone(metrics))))
        }
        Err(error) if config.device.kind == DeviceKind::Auto => {
            tracing::warn!(%error, "the device tier is simulated in host memory");
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

/// The pool in host memory, if there is to be one.
pub(super) fn simulated(config: &Config) -> Result<Option<DevicePool>> {
    match config.device_slots() {
        0 => Ok(None),
        slots => DevicePool::simulated(slots, layout(config)?).map(Some),
    }
}

fn method(config: &Config) -> Result<Option<CopyMethod>> {
    match std::env::var_os(COPY_VARIABLE) {
        None => Ok(config.device.copy),
        Some(name) if name == "auto" => Ok(None),
        Some(name) => name.to_str().and_then(CopyMethod::from_name).map(Some).ok_or_else(|| {
            Error::config(COPY_VARIABLE, name.to_string_lossy().into_owned(), "auto, loop, batch or kernel")
        }),
    }
}

fn gdr_mode(config: &Config) -> Result<GdrMode> {
    let Some(name) = std::env::var_os(GDR_VARIABLE) else { return Ok(config.device.gdr) };
    name.to_str()
        .and_then(GdrMode::from_name)
        .ok_or_else(|| Error::config(GDR_VARIABLE, name.to_string_lossy().into_owned(), "auto, on or off"))
}

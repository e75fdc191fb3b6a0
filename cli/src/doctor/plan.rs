//! What will be opened, as far as flags and settings say: checked as an engine would check it, up to the opening.

use std::{fs, path::PathBuf};

use kvhoist::{Capacity, Config, DirectIo, DiskPath, StorageKind};
use kvhoist_doctor::{Plan, PlannedPath};

use super::{args::Args, finding::Want};
use crate::{failure::Failure, remote_store::open_remote, settings::Settings};

/// A store of more blocks than 2 to the power of this would be refused for its number of blocks.
const BLOCKS_LOG_MAX: u32 = 30;

/// What will be opened.
pub struct Planned {
    pub plan: Plan,
    /// Whether the caches have a device tier.
    pub has_device: bool,
    /// Features whose absence is a problem.
    pub wanted: Vec<Want>,
    /// The store beyond the node.
    pub remote: Option<RemotePlan>,
}

/// A store beyond the node that will be opened.
#[cfg_attr(not(feature = "remote"), allow(dead_code, reason = "without the feature there is none"))]
pub struct RemotePlan {
    pub url: String,
    /// Microseconds of computing a block, and its bytes, where the settings have both.
    pub recompute: Option<(u64, usize)>,
}

/// The caches that will be opened.
///
/// # Errors
/// [`Failure::USAGE`] for settings that would be refused.
pub fn plan(args: &Args) -> Result<Planned, Failure> {
    let there = |path: PathBuf| PlannedPath { at: path.clone(), path, bytes: 0 };
    let paths = args.path.iter().cloned().map(there).collect();
    let mut plan = Plan { ranks: args.ranks, paths, host_bytes: 0, write_bytes_a_day: 0, takes_files: false };
    let Some(given) = &args.config else {
        if plan.paths.is_empty() {
            plan.paths.push(there(std::env::temp_dir()));
        }
        return Ok(Planned { plan, has_device: false, wanted: wanted(args, &Config::default()), remote: None });
    };
    let settings = Settings::given(given)?;
    settings.check_paths().map_err(|wrong| Failure::usage(format!("--config: {wrong}")))?;
    // Engines know how large a block is, their settings do not: a small one shows whether there is room for any.
    let least = settings.capacity.map_or(0, |bytes| (bytes >> BLOCKS_LOG_MAX).next_power_of_two() as usize);
    let unknown = settings.config.block_bytes.max(least);
    let config = settings.config(if settings.has_block_bytes { settings.config.block_bytes } else { unknown })?;
    let config = open_remote(config)?;
    config.validate().map_err(|error| {
        let error =
            error.with_settings_named(&[("disks.path", "path"), ("disks", "path"), ("disks.bytes", "capacity")]);
        Failure::usage(format!("--config: {error}"))
    })?;
    let slot = config.slot_bytes() as u64;
    let on_disk = |disk: &DiskPath| {
        let slots = u64::from(config.path_slots(disk));
        DiskPath::file_bytes(slots, config.block_bytes as u64)
    };
    // Without paths a service has the caches, and the memory.
    let is_opened = !plan.paths.is_empty() || !settings.paths.is_empty() || !config.disk.paths.is_empty();
    let of_host = if is_opened { u64::from(config.host_slots()) * slot } else { 0 };
    plan.host_bytes = settings.host_bytes().unwrap_or(of_host);
    plan.write_bytes_a_day = config.write_budget_bytes().unwrap_or(0);
    let all = settings.capacity_of_rank(args.ranks).unwrap_or_else(|| config.disk.paths.iter().map(on_disk).sum());
    if plan.paths.is_empty() && settings.paths.is_empty() {
        plan.takes_files = true;
        plan.paths = config.disk.paths.iter().map(|disk| made(disk.path.clone(), on_disk(disk))).collect();
    } else {
        let of_settings = || settings.paths().into_iter().map(|path| made(path, 0)).collect();
        plan.paths = if plan.paths.is_empty() { of_settings() } else { plan.paths };
        let each = all / plan.paths.len().max(1) as u64;
        plan.paths.iter_mut().for_each(|path| path.bytes = each);
    }
    let has_device = !matches!(config.device.capacity, Capacity::Blocks(0) | Capacity::Bytes(0));
    let block_bytes = settings.has_block_bytes.then_some(config.block_bytes);
    let remote = config.remote.url.clone();
    let remote = remote.map(|url| RemotePlan { url, recompute: config.remote.recompute_us.zip(block_bytes) });
    Ok(Planned { plan, has_device, wanted: wanted(args, &config), remote })
}

/// The features that the flags name, or what the settings use.
fn wanted(args: &Args, config: &Config) -> Vec<Want> {
    if !args.want.is_empty() {
        return args.want.clone();
    }
    let ring = (config.disk.storage != StorageKind::Blocking).then_some(Want::Ring);
    let direct = (config.disk.direct_io == DirectIo::Require).then_some(Want::DirectIo);
    ring.into_iter().chain(direct).collect()
}

/// A path, and the folder that it will be made in: engines and services make its last part, and no other.
fn made(path: PathBuf, bytes: u64) -> PlannedPath {
    let at = match path.parent() {
        Some(parent) if parent.is_dir() && fs::symlink_metadata(&path).is_err() => parent.to_owned(),
        _ => path.clone(),
    };
    PlannedPath { path, at, bytes }
}

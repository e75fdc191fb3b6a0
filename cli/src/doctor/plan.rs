//! What will be opened, as far as flags and settings say: checked as an engine would check it, up to the opening.

use std::{fs, path::PathBuf};

use kvhoist::{Capacity, DiskPath};
use kvhoist_doctor::Plan;

use super::args::Args;
use crate::{failure::Failure, settings::Settings};

/// A store of more blocks than 2 to the power of this would be refused for its number of blocks.
const BLOCKS_LOG_MAX: u32 = 30;

/// The caches that will be opened, and whether they have a device tier.
///
/// # Errors
/// [`Failure::USAGE`] for settings that would be refused.
pub fn plan(args: &Args) -> Result<(Plan, bool), Failure> {
    let paths = args.path.clone();
    let mut plan =
        Plan { ranks: args.ranks, paths, disk_bytes: 0, host_bytes: 0, write_bytes_a_day: 0, takes_files: false };
    let Some(given) = &args.config else {
        if plan.paths.is_empty() {
            plan.paths.push(std::env::temp_dir());
        }
        return Ok((plan, false));
    };
    let settings = Settings::given(given)?;
    settings.check_paths().map_err(|wrong| Failure::usage(format!("--config: {wrong}")))?;
    // Engines know how large a block is, their settings do not: a small one shows whether there is room for any.
    let least = settings.capacity.map_or(0, |bytes| (bytes >> BLOCKS_LOG_MAX).next_power_of_two() as usize);
    let unknown = settings.config.block_bytes.max(least);
    let config = settings.config(if settings.has_block_bytes { settings.config.block_bytes } else { unknown })?;
    config.validate()?;
    let slot = config.slot_bytes() as u64;
    let on_disk = |disk: &DiskPath| {
        let slots = u64::from(config.path_slots(disk));
        DiskPath::file_bytes(slots, config.block_bytes as u64)
    };
    plan.host_bytes = settings.host_bytes().unwrap_or(u64::from(config.host_slots()) * slot);
    plan.write_bytes_a_day = config.write_budget_bytes().unwrap_or(0);
    plan.disk_bytes =
        settings.capacity_of_rank(args.ranks).unwrap_or_else(|| config.disk.paths.iter().map(on_disk).sum());
    if plan.paths.is_empty() {
        plan.takes_files = settings.paths.is_empty();
        let of_disks = config.disk.paths.iter().map(|disk| disk.path.clone());
        plan.paths = match plan.takes_files {
            true => of_disks.collect(),
            false => settings.paths().into_iter().map(made_in).collect(),
        };
    }
    let has_device = !matches!(config.device.capacity, Capacity::Blocks(0) | Capacity::Bytes(0));
    Ok((plan, has_device))
}

/// The folder that a path is, or that it will be made in: engines and services make its last part, and no other.
fn made_in(path: PathBuf) -> PathBuf {
    match path.parent() {
        Some(parent) if parent.is_dir() && fs::symlink_metadata(&path).is_err() => parent.to_owned(),
        _ => path,
    }
}

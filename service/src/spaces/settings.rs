//! The settings of a space's cache.

use std::time::Duration;

use kvhoist::{Capacity, Config, DiskPath, internals::config::BUDGET_BLOCKS_MIN};

use super::{Spaces, manifest::SpaceManifest, pool::Grant};
use crate::error::{Error, Result, ServiceFault};

/// Slots in the host memory of one space.
const SLOTS_MAX: u64 = (u32::MAX >> 1) as u64;

impl Spaces {
    /// The settings of a space's cache, for the most host memory that the space may ever have.
    pub(super) fn cache_config(&self, manifest: &SpaceManifest, grant: &Grant) -> Result<Config> {
        let mut config = self.store_config(manifest)?;
        let slot_bytes = config.slot_bytes() as u64;
        let most = self.host.most(manifest.of());
        let grows = self.config.move_host && grant.floor < most;
        // Memory that others have yet is not the cache's before they have given it up.
        config.host.parks = grows || grant.missing > 0;
        let most = if grows { (most / slot_bytes).min(SLOTS_MAX) as u32 } else { 0 };
        config.host.capacity = Capacity::Blocks(slots(grant.total(), slot_bytes)?.max(most));
        Ok(config)
    }

    /// The settings of a space's cache but for its host memory.
    pub(super) fn store_config(&self, manifest: &SpaceManifest) -> Result<Config> {
        let mut config = self
            .config
            .cache
            .clone()
            .block_bytes(usize::try_from(manifest.block_bytes).unwrap_or(usize::MAX))
            .namespace(manifest.namespace.clone());
        config.remote.owner = manifest.remote_owner();
        // A service's stores are its own: who holds the lock was killed, and its last I/O is on a slow drive. Half of
        // the deadline, so that the client hears of a longer one.
        config.disk.lock_wait = Duration::from_millis(config.limits.deadline_ms / 2);
        config.disk.paths.clear();
        if !self.config.paths.is_empty() {
            let blocks =
                DiskPath::blocks_on_each(manifest.capacity_bytes, self.config.paths.len(), manifest.block_bytes)?;
            let paths = self.config.paths.iter().map(|path| path.join(manifest.folder()));
            config.disk.paths.extend(paths.map(|path| DiskPath::with_blocks(path, blocks)));
        }
        // Without a disk nothing is written.
        let budget = config.write_budget_bytes().filter(|_| !self.config.paths.is_empty());
        let (capacity, of_all, least) =
            (manifest.capacity_bytes, self.config.capacity_bytes, config.write_budget_min());
        config.disk.write_budget = budget.map(|bytes| share_of_budget(bytes, capacity, of_all, least)).transpose()?;
        (config.disk.drive_writes_per_day, config.disk.drive_bytes) = (None, None);
        Ok(config)
    }
}

/// A space's share of the service's write budget, bytes a day.
///
/// # Errors
/// [`ServiceFault::Capacity`] where that is less than a budget may be. More would be more than the service's.
fn share_of_budget(bytes: u64, capacity_bytes: u64, of_all: u64, least: u64) -> Result<u64> {
    let part = |whole: u64, over: u64, under: u64| u128::from(whole) * u128::from(over) / u128::from(under.max(1));
    let share = u64::try_from(part(bytes, capacity_bytes, of_all)).unwrap_or(u64::MAX);
    if share >= least {
        return Ok(share);
    }
    let needed = part(least, of_all, bytes) + 1;
    let text = format!(
        "capacity_bytes: found {capacity_bytes} bytes for a space, whose share of the service's write budget of \
         {bytes} bytes a day is {share}, expected a share of {least} at least, for {BUDGET_BLOCKS_MIN} blocks a day: \
         {needed} bytes of disk, or a service with a larger --write-budget"
    );
    Err(Error::service(ServiceFault::Capacity, text))
}

/// Slots in a share of host memory.
pub(super) fn slots(bytes: u64, slot_bytes: u64) -> Result<u32> {
    match u32::try_from(bytes / slot_bytes) {
        Ok(slots) if slots > 0 => Ok(slots),
        _ => Err(Error::config(
            "host_bytes",
            format!("{bytes} bytes for a space"),
            format!("room for 1 to {SLOTS_MAX} slots of {slot_bytes} bytes"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_budget_is_a_part_of_it_and_enough_for_some_blocks() {
        const GIB: u64 = 1 << 30;
        assert_eq!(share_of_budget(2 * GIB, 3 * GIB, 12 * GIB, 1).expect("a quarter"), GIB / 2);
        assert_eq!(share_of_budget(u64::MAX, 2, 1, 1).expect("no limit"), u64::MAX);
        let refused = share_of_budget(2 * GIB, GIB, 8 * GIB, GIB).expect_err("less than the least").to_string();
        let needed = refused.rsplit_once(" blocks a day: ").expect("how many").1.split_once(' ').expect("bytes").0;
        let needed = needed.parse().expect("a number");
        share_of_budget(2 * GIB, needed, 8 * GIB, GIB).expect("as much as it asks for");
        share_of_budget(2 * GIB, needed - 2, 8 * GIB, GIB).expect_err("less");
    }
}

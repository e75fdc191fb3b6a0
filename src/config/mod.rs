//! Settings of a cache: in groups here, by the names that users write in `settings.rs`.

mod choices;
mod groups;
mod range;
mod remote;
mod settings;
pub(crate) mod sizing;
mod validate;

pub use choices::{
    CopyMethod, CopyPrefer, DeviceKind, DirectIo, EngineMode, Eviction, RemotePolicy, StorageKind, WritePolicy,
};
pub use groups::{Capacity, DeviceConfig, DiskConfig, DiskPath, HeldFile, HostConfig, Limits};
pub use remote::{RemoteConfig, RemoteHandle};
pub use settings::{SETTING_NAMES, expected_by};

use crate::block::{IO_ALIGN, Tier};

/// The smallest write budget, in blocks a day. A tenth of an hour's budget is what may be saved up: it must be enough
/// for a block.
pub const BUDGET_BLOCKS_MIN: u64 = 240;

/// Settings of a cache. [`Config::default`] is a small cache without a disk tier.
///
/// Each setting has a method that sets it, by the name that it has in files of settings and in Python:
///
/// ```
/// use kvhoist::{Config, WritePolicy};
///
/// let config = Config::default()
///     .block_bytes(1 << 20)
///     .host_bytes(8 << 30)
///     .disk("/mnt/nvme/kv", 200 << 30)
///     .write_policy(WritePolicy::WriteBack)
///     .deadline_ms(5_000);
/// assert_eq!(config.host_slots(), 8192);
/// config.validate()?;
/// # Ok::<(), kvhoist::Error>(())
/// ```
///
/// With serde it is one flat map from these names to values; unknown names are errors.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Size of every block in bytes, 1 B to 1 GiB; slots are padded to 4 KiB.
    pub block_bytes: usize,
    /// Namespace of the keys: all that changes the bytes of a block but not its tokens, such as model and dtype, in 1
    /// to 255 bytes. A store with another is refused. Give [`PrefixChain::new`](crate::PrefixChain::new) the same one.
    pub namespace: String,
    /// Which blocks host memory and disk evict first.
    pub eviction_policy: Eviction,
    /// Threads that take reads, writes, checksums and copies of host memory off the reactor, so that one core does not
    /// bound them. 0: all of this work is done on the reactor. `None`: half of the processors available to the process,
    /// at most 8; if there are two or fewer, one, which only reads and writes. Two of these for each drive then read
    /// and write, but no more than a quarter of the processors; if a number is given, direct I/O is not required, or
    /// the drives are unknown, all do. 0 to 256.
    pub workers: Option<u32>,
    /// Microseconds for which the reactor polls for work before it sleeps. While a movement is in flight the reactor
    /// then never sleeps, and occupies a core; callers leave all reads to it. Useful for single blocks from fast disks,
    /// most of all in a virtual machine. 0 (sleep immediately) to 10,000.
    pub spin_us: u32,
    /// Host memory.
    pub host: HostConfig,
    /// Device memory, and the copies to and from it.
    pub device: DeviceConfig,
    /// The disk tier.
    pub disk: DiskConfig,
    /// The remote tier.
    pub remote: RemoteConfig,
    /// Limits on what is requested, queued and in flight.
    pub limits: Limits,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            block_bytes: 64 << 10,
            namespace: "default".into(),
            eviction_policy: Eviction::default(),
            workers: None,
            spin_us: 0,
            host: HostConfig::default(),
            device: DeviceConfig::default(),
            disk: DiskConfig::default(),
            remote: RemoteConfig::default(),
            limits: Limits::default(),
        }
    }
}

impl Config {
    /// Distance between two slots of a tier in bytes: `block_bytes` padded for direct I/O. `usize::MAX` if that exceeds
    /// the address space, which [`validate`](Self::validate) refuses.
    pub fn slot_bytes(&self) -> usize {
        self.block_bytes.checked_next_multiple_of(IO_ALIGN).unwrap_or(usize::MAX)
    }

    /// Number of slots of memory for which a capacity has room; `u32::MAX` if there are more, which
    /// [`validate`](Self::validate) refuses.
    fn slots(&self, capacity: Capacity) -> u32 {
        match capacity {
            Capacity::Bytes(bytes) => u32::try_from(bytes / self.slot_bytes().max(1) as u64).unwrap_or(u32::MAX),
            Capacity::Blocks(blocks) => blocks,
        }
    }

    /// Number of slots of the host tier.
    pub fn host_slots(&self) -> u32 {
        self.slots(self.host.capacity)
    }

    /// Number of slots of the device tier.
    pub fn device_slots(&self) -> u32 {
        self.slots(self.device.capacity)
    }

    /// Number of slots of the disk tier, on all paths.
    pub fn disk_slots(&self) -> u64 {
        self.disk.paths.iter().map(|path| u64::from(self.path_slots(path))).sum()
    }

    /// Number of slots of all tiers of the node.
    pub(crate) fn slots_of_all_tiers(&self) -> u64 {
        self.disk_slots() + u64::from(self.host_slots()) + u64::from(self.device_slots())
    }

    /// Number of slots of one path of the disk tier: in bytes, as many as fit with their records; 0 or `u32::MAX` where
    /// [`validate`](Self::validate) refuses the path, because none fits or too many.
    pub fn path_slots(&self, path: &DiskPath) -> u32 {
        match path.capacity {
            Capacity::Bytes(bytes) => sizing::slots_in(bytes, self.block_bytes as u64),
            Capacity::Blocks(blocks) => blocks,
        }
    }

    /// The number of threads that [`workers`](Self::workers) means on this machine.
    pub fn worker_threads(&self) -> u32 {
        self.workers.unwrap_or(if processors() <= 2 { 0 } else { (processors() / 2).min(8) })
    }

    /// How many of these threads read and write, on so many drives: if [`workers`](Self::workers) does not say it, two
    /// for each drive, but no more than a quarter of the processors. More of them would share the drives' blocks, so
    /// that each sleeps and is woken for every few of them.
    pub(crate) fn transferring_threads(&self, drives: Option<u32>) -> u32 {
        // One for the reads that callers submit, also where all else is the reactor's.
        let all = self.workers.unwrap_or(self.worker_threads().max(1));
        // A buffered operation is a copy by whoever makes it.
        let is_direct = self.disk.direct_io == DirectIo::Require;
        match drives.filter(|_| is_direct && self.workers.is_none()) {
            Some(drives) => threads_for(drives, processors()).min(all),
            None => all,
        }
    }

    /// Bytes that reads and writes of the disk tier may have in flight, on all paths: a block moves, whatever its size.
    pub(crate) fn bytes_in_flight_max(&self) -> [u64; 2] {
        let (paths, block) = (self.disk.paths.len().max(1) as u64, self.slot_bytes() as u64);
        let per_path = [self.limits.read_bytes_in_flight_max, self.limits.write_bytes_in_flight_max];
        per_path.map(|bytes| bytes.saturating_mul(paths).max(block))
    }

    /// Bytes that may be written to the disk tier a day.
    pub fn write_budget_bytes(&self) -> Option<u64> {
        let disk = &self.disk;
        // Past 2^64 bytes a day it is no limit, and stays at that.
        let of_drive = disk.drive_writes_per_day.zip(disk.drive_bytes).map(|(writes, bytes)| writes * bytes as f64);
        disk.write_budget.or(of_drive.map(|bytes| bytes as u64))
    }

    /// The smallest write budget, bytes a day.
    #[doc(hidden)]
    pub fn write_budget_min(&self) -> u64 {
        self.written_bytes().saturating_mul(BUDGET_BLOCKS_MIN)
    }

    /// Bytes that a write of a block costs: with the page of its record.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.slot_bytes() as u64 + IO_ALIGN as u64
    }

    /// The lowest tier: a block missing there is missing in the whole cache.
    pub(crate) fn last_tier(&self) -> Tier {
        if self.disk.paths.is_empty() { Tier::Host } else { Tier::Disk }
    }

    /// Blocks are written to disk when they are evicted from host memory.
    pub(crate) fn writes_back(&self) -> bool {
        matches!(self.disk.write_policy, WritePolicy::WriteBack | WritePolicy::ByValue)
    }

    /// Blocks are written to disk if they are worth it.
    #[inline]
    pub(crate) fn values_writes(&self) -> bool {
        !self.disk.paths.is_empty() && self.disk.write_policy == WritePolicy::ByValue
    }

    /// Whether blocks that are used again may be in host memory only, before they are written to disk.
    #[inline]
    pub(crate) fn selects_for_disk(&self) -> bool {
        let policy = self.disk.write_policy;
        !self.disk.paths.is_empty()
            && policy != WritePolicy::ByValue
            && (policy == WritePolicy::WriteThroughSelective || self.eviction_policy == Eviction::RbRefuse)
    }
}

/// How many threads read and write on so many drives.
fn threads_for(drives: u32, processors: u32) -> u32 {
    drives.saturating_mul(2).min(processors.div_ceil(4))
}

/// The number of processors that this process may use.
fn processors() -> u32 {
    std::thread::available_parallelism().map_or(1, |processors| processors.get() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_serve_a_drive_and_no_more_than_a_quarter_of_the_processors_all() {
        let cases =
            [(0, 16, 0), (1, 1, 1), (1, 2, 1), (1, 4, 1), (8, 6, 2), (1, 16, 2), (8, 16, 4), (8, 32, 8), (1, 64, 2)];
        for (drives, processors, wanted) in cases {
            assert_eq!(threads_for(drives, processors), wanted, "{drives} drives, {processors} processors");
        }
    }

    #[test]
    fn two_workers_transfer_for_each_drive_unless_their_number_is_given_or_more_would_copy() {
        let automatic = Config::default();
        let all = automatic.worker_threads().max(1);
        for drives in [0, 1, 64] {
            let wanted = threads_for(drives, processors()).min(all);
            assert_eq!(automatic.transferring_threads(Some(drives)), wanted, "{drives} drives");
        }
        assert_eq!(automatic.transferring_threads(None), all, "unknown drives");
        assert_eq!(automatic.direct_io(DirectIo::Prefer).transferring_threads(Some(1)), all, "copies");
        assert_eq!(Config::default().workers(8).transferring_threads(Some(1)), 8, "a given number");
        assert_eq!(Config::default().workers(0).transferring_threads(Some(1)), 0);
    }
}

//! Settings of a cache. Validated once; errors name the field.

use std::{fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::{
    block::{IO_ALIGN, Layout, Tier},
    error::{Error, Result},
};

/// The least budget of writes, blocks a day.
const BUDGET_BLOCKS_MIN: u64 = 240;

/// When a stored block is written to disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum WritePolicy {
    /// Immediately; `store` resolves when the block is written to disk (but not flushed).
    #[default]
    WriteThrough,
    /// After [`Config::selective_hits`] hits; `store` resolves when the block is visible.
    WriteThroughSelective,
    /// When the block is evicted from host memory, or at `sync`; `store` resolves when the block is visible.
    WriteBack,
    /// As `WriteBack`, but only blocks that are worth it: those whose like (as often used, as deep in their chains) are
    /// asked for again with a probability of a quarter while the disk tier would keep them, each after the blocks above
    /// it; and no more than [`Config::write_budget`] allows. Other blocks are dropped when host memory needs
    /// their slots, which is counted ([`Stats::writes_declined`](crate::Stats::writes_declined)) and no error. `sync`
    /// and `close` decide on all blocks that are not on disk yet, and write and flush those that are worth it; so after
    /// them what was decided against is in host memory only, and with `close` it is gone. A block that is used again
    /// before it is dropped is decided on anew. Takes about 32 bytes of memory a slot of the disk tier.
    ByValue,
}

impl WritePolicy {
    /// The policy of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [
            ("write_through", WritePolicy::WriteThrough),
            ("write_through_selective", WritePolicy::WriteThroughSelective),
            ("write_back", WritePolicy::WriteBack),
            ("by_value", WritePolicy::ByValue),
        ]
        .into_iter()
        .find_map(|(known, policy)| (known == name).then_some(policy))
    }
}

/// Which blocks host memory and disk evict first. Under every policy, the last blocks of a prefix chain go before those
/// that precede them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum Eviction {
    /// The least recently used block.
    #[default]
    Lru,
    /// Keeps blocks used in one request apart from blocks used in several, and evicts from the colder group, weighed by
    /// how often each group's evicted blocks are requested again (see [`Rb`](crate::index::Rb)). Better than `Lru` if
    /// many blocks are used once and the tier is small. Takes up to 48 bytes more per slot.
    Rb,
    /// Like `Rb`, with admission control in the last tier (disk, or host memory without a disk tier): while evicted
    /// blocks are requested again more often than new ones, the tier refuses a part of the new blocks, each with the
    /// rest of its chain. A refusal is not an error: the block stays in host memory only, or without a disk tier
    /// becomes a miss. Refusals are counted ([`TierStats::refused`](crate::TierStats::refused)).
    RbRefuse,
}

impl Eviction {
    /// The policy with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [("lru", Eviction::Lru), ("rb", Eviction::Rb), ("rb_refuse", Eviction::RbRefuse)]
            .into_iter()
            .find_map(|(known, policy)| (known == name).then_some(policy))
    }
}

/// The I/O engine of the disk tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum StorageKind {
    /// io_uring, or the thread pool (with a warning) if io_uring is unavailable.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// A pool of threads that call `pread` and `pwrite`.
    Blocking,
}

/// How copies between host and device memory are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyMethod {
    /// One driver call per copy: uses the copy engines, which are fastest for megabytes.
    Loop,
    /// One driver call per batch of copies (CUDA 12.8).
    Batch,
    /// One launch of kvhoist's own kernel per batch: fastest for kilobytes, but occupies multiprocessors.
    Kernel,
}

impl CopyMethod {
    /// All methods.
    pub const ALL: [CopyMethod; 3] = [CopyMethod::Loop, CopyMethod::Batch, CopyMethod::Kernel];

    /// Name in settings and reports.
    pub fn name(self) -> &'static str {
        ["loop", "batch", "kernel"][self as usize]
    }

    /// The method with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.name() == name)
    }
}

impl fmt::Display for CopyMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The memory of the device tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// A CUDA device, or host memory that plays one (with a warning) if there is none.
    #[default]
    Auto,
    /// Host memory that plays a device.
    Simulated,
    /// A CUDA device, or an error.
    Cuda,
}

/// Whether libcufile transfers blocks between disk and a CUDA device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum CufileMode {
    /// If a self-test at open shows that libcufile bypasses host memory; through host memory otherwise. A process that
    /// has run the self-test with libcufile 1.15 may crash in libcufile when it exits.
    Auto,
    /// Always libcufile, or an error when the cache is opened. Includes its compat mode, which is slower than host
    /// memory: for tests.
    On,
    /// Always through host memory. libcufile is not loaded.
    #[default]
    Off,
}

/// Whether an RDMA device makes copies between host and device (GPUDirect RDMA).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum GdrMode {
    /// If a device passes its self-test at open, and for copies that it was measured to make faster; never for host
    /// memory that plays a device.
    #[default]
    Auto,
    /// Every copy that it can make, or an error when the cache is opened.
    On,
    /// Never. RDMA devices are not looked for.
    Off,
}

impl GdrMode {
    /// The mode with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [("auto", GdrMode::Auto), ("on", GdrMode::On), ("off", GdrMode::Off)]
            .into_iter()
            .find_map(|(known, mode)| (known == name).then_some(mode))
    }
}

/// Which copy engine to prefer if two are about equally fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum CopyPrefer {
    /// The engine expected to finish first.
    Latency,
    /// The engine with fewer bytes in flight.
    #[default]
    Throughput,
    /// The engine that occupies no multiprocessor and no copy engine of the GPU: an RDMA device, even if it takes up to
    /// twice as long.
    SpareGpu,
}

/// What to do if a path has no direct I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum DirectIo {
    /// Refuse to open.
    #[default]
    Require,
    /// Use the page cache, with a warning.
    Prefer,
}

/// One file or raw device of the disk tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskPath {
    /// A directory (the store is its file `kvhoist.store`), a file, or a block device.
    pub path: PathBuf,
    /// Number of slots on this path.
    pub blocks: u32,
}

/// Settings of a cache. `Config::default()` is a small cache without a disk tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Size of every block in bytes, 1 B to 1 GiB; slots are padded to 4 KiB.
    pub block_bytes: usize,
    /// Slots in host memory, at least 1.
    pub host_blocks: u32,
    /// Slots in device memory. 0: no device tier.
    pub device_blocks: u32,
    /// The memory of the device tier.
    pub device: DeviceKind,
    /// CUDA ordinal of the device.
    pub device_ordinal: u32,
    /// How copies to and from a CUDA device are made. `None`: the fastest method, measured when the cache is opened.
    /// The environment variable `KVHOIST_COPY` (`auto`, `loop`, `batch`, `kernel`) takes precedence.
    pub copy: Option<CopyMethod>,
    /// Largest number of thread blocks, of 512 threads each, that the copy kernel may use at a time. 1 to 1024.
    pub copy_blocks_max: u32,
    /// Whether an RDMA device makes copies. The environment variable `KVHOIST_GDR` (`auto`, `on`, `off`) takes
    /// precedence.
    pub gdr: GdrMode,
    /// Name of the RDMA device (`mlx5_0`). `None`: the one nearest to the GPU.
    pub gdr_device: Option<String>,
    /// Milliseconds without a completion after which the RDMA device has failed and another engine makes its copies.
    /// The device itself reports an error after half a second of retries. Set it well below `deadline_ms`. 1 to
    /// 86,400,000.
    pub gdr_stuck_ms: u64,
    /// Which copy engine to prefer if two are about equally fast.
    pub copy_prefer: CopyPrefer,
    /// Whether libcufile transfers blocks between disk and a CUDA device.
    pub cufile: CufileMode,
    /// Milliseconds after which a call or a batch of libcufile counts as stuck; this block and all later ones then go
    /// through host memory. Set it well below `deadline_ms`. 1 to 86,400,000.
    pub cufile_stuck_ms: u64,
    /// Lengths of a block's segments in device memory; they sum to `block_bytes`. `None`: one segment.
    pub device_layout: Option<Layout>,
    /// Files or devices of the disk tier; slots are striped over them. Empty: no disk tier.
    pub disks: Vec<DiskPath>,
    /// Namespace of the keys. A store with another namespace is refused.
    pub namespace: String,
    /// When blocks are written to disk.
    pub write_policy: WritePolicy,
    /// Number of hits after which `write_through_selective` writes a block. 1 to 255.
    pub selective_hits: u8,
    /// Bytes a day that `by_value` may write to the disk tier, all paths together. Held over any hour within a tenth:
    /// blocks in their second use go first, of the others whole chains are taken by a coin. Counted are blocks and the
    /// record page of each, not the record table that a `close` writes. What an earlier run wrote is not known: a run
    /// begins with nothing saved up. At least 240 blocks with their records. `None`: no limit but
    /// [`drive_writes_per_day`](Self::drive_writes_per_day).
    pub write_budget: Option<u64>,
    /// The budget as a drive's data sheet has it: how often a day its whole size may be written. With
    /// [`drive_bytes`](Self::drive_bytes), and instead of [`write_budget`](Self::write_budget). More than 0.
    pub drive_writes_per_day: Option<f64>,
    /// Size of the drive, or of all drives of the disk tier together, bytes; what [`disks`](Self::disks) takes of it
    /// does not matter.
    pub drive_bytes: Option<u64>,
    /// Which blocks host memory and disk evict first.
    pub eviction_policy: Eviction,
    /// The I/O engine of the disk tier.
    pub storage: StorageKind,
    /// What to do if a path has no direct I/O.
    pub direct_io: DirectIo,
    /// Threads of the blocking I/O engine. 1 to 256.
    pub blocking_threads: usize,
    /// Transfers blocks of `load_into` and `store_from` directly between registered host memory and disk, without a
    /// copy in the host tier: for callers that have a pool of their own. Applies if every segment is aligned as the
    /// drives require ([`Stats::memory_align_bytes`](crate::Stats::memory_align_bytes): 4 on most NVMe drives, 512 on
    /// many others), has a length that is a multiple of 4096 bytes, and is at least 64 KiB long or the whole block;
    /// stores also need `write_through`. Other blocks go through host slots. Such a call ends when the kernel has
    /// released the memory: a stalled disk can delay it past `deadline_ms`.
    pub bypass_host: bool,
    /// Largest number of bytes that reads of the disk tier may have in flight per path, at least one block. All paths
    /// share what they have together.
    pub read_bytes_in_flight_max: u64,
    /// Largest number of bytes that writes to the disk tier may have in flight per path, at least one block. All paths
    /// share what they have together.
    pub write_bytes_in_flight_max: u64,
    /// Largest number of movements requested but not finished; further calls get `Error::Busy`.
    pub movements_max: u32,
    /// Largest number of callers that may wait for one block or one slot; further calls get `Error::Busy`.
    pub waiters_max: u32,
    /// Largest number of queued prefetches and background writes; further ones are refused and counted.
    pub background_max: u32,
    /// Write-back starts when less than this share of the host slots could be evicted immediately.
    pub low_watermark: f64,
    /// Write-back stops when this share of the host slots could be evicted immediately.
    pub high_watermark: f64,
    /// Largest number of quarantined slots in the disk tier before it is taken out of service. It is also taken out of
    /// service when no other slot is left.
    pub quarantine_max: u32,
    /// Number of consecutive failures of one file after which the disk tier is taken out of service (reads) or accepts
    /// no more blocks (writes). At least 1.
    pub disk_failures_max: u32,
    /// Threads that take reads, checksums and copies of host memory off the reactor, so that one core does not bound
    /// them. 0: all of this work is done on the reactor. `None`: half of the processors available to the process, at
    /// most 8; none if there are two or fewer. 0 to 256.
    pub workers: Option<u32>,
    /// Microseconds for which the reactor polls for work before it sleeps. While a movement is in flight the reactor
    /// then never sleeps, and occupies a core. Useful for single blocks from fast disks, most of all in a virtual
    /// machine. 0 (sleep immediately) to 10,000.
    pub spin_us: u32,
    /// Milliseconds after which callers that wait for a movement or a slot get `Error::Timeout`; it may take a quarter
    /// longer. The movement itself continues for as long as the disk takes. 1 to 86,400,000 (a day).
    pub deadline_ms: u64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            block_bytes: 64 << 10,
            host_blocks: 1024,
            device_blocks: 0,
            device: DeviceKind::default(),
            device_ordinal: 0,
            copy: None,
            copy_blocks_max: 16,
            gdr: GdrMode::default(),
            gdr_device: None,
            gdr_stuck_ms: 10_000,
            copy_prefer: CopyPrefer::default(),
            cufile: CufileMode::default(),
            cufile_stuck_ms: 5_000,
            device_layout: None,
            disks: Vec::new(),
            namespace: "default".into(),
            write_policy: WritePolicy::default(),
            selective_hits: 2,
            write_budget: None,
            drive_writes_per_day: None,
            drive_bytes: None,
            eviction_policy: Eviction::default(),
            storage: StorageKind::default(),
            direct_io: DirectIo::default(),
            blocking_threads: 16,
            bypass_host: false,
            read_bytes_in_flight_max: 96 << 20,
            write_bytes_in_flight_max: 32 << 20,
            movements_max: 65_536,
            waiters_max: 65_536,
            background_max: 4_096,
            low_watermark: 0.10,
            high_watermark: 0.20,
            quarantine_max: 1_024,
            disk_failures_max: 16,
            workers: None,
            spin_us: 0,
            deadline_ms: 30_000,
        }
    }
}

impl Config {
    /// Distance between two slots of a tier in bytes: `block_bytes` padded for direct I/O. `usize::MAX` if that exceeds
    /// the address space, which [`validate`](Self::validate) refuses.
    pub fn slot_bytes(&self) -> usize {
        self.block_bytes.checked_next_multiple_of(IO_ALIGN).unwrap_or(usize::MAX)
    }

    /// The lowest tier: a block missing there is missing in the whole cache.
    pub(crate) fn last_tier(&self) -> Tier {
        if self.disks.is_empty() { Tier::Host } else { Tier::Disk }
    }

    /// Blocks are written to disk when host memory lets them go.
    pub(crate) fn writes_back(&self) -> bool {
        matches!(self.write_policy, WritePolicy::WriteBack | WritePolicy::ByValue)
    }

    /// Blocks are written to disk if they are worth it.
    pub(crate) fn values_writes(&self) -> bool {
        !self.disks.is_empty() && self.write_policy == WritePolicy::ByValue
    }

    /// Bytes that a write of a block costs: with the page of its record.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.slot_bytes() as u64 + IO_ALIGN as u64
    }

    /// Bytes that may be written to the disk tier a day.
    pub fn write_budget_bytes(&self) -> Option<u64> {
        // Past 2^64 bytes a day it is no limit, and stays at that.
        let of_drive = self.drive_writes_per_day.zip(self.drive_bytes).map(|(writes, bytes)| writes * bytes as f64);
        self.write_budget.or(of_drive.map(|bytes| bytes as u64))
    }

    /// Whether blocks that are used again may be in host memory only, before they are written to disk.
    pub(crate) fn selects_for_disk(&self) -> bool {
        !self.disks.is_empty()
            && self.write_policy != WritePolicy::ByValue
            && (self.write_policy == WritePolicy::WriteThroughSelective || self.eviction_policy == Eviction::RbRefuse)
    }

    /// Number of slots of the disk tier.
    pub fn disk_blocks(&self) -> u64 {
        self.disks.iter().map(|disk| u64::from(disk.blocks)).sum()
    }

    /// The number of threads that [`workers`](Self::workers) means on this machine.
    pub fn worker_threads(&self) -> u32 {
        self.workers.unwrap_or_else(|| {
            let processors = std::thread::available_parallelism().map_or(1, usize::from);
            if processors <= 2 { 0 } else { (processors / 2).min(8) as u32 }
        })
    }

    /// Validates every field; the error names the first invalid one.
    pub fn validate(&self) -> Result<()> {
        self.validate_block_bytes()?;
        check("host_blocks", self.host_blocks, 1, u32::MAX >> 1, "slots")?;
        check("device_blocks", self.device_blocks, 0, u32::MAX >> 1, "slots")?;
        check("copy_blocks_max", self.copy_blocks_max, 1, 1024, "thread blocks")?;
        check("gdr_stuck_ms", self.gdr_stuck_ms, 1, 86_400_000, "milliseconds")?;
        check("cufile_stuck_ms", self.cufile_stuck_ms, 1, 86_400_000, "milliseconds")?;
        check("selective_hits", self.selective_hits, 1, u8::MAX, "hits")?;
        check("blocking_threads", self.blocking_threads, 1, 256, "threads")?;
        let slot_bytes = self.slot_bytes() as u64;
        check(
            "read_bytes_in_flight_max",
            self.read_bytes_in_flight_max,
            slot_bytes,
            u64::MAX >> 1,
            "bytes (one block at least)",
        )?;
        check(
            "write_bytes_in_flight_max",
            self.write_bytes_in_flight_max,
            slot_bytes,
            u64::MAX >> 1,
            "bytes (one block at least)",
        )?;
        check("movements_max", self.movements_max, 1, 1 << 24, "movements")?;
        check("waiters_max", self.waiters_max, 1, 1 << 24, "waiters")?;
        check("background_max", self.background_max, 1, 1 << 24, "movements")?;
        check("disk_failures_max", self.disk_failures_max, 1, u32::MAX, "failures in a row")?;
        check("workers", self.workers.unwrap_or(0), 0, 256, "threads")?;
        check("spin_us", self.spin_us, 0, 10_000, "microseconds")?;
        check("deadline_ms", self.deadline_ms, 1, 86_400_000, "milliseconds")?;
        self.validate_names()?;
        self.validate_watermarks()?;
        self.validate_write_budget()?;
        self.validate_disks()?;
        self.validate_layout()
    }

    /// Checked first: the other sizes follow from this one.
    pub(crate) fn validate_block_bytes(&self) -> Result<()> {
        check("block_bytes", self.block_bytes, 1, 1 << 30, "bytes")
    }

    fn validate_names(&self) -> Result<()> {
        if self.namespace.is_empty() || self.namespace.len() > 255 {
            return Err(wrong("namespace", format!("{} bytes", self.namespace.len()), "a name of 1 to 255 bytes"));
        }
        if self.gdr_device.as_deref() == Some("") {
            return Err(wrong("gdr_device", "an empty name", "the name of an RDMA device, mlx5_0 say, or none at all"));
        }
        Ok(())
    }

    fn validate_watermarks(&self) -> Result<()> {
        let (low, high) = (self.low_watermark, self.high_watermark);
        if !(0.0..=1.0).contains(&low) {
            return Err(wrong("low_watermark", low, "a share from 0.0 to 1.0"));
        }
        if !(low..=1.0).contains(&high) {
            return Err(wrong("high_watermark", high, format!("a share from low_watermark ({low}) to 1.0")));
        }
        Ok(())
    }

    fn validate_write_budget(&self) -> Result<()> {
        let (of_drive, of_bytes) = (self.drive_writes_per_day, self.write_budget);
        let (field, found) = match (of_bytes, of_drive, self.drive_bytes) {
            (None, None, None) => return Ok(()),
            (Some(_), None, None) => ("write_budget", of_bytes.map(|bytes| bytes.to_string())),
            (None, Some(_), Some(_)) => ("drive_writes_per_day", of_drive.map(|writes| writes.to_string())),
            (None, Some(_), None) => return Err(wrong("drive_bytes", "none", "the drive's size in bytes")),
            (None, None, Some(bytes)) => {
                return Err(wrong("drive_bytes", bytes, "drive_writes_per_day with it, or none"));
            }
            (Some(_), ..) => {
                return Err(wrong("write_budget", "and a drive's size or writes", "one budget: either of the two"));
            }
        };
        let found = found.unwrap_or_default();
        if self.write_policy != WritePolicy::ByValue {
            return Err(wrong(field, found, "write_policy = \"by_value\" with it: the others write whatever comes"));
        }
        if of_drive.is_some_and(|writes| !(writes > 0.0 && writes.is_finite())) {
            return Err(wrong(field, found, "a number of writes above 0"));
        }
        // A tenth of an hour's budget is what may be saved up: it must be enough for a block.
        let least = self.written_bytes().saturating_mul(BUDGET_BLOCKS_MIN);
        if self.write_budget_bytes().is_some_and(|bytes| bytes < least) {
            return Err(wrong(field, found, format!("{least} bytes a day at least, for {BUDGET_BLOCKS_MIN} blocks")));
        }
        Ok(())
    }

    fn validate_disks(&self) -> Result<()> {
        check("disks", self.disks.len(), 0, 64, "paths")?;
        for disk in &self.disks {
            if disk.path.as_os_str().is_empty() {
                return Err(wrong("disks.path", "an empty path", "a directory, a file or a block device"));
            }
            check("disks.blocks", disk.blocks, 1, u32::MAX >> 1, "slots")?;
            if self.disks.iter().filter(|other| other.path == disk.path).count() > 1 {
                return Err(wrong("disks.path", format!("{} twice", disk.path.display()), "each path once"));
            }
        }
        check("disks.blocks", self.disk_blocks(), 0, u64::from(u32::MAX >> 1), "slots in all")
    }

    fn validate_layout(&self) -> Result<()> {
        let Some(layout) = &self.device_layout else { return Ok(()) };
        if layout.block_bytes() != self.block_bytes {
            return Err(wrong(
                "device_layout",
                format!("segments of {} bytes in all", layout.block_bytes()),
                format!("block_bytes = {}", self.block_bytes),
            ));
        }
        Ok(())
    }
}

fn wrong(field: &'static str, found: impl ToString, expected: impl Into<String>) -> Error {
    Error::Config { field, found: found.to_string(), expected: expected.into() }
}

fn check<T: PartialOrd + std::fmt::Display>(field: &'static str, found: T, min: T, max: T, unit: &str) -> Result<()> {
    if found < min || found > max {
        return Err(wrong(field, format!("{found}"), format!("{min} to {max} {unit}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid() {
        Config::default().validate().expect("default");
    }

    #[test]
    fn every_wrong_field_is_named() {
        type Spoil = fn(&mut Config);
        let cases: [(&str, Spoil); 33] = [
            ("block_bytes", |c| c.block_bytes = 0),
            ("block_bytes", |c| c.block_bytes = (1 << 30) + 1),
            ("block_bytes", |c| c.block_bytes = usize::MAX),
            ("host_blocks", |c| c.host_blocks = 0),
            ("device_blocks", |c| c.device_blocks = u32::MAX),
            ("copy_blocks_max", |c| c.copy_blocks_max = 0),
            ("gdr_stuck_ms", |c| c.gdr_stuck_ms = 0),
            ("cufile_stuck_ms", |c| c.cufile_stuck_ms = 86_400_001),
            ("selective_hits", |c| c.selective_hits = 0),
            ("blocking_threads", |c| c.blocking_threads = 0),
            ("read_bytes_in_flight_max", |c| c.read_bytes_in_flight_max = 1),
            ("write_bytes_in_flight_max", |c| c.write_bytes_in_flight_max = 1),
            ("movements_max", |c| c.movements_max = 0),
            ("waiters_max", |c| c.waiters_max = 0),
            ("namespace", |c| c.namespace.clear()),
            ("gdr_device", |c| c.gdr_device = Some(String::new())),
            ("disk_failures_max", |c| c.disk_failures_max = 0),
            ("workers", |c| c.workers = Some(257)),
            ("spin_us", |c| c.spin_us = 10_001),
            ("deadline_ms", |c| c.deadline_ms = 0),
            ("deadline_ms", |c| c.deadline_ms = u64::MAX),
            ("low_watermark", |c| c.low_watermark = f64::NAN),
            ("high_watermark", |c| c.high_watermark = 0.05),
            ("write_budget", |c| c.write_budget = Some(u64::MAX)),
            ("write_budget", |c| (c.write_policy, c.write_budget) = (WritePolicy::ByValue, Some(240 << 16))),
            ("drive_writes_per_day", |c| (c.drive_writes_per_day, c.drive_bytes) = (Some(1.0), Some(u64::MAX))),
            ("drive_writes_per_day", |c| {
                c.write_policy = WritePolicy::ByValue;
                (c.drive_writes_per_day, c.drive_bytes) = (Some(f64::NAN), Some(u64::MAX));
            }),
            ("drive_bytes", |c| c.drive_writes_per_day = Some(1.0)),
            ("drive_bytes", |c| c.drive_bytes = Some(1 << 40)),
            ("write_budget", |c| (c.write_budget, c.drive_bytes) = (Some(1 << 40), Some(1 << 40))),
            ("disks.blocks", |c| c.disks = vec![DiskPath { path: "a".into(), blocks: 0 }]),
            ("disks.path", |c| c.disks = vec![DiskPath { path: "a".into(), blocks: 1 }; 2]),
            ("disks.path", |c| c.disks = vec![DiskPath { path: "".into(), blocks: 1 }]),
        ];
        for (name, spoil) in cases {
            let mut config = Config::default();
            spoil(&mut config);
            match config.validate() {
                Err(Error::Config { field, .. }) => assert_eq!(field, name),
                other => panic!("{name}: {other:?}"),
            }
        }
    }
}

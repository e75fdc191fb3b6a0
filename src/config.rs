//! What a cache is opened with. Validated once; errors name the field.

use std::{fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::{
    block::{IO_ALIGN, Layout, Tier},
    error::{Error, Result},
};

/// When a stored block goes to disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum WritePolicy {
    /// At once; `store` resolves when the disk has taken the block (written, not flushed).
    #[default]
    WriteThrough,
    /// After [`Config::selective_hits`] hits; `store` resolves when the block is visible.
    WriteThroughSelective,
    /// When the block must leave host memory, or at `sync`; `store` resolves when it is visible.
    WriteBack,
}

/// What host memory and disk give up first. Leaves go before the blocks that they stand on, whatever the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum Eviction {
    /// What was used longest ago.
    #[default]
    Lru,
    /// The colder of what was used in one request and what was used in more, weighed by which of the two is asked for
    /// again after its eviction (see [`Rb`](crate::index::Rb)). Better than `Lru` where many blocks are used once and
    /// the tier is small. Takes up to 48 bytes more a slot.
    Rb,
    /// As `Rb`; and the last tier (disk, or host memory without one) refuses a part of the blocks that are new to it,
    /// with all that follow them in their chains, while it gives up blocks before they are asked for again. A store
    /// that is refused is no error: where there is a disk tier its block stays in host memory only, else it is a miss
    /// when it is asked for. Refusals are counted ([`TierStats::refused`](crate::TierStats::refused)).
    RbRefuse,
}

impl Eviction {
    /// The policy of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [("lru", Eviction::Lru), ("rb", Eviction::Rb), ("rb_refuse", Eviction::RbRefuse)]
            .into_iter()
            .find_map(|(known, policy)| (known == name).then_some(policy))
    }
}

/// What serves reads and writes of the disk tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum StorageKind {
    /// The ring, or the thread pool (with a warning) where the ring is refused.
    #[default]
    Auto,
    /// The ring, or an error.
    Uring,
    /// A pool of threads that call `pread` and `pwrite`.
    Blocking,
}

/// How copies between host and device memory are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyMethod {
    /// One call of the driver for each copy: its copy engines are fastest for megabytes.
    Loop,
    /// One call of the driver for all copies of a batch (CUDA 12.8).
    Batch,
    /// One launch of our own kernel: fastest for kilobytes, and takes multiprocessors from others meanwhile.
    Kernel,
}

impl CopyMethod {
    /// All of them.
    pub const ALL: [CopyMethod; 3] = [CopyMethod::Loop, CopyMethod::Batch, CopyMethod::Kernel];

    /// The name in settings and reports.
    pub fn name(self) -> &'static str {
        ["loop", "batch", "kernel"][self as usize]
    }

    /// The method of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.name() == name)
    }
}

impl fmt::Display for CopyMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the device tier is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// A CUDA device, or host memory that plays one (with a warning) where there is none.
    #[default]
    Auto,
    /// Host memory that plays a device.
    Simulated,
    /// A CUDA device, or an error.
    Cuda,
}

/// Whether blocks go between disk and a CUDA device by libcufile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum CufileMode {
    /// Where libcufile proves, when the cache is opened, that it leaves host memory out; through host memory otherwise.
    /// A process that has asked libcufile 1.15 for the proof may crash in the library when it ends.
    Auto,
    /// By libcufile or not at all, also in its compat mode, which is slower than host memory: for tests.
    On,
    /// Through host memory. The library is not even looked for.
    #[default]
    Off,
}

/// Whether copies between host and device go through an RDMA device (GPUDirect RDMA).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum GdrMode {
    /// Where there is one that proves that it copies right, and where it is measured to be better; never to and from
    /// host memory that plays a device.
    #[default]
    Auto,
    /// Every copy that it can carry, or an error when the cache is opened.
    On,
    /// None. RDMA devices are not even looked for.
    Off,
}

impl GdrMode {
    /// The mode of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [("auto", GdrMode::Auto), ("on", GdrMode::On), ("off", GdrMode::Off)]
            .into_iter()
            .find_map(|(known, mode)| (known == name).then_some(mode))
    }
}

/// Which way to copy, where two are about as quick.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum CopyPrefer {
    /// The one that should be done first.
    Latency,
    /// The one that has less to do.
    #[default]
    Throughput,
    /// The one that takes no multiprocessor and no copy engine from the device: an RDMA device, also where it takes up
    /// to twice as long.
    SpareGpu,
}

/// What to do where a path has no direct I/O.
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
    /// A directory (the store is the file `kvhoist.store` in it), a file, or a block device.
    pub path: PathBuf,
    /// Slots kept there.
    pub blocks: u32,
}

/// Settings of a cache. `Config::default()` is a small cache in memory only.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Size of every block, bytes. 1 B to 1 GiB; slots are padded to 4 KiB.
    pub block_bytes: usize,
    /// Slots in host memory. At least 1.
    pub host_blocks: u32,
    /// Slots in device memory. 0: no device tier.
    pub device_blocks: u32,
    /// What the device tier is made of.
    pub device: DeviceKind,
    /// Which CUDA device, as CUDA counts.
    pub device_ordinal: u32,
    /// How copies to and from a CUDA device are made. `None`: whatever is quickest there, as measured when the cache is
    /// opened. The environment's `KVHOIST_COPY` (`auto`, `loop`, `batch`, `kernel`) goes before this.
    pub copy: Option<CopyMethod>,
    /// Thread blocks of 512 threads that the copy kernel may use at a time. 1 to 1024.
    pub copy_blocks_max: u32,
    /// Whether copies go through an RDMA device. The environment's `KVHOIST_GDR` (`auto`, `on`, `off`) goes before
    /// this.
    pub gdr: GdrMode,
    /// The RDMA device, by its name (`mlx5_0`). `None`: the one nearest to the device.
    pub gdr_device: Option<String>,
    /// Milliseconds after which an RDMA device that completes nothing has failed: its copies then go another way. It
    /// retries for half a second before it says so itself. Well under `deadline_ms`. 1 to 86,400,000.
    pub gdr_stuck_ms: u64,
    /// Which way to copy, where two are about as quick.
    pub copy_prefer: CopyPrefer,
    /// Whether blocks go between disk and a CUDA device by libcufile.
    pub cufile: CufileMode,
    /// Milliseconds after which a call or a batch of libcufile is given up on; the block then goes through host memory,
    /// and so do all others. Well under `deadline_ms`. 1 to 86,400,000.
    pub cufile_stuck_ms: u64,
    /// How a block lies in device memory; its segments sum to `block_bytes`. `None`: one segment.
    pub device_layout: Option<Layout>,
    /// The disk tier's files or devices; slots are striped over them. Empty: no disk tier.
    pub disks: Vec<DiskPath>,
    /// The name that keys belong to. A store of another namespace is refused.
    pub namespace: String,
    /// When blocks go to disk.
    pub write_policy: WritePolicy,
    /// Hits after which `write_through_selective` writes a block. 1 to 255.
    pub selective_hits: u8,
    /// What host memory and disk give up first.
    pub eviction_policy: Eviction,
    /// What serves reads and writes of the disk tier.
    pub storage: StorageKind,
    /// What to do where a path has no direct I/O.
    pub direct_io: DirectIo,
    /// Threads of the blocking storage engine. 1 to 256.
    pub blocking_threads: usize,
    /// `load_into` and `store_from` of registered host memory go straight between it and disk, and leave no copy in the
    /// host tier: for callers that have a pool of their own. Where every segment begins where the drives can reach
    /// memory ([`Stats::memory_align_bytes`](crate::Stats::memory_align_bytes): 4 on most NVMe drives, 512 on many
    /// others), is a multiple of 4096 bytes long, and at least 64 KiB or the whole block; stores with `write_through`
    /// only. The rest goes through host slots. Such a call ends when the kernel has given the memory back: a disk that
    /// stalls holds it up past `deadline_ms`.
    pub bypass_host: bool,
    /// Bytes that reads of the disk tier may have in flight. At least one block. The default keeps one to three drives
    /// busy; for an array 32 MiB a drive is a good value.
    pub read_bytes_in_flight_max: u64,
    /// Bytes that writes to the disk tier may have in flight. At least one block.
    pub write_bytes_in_flight_max: u64,
    /// Movements that may be asked for and not yet finished; past it callers get `Error::Busy`.
    pub movements_max: u32,
    /// Callers that may wait for one block or one slot; past it callers get `Error::Busy`.
    pub waiters_max: u32,
    /// Prefetches and background writes that may be queued; past it they are refused and counted.
    pub background_max: u32,
    /// Write-back starts when less than this share of the host slots could be given up at once.
    pub low_watermark: f64,
    /// ... and stops when this share could.
    pub high_watermark: f64,
    /// Slots of the disk tier that may be quarantined before it is taken out of service. It is when no other is left,
    /// too.
    pub quarantine_max: u32,
    /// Failures in a row of one file, without a success between them, before the disk tier is taken out of service
    /// (reads) or takes no more blocks (writes). At least 1.
    pub disk_failures_max: u32,
    /// Threads that take reads, checksums and copies of host memory off the reactor, so that none of them is bound by
    /// one core. 0: all of it is done on the reactor. `None`: half the processors that the process may use, 8 at most;
    /// none where it may use two or fewer. 0 to 256.
    pub workers: Option<u32>,
    /// Microseconds for which the reactor looks for work before it sleeps; while a movement is under way it then does
    /// not sleep at all, and takes a processor. Worth it for single blocks from fast disks, most of all in a virtual
    /// machine. 0 (sleep at once) to 10,000.
    pub spin_us: u32,
    /// Milliseconds after which those who wait for a movement or a slot get `Error::Timeout`; it may be a quarter more.
    /// The movement itself goes on for as long as the disk takes. 1 to 86,400,000 (a day).
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
    /// Bytes between two slots of a tier: `block_bytes` padded for direct I/O. `usize::MAX` where that is more than
    /// memory can have, which no [valid](Self::validate) setting is.
    pub fn slot_bytes(&self) -> usize {
        self.block_bytes.checked_next_multiple_of(IO_ALIGN).unwrap_or(usize::MAX)
    }

    /// The tier below which there is none: what it does not have is nowhere.
    pub(crate) fn last_tier(&self) -> Tier {
        if self.disks.is_empty() { Tier::Host } else { Tier::Disk }
    }

    /// Blocks that are asked for again may be in host memory and not yet on disk, where they are to be.
    pub(crate) fn selects_for_disk(&self) -> bool {
        !self.disks.is_empty()
            && (self.write_policy == WritePolicy::WriteThroughSelective || self.eviction_policy == Eviction::RbRefuse)
    }

    /// Slots of the whole disk tier.
    pub fn disk_blocks(&self) -> u64 {
        self.disks.iter().map(|disk| u64::from(disk.blocks)).sum()
    }

    /// Threads that [`workers`](Self::workers) comes to on this machine.
    pub fn worker_threads(&self) -> u32 {
        self.workers.unwrap_or_else(|| {
            let processors = std::thread::available_parallelism().map_or(1, usize::from);
            if processors <= 2 { 0 } else { (processors / 2).min(8) as u32 }
        })
    }

    /// Checks every field; the error names the first that is wrong.
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
        self.validate_disks()?;
        self.validate_layout()
    }

    /// All other sizes follow from this one.
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
        let cases: [(&str, Spoil); 26] = [
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

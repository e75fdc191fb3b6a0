//! The groups of settings.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use super::choices::{CopyMethod, CopyPrefer, DeviceKind, DirectIo, EngineMode, StorageKind, WritePolicy};
use crate::block::Layout;

/// The size of a tier, or of one path of the disk tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capacity {
    /// Bytes, rounded down to whole slots: of memory, or of a path's file or device, which has the records of the
    /// blocks too.
    Bytes(u64),
    /// Slots.
    Blocks(u32),
}

/// One file or raw device of the disk tier.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskPath {
    /// A directory (the store is its file `kvhoist.store`), a file, or a block device.
    pub path: PathBuf,
    /// The size of this path. In bytes it is what the file or device has, records of the blocks included: those take
    /// 1 to 2 MiB, and 0.2 % of 64 KiB blocks, less of larger ones.
    pub capacity: Capacity,
}

impl DiskPath {
    /// A path whose file or device has `bytes` at most. [`file_bytes`](Self::file_bytes) counts them.
    pub fn with_bytes(path: impl Into<PathBuf>, bytes: u64) -> Self {
        DiskPath { path: path.into(), capacity: Capacity::Bytes(bytes) }
    }

    /// A path with this number of slots.
    pub fn with_blocks(path: impl Into<PathBuf>, blocks: u32) -> Self {
        DiskPath { path: path.into(), capacity: Capacity::Blocks(blocks) }
    }
}

/// Settings of host memory.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct HostConfig {
    /// Host memory for blocks, at least one slot.
    pub capacity: Capacity,
    /// Write-back starts when less than this share of the host slots could be evicted immediately. 0.0 to 1.0.
    pub low_watermark: f64,
    /// Write-back stops when this share of the host slots could be evicted immediately. `low_watermark` to 1.0.
    pub high_watermark: f64,
    /// Transfers blocks of `load_into` and `store_from` directly between registered host memory and disk, without a
    /// copy in the host tier: for callers that have a pool of their own. Applies if every segment is aligned as the
    /// drives require ([`Stats::memory_align_bytes`](crate::Stats::memory_align_bytes): 4 on most NVMe drives, 512 on
    /// many others), has a length that is a multiple of 4096 bytes, and is at least 64 KiB long or the whole block;
    /// stores also need `write_through`. Other blocks go through host slots. Such a call ends when the kernel has
    /// released the memory: a stalled disk can delay it past `deadline_ms`.
    pub bypass: bool,
    /// Host slots may be parked: their memory comes and goes, so the ring does not register it.
    #[doc(hidden)]
    pub parks: bool,
}

impl Default for HostConfig {
    fn default() -> Self {
        HostConfig {
            capacity: Capacity::Blocks(1024),
            low_watermark: 0.10,
            high_watermark: 0.20,
            bypass: false,
            parks: false,
        }
    }
}

/// Settings of device memory, and of the copies to and from it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DeviceConfig {
    /// Device memory for blocks. 0: no device tier.
    pub capacity: Capacity,
    /// The memory of the device tier.
    pub kind: DeviceKind,
    /// CUDA ordinal of the device.
    pub ordinal: u32,
    /// Lengths of a block's segments in device memory; they sum to `block_bytes`. `None`: one segment.
    pub layout: Option<Layout>,
    /// How copies to and from a CUDA device are made. `None`: the fastest method, measured when the cache is opened.
    /// The environment variable `KVHOIST_COPY` (`auto`, `loop`, `batch`, `kernel`) takes precedence.
    pub copy: Option<CopyMethod>,
    /// Largest number of thread blocks, of 512 threads each, that the copy kernel may use at a time. 1 to 1024.
    pub copy_blocks_max: u32,
    /// Which copy engine to prefer if two are about equally fast.
    pub copy_prefer: CopyPrefer,
    /// Whether an RDMA device makes copies between host and device memory (GPUDirect RDMA). `auto`: those copies that
    /// it was measured to make faster; none with a simulated device. `on`: every copy that it can make. The environment
    /// variable `KVHOIST_GDR` (`auto`, `on`, `off`) takes precedence.
    pub gdr: EngineMode,
    /// Name of the RDMA device (`mlx5_0`). `None`: the one nearest to the GPU.
    pub gdr_device: Option<String>,
    /// Milliseconds without a completion after which the RDMA device has failed and another engine makes its copies.
    /// The device itself reports an error after half a second of retries. Set it well below `deadline_ms`. 1 to
    /// 86,400,000.
    pub gdr_stuck_ms: u64,
    /// Whether libcufile transfers blocks between disk and a CUDA device. `auto`: if the self-test shows that it
    /// bypasses host memory; a process that has run the self-test with libcufile 1.15 may crash in libcufile when it
    /// exits. `on`: also in its compat mode, which is slower than transfers through host memory: for tests.
    pub cufile: EngineMode,
    /// Milliseconds after which a call or a batch of libcufile counts as stuck; this block and all later ones then go
    /// through host memory. Set it well below `deadline_ms`. 1 to 86,400,000.
    pub cufile_stuck_ms: u64,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        DeviceConfig {
            capacity: Capacity::Blocks(0),
            kind: DeviceKind::default(),
            ordinal: 0,
            layout: None,
            copy: None,
            copy_blocks_max: 16,
            copy_prefer: CopyPrefer::default(),
            gdr: EngineMode::Auto,
            gdr_device: None,
            gdr_stuck_ms: 10_000,
            cufile: EngineMode::Off,
            cufile_stuck_ms: 5_000,
        }
    }
}

/// A file that each ring of a cache holds open.
#[derive(Debug, Clone)]
pub struct HeldFile(Arc<OwnedFd>);

impl HeldFile {
    /// Of a descriptor that others may hold too.
    pub fn new(file: Arc<OwnedFd>) -> Self {
        HeldFile(file)
    }

    pub(crate) fn file(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0)
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl PartialEq for HeldFile {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Settings of the disk tier.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DiskConfig {
    /// Files or devices of the disk tier, 64 at most; slots are striped over them. Empty: no disk tier.
    pub paths: Vec<DiskPath>,
    /// When blocks are written to disk.
    pub write_policy: WritePolicy,
    /// Number of hits after which `write_through_selective` writes a block. 1 to 255.
    pub selective_hits: u8,
    /// Bytes a day that `by_value` may write to the disk tier, all paths together. Held over any hour within a tenth,
    /// restarts included: a tenth of an hour's bytes can be saved up; a new store begins with that, a store that is
    /// opened again with nothing. Blocks in their second use are written first; of other chains a random share is
    /// written whole. Blocks are counted with the record page of each, not the record table that a `close` writes. At
    /// least 240 blocks with their records. `None`: no limit but
    /// [`drive_writes_per_day`](Self::drive_writes_per_day).
    pub write_budget: Option<u64>,
    /// The budget as a drive's data sheet has it: how often a day its whole size may be written. With
    /// [`drive_bytes`](Self::drive_bytes), and instead of [`write_budget`](Self::write_budget). More than 0.
    pub drive_writes_per_day: Option<f64>,
    /// Size of the drive, or of all drives of the disk tier together, bytes; what [`disks`](Self::paths) takes of it
    /// does not matter.
    pub drive_bytes: Option<u64>,
    /// The I/O engine of the disk tier.
    pub storage: StorageKind,
    /// What to do if a path has no direct I/O.
    pub direct_io: DirectIo,
    /// Threads of the blocking I/O engine, of which a quarter, rounded up, only read, so that no read waits for a
    /// write; a lone one does both. 1 to 256.
    pub blocking_threads: usize,
    /// Largest number of quarantined slots in the disk tier before it is taken out of service. It is also taken out of
    /// service when no other slot is left. A slot is quarantined when its block cannot be read, or has a wrong checksum
    /// and was copied before this run stored it, or was right when this run read it before; and when it or its record
    /// cannot be written, as long as fewer than half as many are quarantined and another slot is left.
    pub quarantine_max: u32,
    /// Number of consecutive failures of one file after which the disk tier is taken out of service (reads) or accepts
    /// no more blocks (writes). A page of records that fails again counts once, unless a store waits for it. At least
    /// 1.
    pub failures_max: u32,
    /// Held open by each ring until the ring's operations have ended, however this process ends.
    #[doc(hidden)]
    pub rings_hold: Option<HeldFile>,
    /// How long an open waits for a store that is locked: a process that was killed keeps it until its I/O has ended.
    #[doc(hidden)]
    pub lock_wait: Duration,
}

impl Default for DiskConfig {
    fn default() -> Self {
        DiskConfig {
            paths: Vec::new(),
            write_policy: WritePolicy::default(),
            selective_hits: 2,
            write_budget: None,
            drive_writes_per_day: None,
            drive_bytes: None,
            storage: StorageKind::default(),
            direct_io: DirectIo::default(),
            blocking_threads: 16,
            quarantine_max: 1_024,
            failures_max: 16,
            rings_hold: None,
            lock_wait: Duration::from_secs(1),
        }
    }
}

/// Limits on what is requested, queued and in flight.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Largest number of bytes that reads of the disk tier may have in flight per path. All paths share what they have
    /// together; one block is always allowed. At least 1.
    pub read_bytes_in_flight_max: u64,
    /// Largest number of bytes that writes to the disk tier may have in flight per path. All paths share what they have
    /// together; one block is always allowed. At least 1.
    pub write_bytes_in_flight_max: u64,
    /// Largest number of movements requested but not finished; further calls wait, up to `deadline_ms`, and those of a
    /// `CompletionQueue` get `Error::Busy`. 1 to 16,777,216.
    pub movements_max: u32,
    /// Largest number of callers that may wait for one block or one slot; further calls get `Error::Busy`. 1 to
    /// 16,777,216.
    pub waiters_max: u32,
    /// Largest number of queued prefetches and background writes; further ones are refused and counted. 1 to
    /// 16,777,216.
    pub background_max: u32,
    /// Milliseconds after which callers that wait for a movement or a slot get `Error::Timeout`; it may take a quarter
    /// longer. The movement itself continues for as long as the disk takes. 1 to 86,400,000 (a day).
    pub deadline_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            read_bytes_in_flight_max: 96 << 20,
            write_bytes_in_flight_max: 32 << 20,
            movements_max: 65_536,
            waiters_max: 65_536,
            background_max: 4_096,
            deadline_ms: 30_000,
        }
    }
}

//! The flags of `kvhoist replay`.

use std::path::PathBuf;

use clap::ValueEnum;
use kvhoist::{DeviceKind, DirectIo, StorageKind, WritePolicy};

use crate::{failure::Failure, size::parse_bytes};

/// Flags of `kvhoist replay`.
#[derive(clap::Args)]
pub struct Args {
    /// Trace in Mooncake's format (JSON lines with hash_ids); without it a built-in workload runs.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Bytes of a block, for example 64KiB or 1MiB.
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = parse_bytes)]
    pub block_bytes: usize,
    /// What the device tier is made of; auto: a CUDA device, or host memory where there is none.
    #[arg(long, value_name = "KIND", default_value = "auto")]
    pub device: Device,
    /// Slots in device memory; 0: no device tier, blocks are fetched to the host.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub device_blocks: u32,
    /// Slots in host memory.
    #[arg(long, value_name = "N", default_value_t = 2048)]
    pub host_blocks: u32,
    /// Slots on disk, over all paths; 0: no disk tier.
    #[arg(long, value_name = "N", default_value_t = 18_279)]
    pub disk_blocks: u32,
    /// Directory, file or block device of the store, kept afterwards; several are striped. Default: a
    /// temporary directory, removed afterwards.
    #[arg(long, value_name = "DIR")]
    pub path: Vec<PathBuf>,
    /// Requests in flight.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub in_flight: usize,
    /// When blocks go to disk.
    #[arg(long, value_name = "POLICY", default_value = "write_through")]
    pub write_policy: Policy,
    /// Eviction policy.
    #[arg(long, value_name = "POLICY", default_value = "lru")]
    pub policy: Eviction,
    /// Seed of the built-in workload.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// What serves the disk tier.
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub storage: Engine,
    /// Whether a path without direct I/O is refused.
    #[arg(long, value_name = "MODE", default_value = "require")]
    pub direct_io: Direct,
    /// Draw the hits per tier over the trace into this SVG file.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// No progress on stderr.
    #[arg(long)]
    pub quiet: bool,
}

impl Args {
    /// What clap cannot check.
    pub fn check(&self) -> Result<(), Failure> {
        if !(1..=65_536).contains(&self.in_flight) {
            let found = self.in_flight;
            return Err(Failure::usage(format!("--in-flight: found {found}, expected 1 to 65536 requests")));
        }
        if self.path.len() as u64 > u64::from(self.disk_blocks) {
            let (paths, blocks) = (self.path.len(), self.disk_blocks);
            return Err(Failure::usage(format!(
                "--disk-blocks: found {blocks} for {paths} paths, expected one slot a path at least"
            )));
        }
        Ok(())
    }
}

/// [`WritePolicy`] as a flag.
#[allow(clippy::enum_variant_names, reason = "the names are the library's")]
#[derive(Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Policy {
    WriteThrough,
    WriteThroughSelective,
    WriteBack,
}

impl From<Policy> for WritePolicy {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::WriteThrough => WritePolicy::WriteThrough,
            Policy::WriteThroughSelective => WritePolicy::WriteThroughSelective,
            Policy::WriteBack => WritePolicy::WriteBack,
        }
    }
}

/// Eviction policies that a replay can try.
#[derive(Clone, Copy, ValueEnum)]
pub enum Eviction {
    Lru,
    Rb,
}

impl From<Eviction> for kvhoist::Eviction {
    fn from(eviction: Eviction) -> Self {
        match eviction {
            Eviction::Lru => kvhoist::Eviction::Lru,
            Eviction::Rb => kvhoist::Eviction::Rb,
        }
    }
}

/// [`StorageKind`] as a flag.
#[derive(Clone, Copy, ValueEnum)]
pub enum Engine {
    Auto,
    Uring,
    Blocking,
}

impl From<Engine> for StorageKind {
    fn from(engine: Engine) -> Self {
        match engine {
            Engine::Auto => StorageKind::Auto,
            Engine::Uring => StorageKind::Uring,
            Engine::Blocking => StorageKind::Blocking,
        }
    }
}

/// [`DirectIo`] as a flag.
#[derive(Clone, Copy, ValueEnum)]
pub enum Direct {
    Require,
    Prefer,
}

impl From<Direct> for DirectIo {
    fn from(direct: Direct) -> Self {
        match direct {
            Direct::Require => DirectIo::Require,
            Direct::Prefer => DirectIo::Prefer,
        }
    }
}

/// [`DeviceKind`] as a flag.
#[derive(Clone, Copy, ValueEnum)]
pub enum Device {
    Auto,
    Simulated,
    Cuda,
}

impl From<Device> for DeviceKind {
    fn from(device: Device) -> Self {
        match device {
            // Chosen here, so that a replay without a GPU, as most are, has nothing to warn of.
            Device::Auto if kvhoist::device::cuda::discover().devices.is_empty() => DeviceKind::Simulated,
            Device::Auto | Device::Cuda => DeviceKind::Cuda,
            Device::Simulated => DeviceKind::Simulated,
        }
    }
}

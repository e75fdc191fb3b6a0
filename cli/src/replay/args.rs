//! The flags of `kvhoist replay`.

use std::path::PathBuf;

use clap::ValueEnum;
use kvhoist::{DeviceKind, DirectIo, Error, Eviction, StorageKind, WritePolicy, internals::config::SETTING_NAMES};

use crate::{choice::choice, failure::Failure, plot, shown::shown, size::parse_bytes};

/// Flags of `kvhoist replay`.
#[derive(clap::Args, Clone)]
pub struct Args {
    /// Trace: requests in Mooncake's format (JSON lines with hash_ids), sessions of agents (JSON lines with requests)
    /// or MLPerf Storage's (the CSV of kv-cache.py --io-trace-log), as it is or compressed by gzip or zstd; -:
    /// standard input. Without it a built-in workload runs. Several are replayed one after the other, each with an
    /// empty store.
    #[arg(long, value_name = "FILE")]
    pub trace: Vec<PathBuf>,
    /// Compare eviction policies by their hit ratios over the capacity, each in a cache in host memory alone, beside
    /// LRU and Belady's bound; --plot draws the curves. Uses only --trace, --block-bytes (default 4KiB), --shares,
    /// --seed, --json and --quiet of the other flags.
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',', value_parser = choice::<Eviction>())]
    pub compare: Vec<Eviction>,
    /// Compare write policies by hit ratios and bytes written to disk, beside write_through, in caches with host memory
    /// for 2 % of the blocks of a trace. Uses only --trace, --shares (of the disk), --policy, --write-budget, --path (a
    /// directory for the stores), --block-bytes, --storage, --direct-io, --speed, --seed, --json and --quiet of the
    /// other flags.
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',', value_parser = choice::<WritePolicy>())]
    #[arg(conflicts_with = "compare")]
    pub compare_writes: Vec<WritePolicy>,
    /// Capacities that --compare and --compare-writes try, percent of the distinct blocks of a trace [default:
    /// 1,2,5,10,20,40; 5,10,20]
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', value_parser = parse_share)]
    pub shares: Vec<f64>,
    /// Start each request at its timestamp (milliseconds), X times as fast as recorded. Without this a request starts
    /// as soon as fewer than --in-flight others are running.
    #[arg(long, value_name = "X", value_parser = parse_speed)]
    pub speed: Option<f64>,
    /// JSON file with settings, as for the engines' adapters (path, capacity, host_bytes, write_policy, ...). Flags
    /// override it.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Bytes of a block, for example 1.5MiB [default: 64KiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub block_bytes: Option<usize>,
    /// Memory of the device tier; auto: a CUDA device, or host memory if there is none [default: auto].
    #[arg(long, value_name = "KIND")]
    pub device: Option<Device>,
    /// Slots in device memory; 0: no device tier, blocks are fetched to the host [default: 256]
    #[arg(long, value_name = "N")]
    pub device_blocks: Option<u32>,
    /// Bytes of device memory, instead of slots.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with = "device_blocks")]
    pub device_bytes: Option<usize>,
    /// Slots in host memory [default: 2048]
    #[arg(long, value_name = "N")]
    pub host_blocks: Option<u32>,
    /// Bytes of host memory, instead of slots.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with = "host_blocks")]
    pub host_bytes: Option<usize>,
    /// Slots on disk, over all paths; 0: no disk tier [default: 18279]
    #[arg(long, value_name = "N")]
    pub disk_blocks: Option<u32>,
    /// Bytes on disk, over all paths and with the records, instead of slots.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with = "disk_blocks")]
    pub capacity: Option<usize>,
    /// Directory, file or block device of the store, which is kept. Repeat it to stripe blocks over several. A path
    /// that does not exist becomes a directory if its parent exists. Default: a temporary directory, removed
    /// afterwards.
    #[arg(long, value_name = "DIR")]
    pub path: Vec<PathBuf>,
    /// Requests in flight.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub in_flight: usize,
    /// When blocks go to disk [default: write_through]
    #[arg(long, value_name = "POLICY", value_parser = choice::<WritePolicy>())]
    pub write_policy: Option<WritePolicy>,
    /// Bytes a day that by_value may write to disk, in days of real time: with --speed 60 a day of the trace takes 24
    /// minutes.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub write_budget: Option<usize>,
    /// Eviction policy [default: rb]
    #[arg(long, value_name = "POLICY", value_parser = choice::<Eviction>())]
    pub policy: Option<Eviction>,
    /// Seed of the built-in workload.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// How the disk is read and written [default: auto]
    #[arg(long, value_name = "ENGINE", value_parser = choice::<StorageKind>())]
    pub storage: Option<StorageKind>,
    /// Whether a path without direct I/O is refused [default: require]
    #[arg(long, value_name = "MODE", value_parser = choice::<DirectIo>())]
    pub direct_io: Option<DirectIo>,
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
    /// Checks that clap cannot make.
    pub fn check(&self) -> Result<(), Failure> {
        if !(1..=65_536).contains(&self.in_flight) {
            let found = self.in_flight;
            return Err(Failure::usage(format!("--in-flight: found {found}, expected 1 to 65536 requests")));
        }
        let compares = !self.compare.is_empty() || !self.compare_writes.is_empty();
        if !compares && !self.shares.is_empty() {
            return Err(Failure::usage("--shares: expected --compare or --compare-writes with it"));
        }
        // The file itself is made once the trace is read: nothing would remove it where that is interrupted.
        self.plot.as_deref().map(plot::create).transpose().map(drop)
    }

    /// Why there is no cache. A setting that no flag gave has its name in the file.
    pub fn failure(&self, error: Error) -> Failure {
        let is_of_flag = |field: &str| match field {
            "block_bytes" => self.block_bytes.is_some(),
            "host_blocks" => self.host_blocks.is_some(),
            "host_bytes" => self.host_bytes.is_some(),
            "device_blocks" => self.device_blocks.is_some(),
            "device_bytes" => self.device_bytes.is_some(),
            "device" => self.device.is_some(),
            "disks.blocks" | "disks.bytes" => self.disk_blocks.is_some() || self.capacity.is_some(),
            "disks" | "disks.path" => !self.path.is_empty(),
            "write_policy" => self.write_policy.is_some(),
            "write_budget" => self.write_budget.is_some(),
            "eviction_policy" => self.policy.is_some(),
            "storage" => self.storage.is_some(),
            "direct_io" => self.direct_io.is_some(),
            _ => !SETTING_NAMES.contains(&field),
        };
        match (&self.config, &error) {
            (Some(file), Error::Config { field, .. }) if !is_of_flag(field) => {
                Failure::usage(format!("--config {}: {error}", shown(file)))
            }
            // A replay has one namespace, and whose store this is may need it.
            (_, Error::Store { path, found, action, .. }) if action.contains("`namespace`") => {
                let expected = "a store of a replay (`namespace` = \"replay\")";
                Error::store(path, found, expected, "choose another `--path`").into()
            }
            // In the words of the flag that was given.
            _ if self.capacity.is_some() => error.with_settings_named(&[("disks.blocks", "--capacity")]).into(),
            _ => error.into(),
        }
    }
}

fn parse_share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| (0.001..=100.0).contains(share));
    share.ok_or_else(|| "expected 0.001 to 100 percent of the blocks of a trace".into())
}

fn parse_speed(text: &str) -> Result<f64, String> {
    let speed = text.parse::<f64>().ok().filter(|speed| (0.001..=1e6).contains(speed));
    speed.ok_or_else(|| "expected 0.001 to 1000000, 1 for the speed at which the trace was recorded".into())
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
            Device::Auto if !kvhoist::internals::device::cuda::has_device() => DeviceKind::Simulated,
            Device::Auto | Device::Cuda => DeviceKind::Cuda,
            Device::Simulated => DeviceKind::Simulated,
        }
    }
}

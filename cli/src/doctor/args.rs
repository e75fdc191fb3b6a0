//! The flags.

use std::path::PathBuf;

use super::finding::Want;

/// Flags of `kvhoist doctor`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory for a store, where a store of 64 MiB is created, measured and removed. Repeat it for several drives.
    /// Default: the configured paths, or the directory for temporary files.
    #[arg(long, value_name = "DIR")]
    pub path: Vec<PathBuf>,
    /// Settings as for the engines' adapters (path, capacity, host_bytes, ...): JSON, or a file with it (FILE or
    /// @FILE). The exit status is 1 if this machine has no room for them.
    #[arg(long, value_name = "JSON|FILE")]
    pub config: Option<String>,
    /// Processes of this machine that open this configuration: usually one per GPU; 1 if a service keeps the blocks of
    /// all ranks.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub ranks: u32,
    /// Number of the CUDA device.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: u32,
    /// Required features; the exit status is 1 if one is missing [default: ring,direct-io, as far as the settings of
    /// --config use them].
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    pub want: Vec<Want>,
    /// Print every finding, also of devices that are neither configured nor wanted.
    #[arg(long)]
    pub full: bool,
    /// Print one JSON object instead of a table, with every finding.
    #[arg(long)]
    pub json: bool,
}

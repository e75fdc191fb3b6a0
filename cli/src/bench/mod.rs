//! `kvhoist bench`: the routes of this machine beside its bare hardware, in one run.

#[cfg(feature = "cuda")]
mod copy;
#[cfg(feature = "cuda")]
#[cfg_attr(not(feature = "rdma"), path = "absent.rs")]
mod gdr;
mod plot;
mod route;
mod table;

use clap::Subcommand;

use crate::failure::{EXIT_STATUS, Failure};

/// What to measure.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Copies between host memory and a CUDA device: by size, direction and method, or through an RDMA device. Every
    /// byte is verified.
    #[cfg(feature = "cuda")]
    #[command(after_help = EXIT_STATUS)]
    Copy(copy::Args),
    /// Cold blocks from disk to host memory and to the device, beside a bare ring loop on the same file.
    #[command(after_help = EXIT_STATUS)]
    Disk(route::Args),
    /// Blocks from host memory and from the device to disk, written through, beside a bare ring loop.
    #[command(after_help = EXIT_STATUS)]
    Store(route::Args),
}

/// Runs a benchmark and prints its table.
pub fn run(args: &Args) -> Result<(), Failure> {
    match &args.what {
        #[cfg(feature = "cuda")]
        What::Copy(args) => copy::run(args),
        What::Disk(args) => route::disk(args),
        What::Store(args) => route::store(args),
    }
}

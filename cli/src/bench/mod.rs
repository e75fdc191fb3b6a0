//! `kvhoist bench`: the routes of this machine beside its bare hardware, in one run.

mod copy;
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
        What::Copy(args) => copy::run(args),
        What::Disk(args) => route::disk(args),
        What::Store(args) => route::store(args),
    }
}

/// A current-thread runtime, as the reactor's is.
fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .map_err(|error| Failure::run(format!("cannot start a runtime: {error}")))
}

/// The middle one of an odd number of values, or the mean of the middle two.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) && middle > 0 {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    } else {
        sorted.get(middle).copied().unwrap_or(f64::NAN)
    }
}

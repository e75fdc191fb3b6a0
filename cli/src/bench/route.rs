//! `kvhoist bench disk` and `kvhoist bench store`: blocks through the cache, beside the bare ring loop.

use std::{
    io,
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
};

use kvhoist::DeviceKind;
use kvhoist_bench_kit::{
    measure::{Sample, Spread, ratio},
    routes::{COLD_DEPTHS, Report, Shape, Way},
};
use serde_json::json;

use super::{
    plot::Plot,
    table::{self, Table},
};
use crate::{
    failure::Failure,
    interrupt,
    progress::Progress,
    replay::Device,
    shown::shown,
    size::{parse_bytes, show_bytes},
};

/// Flags of `kvhoist bench disk` and `kvhoist bench store`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory on the file system to measure; its files are removed afterwards. Default: the directory for temporary
    /// files.
    #[arg(long, value_name = "DIR")]
    path: Option<PathBuf>,
    /// Sizes of blocks, multiples of 4 KiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, value_delimiter = ',', default_value = "128KiB,1MiB")]
    block_bytes: Vec<usize>,
    /// Blocks in flight.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "8,32")]
    in_flight: Vec<usize>,
    /// Bytes of each of the two files; every round moves all of them. At least 8 times the bytes in flight for reads,
    /// because otherwise memory still holds blocks of the round before.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "512MiB")]
    bytes: usize,
    /// Memory of the device tier; auto: a CUDA device, or host memory if there is none.
    #[arg(long, value_name = "KIND", default_value = "auto")]
    device: Device,
    /// Measured rounds, of which the median is printed.
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: u64,
    /// Microseconds for which the cache's thread polls before it sleeps (`spin_us`).
    #[arg(long, value_name = "N", default_value_t = 0)]
    spin_us: u32,
    /// Draw the throughputs into this SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// No progress on stderr.
    #[arg(long)]
    quiet: bool,
}

/// Most bytes of one file; the device gets a pool of the same size.
const BYTES_MAX: usize = 16 << 30;

const BLOCK_BYTES_MAX: usize = 64 << 20;
const IN_FLIGHT_MAX: usize = 1024;

/// `kvhoist bench disk`.
pub fn disk(args: &Args) -> Result<(), Failure> {
    let device = args.device.into();
    run(args, "kvhoist bench disk", device, [Way::DiskToHost, Way::DiskToDevice(device)], COLD_DEPTHS)
}

/// `kvhoist bench store`.
pub fn store(args: &Args) -> Result<(), Failure> {
    let device = args.device.into();
    run(args, "kvhoist bench store", device, [Way::HostToDisk, Way::DeviceToDisk(device)], 1)
}

/// `depths`: the blocks of a round, in multiples of the blocks in flight.
fn run(args: &Args, title: &str, device: DeviceKind, ways: [Way; 2], depths: usize) -> Result<(), Failure> {
    args.check(depths)?;
    let interrupted = interrupt::catch()?;
    let mut plot = Plot::new(args.plot.as_deref(), title, "MiB/s")?;
    let shapes = args.shapes();
    let mut progress = Progress::new(shapes.len() * ways.len(), "measurements", args.quiet);
    let device = if device == DeviceKind::Simulated { "simulated" } else { "CUDA" };
    let mut table = Table::new(
        format!("{title}: MiB/s, medians of {} rounds; the device is {device}; all blocks verified", args.rounds),
        vec![
            "route",
            "block bytes",
            "in flight",
            "contender",
            "MiB/s",
            "min",
            "max",
            "of bare",
            "from disk",
            "CPU-s/GiB",
        ],
    );
    let all = shapes.iter().flat_map(|shape| ways.into_iter().map(move |way| (shape, way)));
    for (at, (shape, way)) in all.enumerate() {
        let report = match shape.measure(way, &mut || end_if(&interrupted)) {
            Ok(report) => report,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => break,
            Err(error) => return Err(Failure::run(format!("{}: {error}", way.name()))),
        };
        enter(&mut table, &mut plot, way, shape, &report);
        progress.update(at + 1, || format!("{} {:.2} of bare", way.name(), report.over_bare()));
    }
    progress.finish();
    table::print(&[table], args.json)?;
    if interrupted.load(Ordering::Relaxed) {
        return Err(Failure::interrupted());
    }
    plot.write()
}

fn end_if(interrupted: &AtomicBool) -> io::Result<()> {
    if interrupted.load(Ordering::Relaxed) { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
}

/// A row for each contender of a report.
fn enter(table: &mut Table, plot: &mut Plot, way: Way, shape: &Shape, report: &Report) {
    let block = show_bytes(shape.block_bytes as u64);
    for (at, series) in report.series.iter().enumerate() {
        // Of the cache, which counts its routes; a bare loop has nowhere else to read.
        let from_disk = report.from_disk.filter(|_| at == 1);
        let speed = Spread::of(series.samples.iter().map(Sample::mib_per_s));
        let cost = Spread::of(series.samples.iter().map(Sample::cpu_s_per_gib));
        plot.bar(format!("{}, {block} x{}", way.name(), shape.depth), contender(&series.name), speed.median);
        table.row(vec![
            json!(way.name()),
            json!(shape.block_bytes),
            json!(shape.depth),
            json!(series.name),
            json!(speed.median),
            json!(speed.min),
            json!(speed.max),
            json!(ratio(series, &report.series[0], Sample::mib_per_s)),
            json!(from_disk),
            json!(cost.median),
        ]);
    }
}

/// A contender's name without its route: one color for it in all groups.
fn contender(name: &str) -> &str {
    name.split(',').next().unwrap_or(name)
}

impl Args {
    fn check(&self, depths: usize) -> Result<(), Failure> {
        let wrong = |what: String| Err(Failure::usage(what));
        if let Some(bytes) = self.block_bytes.iter().find(|bytes| !is_block(**bytes)) {
            let most = show_bytes(BLOCK_BYTES_MAX as u64);
            return wrong(format!("--block-bytes: found {bytes}, expected a multiple of 4096 up to {most}"));
        }
        if let Some(depth) = self.in_flight.iter().find(|depth| !(1..=IN_FLIGHT_MAX).contains(*depth)) {
            return wrong(format!("--in-flight: found {depth}, expected 1 to {IN_FLIGHT_MAX}"));
        }
        let least = depths * self.block_bytes.iter().max().unwrap_or(&0) * self.in_flight.iter().max().unwrap_or(&0);
        if !(least..=BYTES_MAX).contains(&self.bytes) || self.bytes == 0 {
            let (least, most) = (show_bytes(least as u64), show_bytes(BYTES_MAX as u64));
            let found = show_bytes(self.bytes as u64);
            let why = format!("{depths} times all blocks in flight");
            return wrong(format!("--bytes: found {found}, expected {least} ({why}) to {most}"));
        }
        if !(1..=1000).contains(&self.rounds) {
            return wrong(format!("--rounds: found {}, expected 1 to 1000", self.rounds));
        }
        match &self.path {
            Some(path) if !path.is_dir() => {
                wrong(format!("--path {}: found no directory, expected one that exists", shown(path)))
            }
            _ => Ok(()),
        }
    }

    fn shapes(&self) -> Vec<Shape> {
        let dir = self.path.clone().unwrap_or_else(std::env::temp_dir);
        let shape = |block_bytes: usize, depth: usize| Shape {
            dir: dir.clone(),
            block_bytes,
            depth,
            file_bytes: (self.bytes / block_bytes * block_bytes) as u64,
            rounds: self.rounds,
            spin_us: self.spin_us,
        };
        let of_size = |&block_bytes: &usize| self.in_flight.iter().map(move |&depth| shape(block_bytes, depth));
        self.block_bytes.iter().flat_map(of_size).collect()
    }
}

fn is_block(bytes: usize) -> bool {
    bytes > 0 && bytes <= BLOCK_BYTES_MAX && bytes.is_multiple_of(4096)
}

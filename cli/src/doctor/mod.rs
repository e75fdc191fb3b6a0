//! `kvhoist doctor`: the limits of this machine, the route that blocks take, and what prevents a faster one.

#[cfg_attr(not(feature = "cufile"), path = "absent/cufile.rs")]
mod cufile;
mod disk;
#[cfg_attr(not(feature = "cuda"), path = "absent/gpu.rs")]
mod gpu;
#[cfg_attr(not(feature = "rdma"), path = "absent/rdma.rs")]
mod rdma;
mod system;

use std::{
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
};

use clap::ValueEnum;
use kvhoist::{
    DiskPath,
    internals::machine::{self, Plan},
};
use serde_json::{Value, json};

pub use self::disk::drive_name;
use crate::{failure::Failure, interrupt, output::emit, settings::Settings, shown::plain};

/// Flags of `kvhoist doctor`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory for a store, where a store of 64 MiB is created, measured and removed. Repeat it for several drives.
    /// Default: the configured paths, or the directory for temporary files.
    #[arg(long, value_name = "DIR")]
    path: Vec<PathBuf>,
    /// JSON file with settings, as for the engines' adapters (path, capacity, host_bytes, ...). The exit status is 1 if
    /// this machine has no room for them.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Processes of this machine that open this configuration: usually one per GPU; 1 if a service keeps the blocks of
    /// all ranks.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// Number of the CUDA device.
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// Required features; the exit status is 1 if one is missing.
    #[arg(long, value_name = "WHAT", value_delimiter = ',', default_value = "ring,direct-io")]
    want: Vec<Want>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// Features that --want can require.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Want {
    /// io_uring may be used.
    Ring,
    /// The path takes direct I/O.
    DirectIo,
    /// Host memory can be registered with the ring.
    LockedMemory,
    /// There is a CUDA device that works.
    Cuda,
    /// libcufile moves blocks between the path and the device, without host memory.
    Cufile,
    /// Copies between host memory and a CUDA device go through an RDMA device.
    Gdr,
}

/// One line of the report.
struct Finding {
    what: &'static str,
    found: String,
    /// How to fix or improve it.
    fix: Option<String>,
    /// The feature that this finding decides, and whether it is available.
    decides: Option<(Want, bool)>,
    /// The configuration will not work.
    is_trouble: bool,
}

impl Finding {
    /// A finding.
    fn note(what: &'static str, found: impl Into<String>) -> Self {
        Finding { what, found: found.into(), fix: None, decides: None, is_trouble: false }
    }

    /// An engine that this build left out, by the cargo feature that has it.
    #[allow(dead_code, reason = "a build with all engines has none to report")]
    fn left_out(what: &'static str, feature: &str, want: Want) -> Self {
        Finding::note(what, format!("not in this build, which has no cargo feature `{feature}`"))
            .decides(want, false)
            .fix(format!("none needed without it; else build the command with `--features {feature}`"))
    }

    /// Adds a fix.
    fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    /// A finding of the library's.
    fn of_machine(finding: machine::Finding) -> Self {
        let machine::Finding { what, found, fix, is_trouble, .. } = finding;
        Finding { what, found, fix, decides: None, is_trouble }
    }

    fn decides(mut self, want: Want, is_there: bool) -> Self {
        self.decides = Some((want, is_there));
        self
    }
}

/// Examines the machine and prints the findings.
pub fn run(args: &Args) -> Result<(), Failure> {
    let interrupted = interrupt::catch()?;
    let plan = plan(args)?;
    let mut sections: Vec<Section> = vec![("system", system::findings(&plan))];
    let looked = look(args, &plan, &interrupted, &mut sections);
    if interrupted.load(Ordering::Relaxed) {
        emit(&if args.json { format!("{:#}\n", object(&sections)) } else { table(&sections) })?;
        return Err(Failure::interrupted());
    }
    looked?;
    emit(&if args.json { format!("{:#}\n", object(&sections)) } else { table(&sections) })?;
    let findings = || sections.iter().flat_map(|(_, findings)| findings);
    let missing: Vec<String> = args
        .want
        .iter()
        .filter(|&&want| !findings().any(|finding| finding.decides == Some((want, true))))
        .filter_map(|want| Some(want.to_possible_value()?.get_name().to_owned()))
        .collect();
    let troubles = findings().filter(|finding| finding.is_trouble).count();
    match missing.is_empty() {
        true if troubles == 0 || args.config.is_none() => Ok(()),
        true => {
            let found = if troubles == 1 { "1 problem".into() } else { format!("{troubles} problems") };
            Err(Failure::run(format!("found {found} with this configuration; the report has a fix for each")))
        }
        false => {
            let missing = missing.join(", ");
            Err(Failure::run(format!("not available on this machine: {missing}; the report has a fix for each")))
        }
    }
}

/// Everything but the system, until interrupted.
fn look(args: &Args, plan: &Plan, interrupted: &AtomicBool, sections: &mut Vec<Section>) -> Result<(), Failure> {
    let is_over = || interrupted.load(Ordering::Relaxed);
    let mut disk = Vec::new();
    // A missing path is reported already; the file system above it is another one.
    for path in plan.paths.iter().filter(|path| args.config.is_none() || path.is_dir()) {
        if is_over() {
            break;
        }
        disk.extend(disk::findings(path)?);
    }
    sections.push(("disk", disk));
    if is_over() {
        return Ok(());
    }
    let path = plan.paths.iter().find(|path| path.is_dir()).map(PathBuf::as_path);
    let mut gpu = gpu::findings(args.device);
    let has_device = gpu.iter().any(|finding| finding.decides == Some((Want::Cuda, true)));
    gpu.extend(cufile::findings(args.device, path, has_device)?);
    let rdma = rdma::findings(args.device, has_device);
    let routes = routes(&sections[1].1, &gpu, &rdma);
    sections.extend([("device", gpu), ("rdma", rdma), ("routes", routes)]);
    Ok(())
}

/// The caches that will be opened, as far as flags and settings say.
fn plan(args: &Args) -> Result<Plan, Failure> {
    let paths = args.path.clone();
    let mut plan = Plan { ranks: args.ranks, paths, disk_bytes: 0, host_bytes: 0, write_bytes_a_day: 0 };
    if let Some(file) = &args.config {
        let settings = Settings::read(file)?;
        // Engines know how large a block is, their settings do not; sizes in bytes stay what they are.
        let config = if settings.has_block_bytes || settings.capacity.is_none() {
            settings.config(settings.config.block_bytes)?
        } else {
            settings.config.clone()
        };
        let slot = config.slot_bytes() as u64;
        let on_disk = |disk: &DiskPath| {
            let slots = u64::from(config.path_slots(disk));
            DiskPath::file_bytes(slots, config.block_bytes as u64)
        };
        plan.host_bytes = settings.host_bytes().unwrap_or(u64::from(config.host_slots()) * slot);
        plan.write_bytes_a_day = config.write_budget_bytes().unwrap_or(0);
        plan.disk_bytes =
            settings.capacity_of_rank(args.ranks).unwrap_or_else(|| config.disk.paths.iter().map(on_disk).sum());
        if plan.paths.is_empty() {
            let of_disks = config.disk.paths.iter().map(|disk| disk.path.clone());
            plan.paths = if settings.paths.is_empty() { of_disks.collect() } else { settings.paths() };
        }
    } else if plan.paths.is_empty() {
        plan.paths.push(std::env::temp_dir());
    }
    Ok(plan)
}

/// The routes that follow from the findings.
fn routes(disk: &[Finding], gpu: &[Finding], rdma: &[Finding]) -> Vec<Finding> {
    let has = |findings: &[Finding], want| findings.iter().any(|finding| finding.decides == Some((want, true)));
    let ring = if has(disk, Want::Ring) { "io_uring" } else { "a pool of threads" };
    let direct = if has(disk, Want::DirectIo) { "O_DIRECT" } else { "the page cache (only with direct_io = prefer)" };
    let host = Finding::note("disk <-> host", format!("{ring}, {direct}, checksum on every read"));
    if !has(gpu, Want::Cuda) {
        return vec![host, Finding::note("host <-> device", "memcpy into host memory that plays the device")];
    }
    let through_host = format!("through pinned host memory: {ring}, {direct}, then CUDA");
    let cufile = gpu.iter().find(|finding| matches!(finding.decides, Some((Want::Cufile, _))));
    let (to_device, from_device) = match cufile {
        Some(Finding { decides: Some((_, true)), .. }) => (
            Finding::note("disk -> device", "libcufile, straight into device memory, verified there"),
            Finding::note(
                "device -> disk",
                "libcufile for what only the device holds; all else is in host memory already",
            ),
        ),
        found => {
            let why = found.map_or("it was not tried", |finding| finding.found.as_str());
            let note = |what| Finding::note(what, through_host.clone()).fix(format!("by libcufile: {why}"));
            (note("disk -> device"), note("device -> disk"))
        }
    };
    let by_cuda = "CUDA, by the quickest method for size and number (see above)";
    let between = if has(rdma, Want::Gdr) {
        let found = format!("{by_cuda}, or the RDMA device where that is measured to be better (gdr = auto)");
        Finding::note("host <-> device", found)
    } else {
        Finding::note("host <-> device", by_cuda)
    };
    vec![host, between, to_device, from_device]
}

type Section = (&'static str, Vec<Finding>);

fn object(sections: &[Section]) -> Value {
    let finding = |finding: &Finding| {
        json!({
            "what": finding.what,
            "found": finding.found,
            "fix": finding.fix,
            "there": finding.decides.map(|(_, is_there)| is_there),
            "trouble": finding.is_trouble,
        })
    };
    let section =
        |(name, findings): &Section| ((*name).to_owned(), Value::Array(findings.iter().map(finding).collect()));
    Value::Object(sections.iter().map(section).collect())
}

fn table(sections: &[Section]) -> String {
    let mut text = String::new();
    for (name, findings) in sections {
        text.push_str(&format!("{name}\n"));
        for finding in findings {
            let mark = match finding.decides {
                Some((_, true)) => "+",
                Some((_, false)) => "!",
                None if finding.is_trouble => "!",
                None => " ",
            };
            text.push_str(&format!("{mark} {:18} {}\n", finding.what, plain(&finding.found)));
            if let Some(fix) = &finding.fix {
                text.push_str(&format!("  {:18} -> {}\n", "", plain(fix)));
            }
        }
    }
    text
}

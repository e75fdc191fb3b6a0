//! `kvhoist doctor`: the limits of this machine, the route that blocks take, and what prevents a faster one.

mod args;
#[cfg_attr(not(feature = "cufile"), path = "absent/cufile.rs")]
mod cufile;
mod disk;
mod finding;
#[cfg_attr(not(feature = "cuda"), path = "absent/gpu.rs")]
mod gpu;
mod plan;
#[cfg_attr(not(feature = "rdma"), path = "absent/rdma.rs")]
mod rdma;
#[cfg_attr(not(feature = "remote"), path = "absent/remote.rs")]
mod remote;
mod report;
mod system;

use std::sync::atomic::{AtomicBool, Ordering};

use kvhoist_doctor::Plan;

pub use self::{args::Args, disk::drive_name, finding::Finding};
use self::{finding::Want, plan::Planned, report::Report};
use crate::{failure::Failure, interrupt};

/// Examines the machine and prints the findings.
pub fn run(args: &Args) -> Result<(), Failure> {
    run_for_engine(args, Vec::new())
}

/// As [`run`], with what an engine's package has found out.
pub fn run_for_engine(args: &Args, of_engine: Vec<Finding>) -> Result<(), Failure> {
    let interrupted = interrupt::catch()?;
    let Planned { plan, has_device, wanted, remote } = plan::plan(args)?;
    let is_asked_for = !args.path.is_empty() || args.config.is_some() || !args.want.is_empty() || !of_engine.is_empty();
    let mut report = Report::new(wanted, has_device, is_asked_for);
    if !of_engine.is_empty() {
        report.add("engine", of_engine);
    }
    report.add("system", system::findings(&plan));
    if let Some(remote) = remote {
        report.add("remote", remote::findings(&remote)?);
    }
    look(args, &plan, &interrupted, &mut report);
    report.print(args)?;
    if interrupted.load(Ordering::Relaxed) {
        return Err(Failure::interrupted());
    }
    match report.problems() {
        problems if problems.is_empty() => Ok(()),
        problems => Err(Failure::run(format!("{problems}; the report has a fix for each"))),
    }
}

/// Everything but the system, until interrupted.
fn look(args: &Args, plan: &Plan, interrupted: &AtomicBool, report: &mut Report) {
    let is_over = || interrupted.load(Ordering::Relaxed);
    let mut disk = Vec::new();
    // A path that is no folder is reported already; the file system above it is another one.
    for path in plan.paths.iter().map(|path| &path.at).filter(|path| path.is_dir()) {
        if is_over() {
            break;
        }
        disk.extend(disk::findings(path));
    }
    let routes_of_disk = disk.clone();
    report.add("disk", disk);
    if is_over() {
        return;
    }
    let path = plan.paths.iter().map(|path| path.at.as_path()).find(|path| path.is_dir());
    let mut gpu = gpu::findings(args.device);
    let has_device = gpu.iter().any(|finding| finding.decides == Some((Want::Cuda, true)));
    gpu.extend(cufile::findings(args.device, path, has_device));
    let rdma = rdma::findings(args.device, has_device);
    // Without a look at a disk there is nothing to say about a way to it.
    let is_known = routes_of_disk.iter().any(|finding| matches!(finding.decides, Some((Want::Ring, _))));
    let routes = if is_known { routes(&routes_of_disk, &gpu, &rdma) } else { Vec::new() };
    for (name, findings) in [("device", gpu), ("rdma", rdma), ("routes", routes)] {
        report.add(name, findings);
    }
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

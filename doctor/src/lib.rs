//! Compares planned caches with the machine before one is opened, for `kvhoist doctor` and `python -m kvhoist doctor`,
//! and says what a machine has for a service.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod huge_pools;
mod limits;
mod places;
mod plan;
mod sizes;

use std::{os::unix::fs::MetadataExt, path::Path};

use kvhoist::internals::machine::{DriveWear, Kernel, drive_wear, near_node_at, shown};

pub use huge_pools::huge_pool_advice;
pub use limits::LOCKED_MEMORY_FIX;
pub use plan::{Finding, Plan, PlannedPath};
pub use sizes::{disk_bytes, is_on_root, memory_bytes};

/// Compares a plan with the machine. Reads kernel files only; creates and measures nothing.
pub fn examine(plan: &Plan) -> Vec<Finding> {
    let mut findings = examine_at(plan, Path::new("/"));
    let paths = plan.paths.iter().filter(|path| path.at.exists());
    findings.extend(paths.map(|path| {
        let device = |path: &Path| std::fs::metadata(path).ok().map(|metadata| metadata.dev());
        let here = device(&path.at);
        let share = plan.share(|other| device(other) == here);
        let text = drive_wear(&path.at).map_or_else(|why| why, |wear| worn(&wear, plan, share));
        Finding::note("wear", text)
    }));
    findings
}

/// The wear of a drive, and how long it lasts if all ranks write what they may, and this share of it there.
fn worn(wear: &DriveWear, plan: &Plan, share: f64) -> String {
    let a_day = (plan.write_bytes_a_day.saturating_mul(plan.ranks.into()) as f64 * share) as u64;
    match wear.years_left_at(a_day).filter(|_| a_day > 0) {
        Some(years) => format!("{wear}; {years:.1} years at the configured {} a day", shown(a_day)),
        None => wear.to_string(),
    }
}

/// Like [`examine`], with the kernel's files below another root.
fn examine_at(plan: &Plan, root: &Path) -> Vec<Finding> {
    let kernel = Kernel { root };
    let mut findings = limits::findings(plan, &kernel);
    findings.extend(places::findings(plan, &kernel));
    let paths: Vec<_> = plan.paths.iter().map(|path| path.at.clone()).collect();
    findings.extend(near_node_at(&paths, &kernel).map(|near| {
        let found =
            format!("the drives are on node {}: workers run on its {} processors", near.node, near.processors.len());
        Finding::note("NUMA", found)
    }));
    findings
}

#[cfg(test)]
mod tests;

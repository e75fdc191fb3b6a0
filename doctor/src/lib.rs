//! Compares planned caches with the machine before one is opened, for `kvhoist doctor` and `python -m kvhoist doctor`,
//! and says what a machine has for a service.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod huge_pools;
mod limits;
mod places;
mod plan;
mod sizes;

use std::path::Path;

use kvhoist::internals::machine::{DriveWear, Kernel, drive_wear, near_node_at, shown};

pub use huge_pools::huge_pool_advice;
pub use limits::LOCKED_MEMORY_FIX;
pub use plan::{Finding, Plan};
pub use sizes::{disk_bytes, is_on_root, memory_bytes};

/// Compares a plan with the machine. Reads kernel files only; creates and measures nothing.
pub fn examine(plan: &Plan) -> Vec<Finding> {
    let mut findings = examine_at(plan, Path::new("/"));
    let paths = plan.paths.iter().filter(|path| path.exists());
    findings.extend(paths.map(|path| {
        let text = drive_wear(path).map_or_else(|why| why, |wear| worn(&wear, plan));
        Finding::note("wear", text)
    }));
    findings
}

/// The wear of a drive, and how long it lasts if all ranks write what they may.
fn worn(wear: &DriveWear, plan: &Plan) -> String {
    let a_day = plan.write_bytes_a_day.saturating_mul(plan.ranks.into()) / plan.paths.len().max(1) as u64;
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
    findings.extend(near_node_at(&plan.paths, &kernel).map(|near| {
        let found =
            format!("the drives are on node {}: workers run on its {} processors", near.node, near.processors.len());
        Finding::note("NUMA", found)
    }));
    findings
}

#[cfg(test)]
mod tests;

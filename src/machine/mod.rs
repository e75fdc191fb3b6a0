//! Compares planned caches with the machine before one is opened, for `kvhoist doctor` and `python -m kvhoist doctor`.

mod limits;
mod numa;
mod places;
mod plan;
mod wear;

use std::path::Path;

pub(crate) use numa::near_node;
use plan::Kernel;
pub use plan::{Finding, Plan};
pub use wear::{DriveWear, drive_wear};

/// Compares a plan with the machine. Reads kernel files only; creates and measures nothing.
pub fn examine(plan: &Plan) -> Vec<Finding> {
    let mut findings = examine_at(plan, Path::new("/"));
    let paths = plan.paths.iter().filter(|path| path.exists());
    findings.extend(
        paths.map(|path| Finding::note("wear", drive_wear(path).map_or_else(|why| why, |wear| wear.to_string()))),
    );
    findings
}

/// Like [`examine`], with the kernel's files below another root.
fn examine_at(plan: &Plan, root: &Path) -> Vec<Finding> {
    let kernel = Kernel { root };
    let mut findings = limits::findings(plan, &kernel);
    findings.extend(places::findings(plan, &kernel));
    findings.extend(numa::finding(&plan.paths, &kernel));
    findings
}

#[cfg(test)]
mod tests;

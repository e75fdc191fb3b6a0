//! Compares planned caches with the machine before one is opened, for `kvhoist doctor` and `python -m kvhoist doctor`.

mod limits;
mod places;
mod plan;

use std::path::Path;

use plan::Kernel;
pub use plan::{Finding, Plan};

/// Compares a plan with the machine. Reads kernel files only; creates and measures nothing.
pub fn examine(plan: &Plan) -> Vec<Finding> {
    examine_at(plan, Path::new("/"))
}

/// Like [`examine`], with the kernel's files below another root.
fn examine_at(plan: &Plan, root: &Path) -> Vec<Finding> {
    let kernel = Kernel { root };
    let mut findings = limits::findings(plan, &kernel);
    findings.extend(places::findings(plan, &kernel));
    findings
}

#[cfg(test)]
mod tests;

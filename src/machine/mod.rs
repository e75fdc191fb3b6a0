//! What a machine has for caches that are planned on it, before one is opened: what `kvhoist doctor` and
//! `python -m kvhoist doctor` say.

mod limits;
mod places;
mod plan;

use std::path::Path;

use plan::Kernel;
pub use plan::{Finding, Plan};

/// Compares a plan with the machine. Reads what the kernel says; creates and measures nothing.
pub fn examine(plan: &Plan) -> Vec<Finding> {
    examine_at(plan, Path::new("/"))
}

/// As [`examine`], with the kernel's files below another root: what a test made up.
fn examine_at(plan: &Plan, root: &Path) -> Vec<Finding> {
    let kernel = Kernel { root };
    let mut findings = limits::findings(plan, &kernel);
    findings.extend(places::findings(plan, &kernel));
    findings
}

#[cfg(test)]
mod tests;

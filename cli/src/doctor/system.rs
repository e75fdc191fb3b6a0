//! The kernel, its limits, and the paths.

use std::fs;

use kvhoist::internals::device::engines_in_words;
use kvhoist_doctor::{Plan, examine};

use super::Finding;

pub fn findings(plan: &Plan) -> Vec<Finding> {
    let mut findings: Vec<Finding> = examine(plan).into_iter().map(Finding::of_machine).collect();
    findings.extend(numa());
    findings.push(Finding::note("engines", engines_in_words()));
    findings
}

/// A file of the kernel's, trimmed; nothing where there is none.
pub fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// True if the kernel has a module loaded.
#[allow(dead_code, reason = "a build that left out libcufile and RDMA devices looks for no module")]
pub fn has_module(name: &str) -> bool {
    read("/proc/modules").is_some_and(|modules| modules.lines().any(|line| line.split(' ').next() == Some(name)))
}

/// What a machine of several nodes is told.
fn numa() -> Option<Finding> {
    let nodes = fs::read_dir("/sys/devices/system/node").map_or(1, |entries| {
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter(|name| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok())).count()
    });
    let fix = "run near the drive and the GPU: numactl --cpunodebind=N --membind=N";
    (nodes > 1).then(|| Finding::note("NUMA", format!("{nodes} nodes")).fix(fix))
}

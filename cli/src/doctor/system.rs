//! The kernel, its limits, and the paths.

use std::fs;

use kvhoist::internals::machine::{self, Plan};

use super::Finding;

pub fn findings(plan: &Plan) -> Vec<Finding> {
    let mut findings: Vec<Finding> = machine::examine(plan).into_iter().map(Finding::of_machine).collect();
    findings.push(numa());
    findings
}

/// A file of the kernel's, trimmed; nothing where there is none.
pub fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// True if the kernel has a module loaded.
pub fn has_module(name: &str) -> bool {
    read("/proc/modules").is_some_and(|modules| modules.lines().any(|line| line.split(' ').next() == Some(name)))
}

/// Major and minor number of the kernel.
pub fn kernel_version() -> Option<(u32, u32)> {
    let release = read("/proc/sys/kernel/osrelease")?;
    let mut parts = release.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse::<u32>().ok());
    Some((parts.next()??, parts.next()??))
}

fn numa() -> Finding {
    let nodes = fs::read_dir("/sys/devices/system/node").map_or(1, |entries| {
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter(|name| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok())).count()
    });
    let finding = Finding::note("NUMA", format!("{nodes} node(s)"));
    if nodes > 1 { finding.fix("run near the drive and the GPU: numactl --cpunodebind=N --membind=N") } else { finding }
}

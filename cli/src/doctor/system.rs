//! The kernel and its limits.

use std::fs;

use super::Finding;

pub fn findings() -> Vec<Finding> {
    vec![kernel(), huge_pages(), numa()]
}

/// A file of the kernel's, trimmed; nothing where there is none.
pub fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// True if the kernel has a module loaded.
pub fn has_module(name: &str) -> bool {
    read("/proc/modules").is_some_and(|modules| modules.lines().any(|line| line.split(' ').next() == Some(name)))
}

fn kernel() -> Finding {
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".into());
    let finding = Finding::note("kernel", format!("Linux {release}"));
    match kernel_version() {
        Some(version) if version < (5, 19) => finding.fix("Linux 5.19 or later for the ring"),
        _ => finding,
    }
}

/// Major and minor number of the kernel.
pub fn kernel_version() -> Option<(u32, u32)> {
    let release = read("/proc/sys/kernel/osrelease")?;
    let mut parts = release.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse::<u32>().ok());
    Some((parts.next()??, parts.next()??))
}

fn huge_pages() -> Finding {
    let modes = read("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_else(|| "not supported".into());
    let finding = Finding::note("huge pages", format!("transparent: {modes}"));
    if modes.contains("[never]") || !modes.contains('[') {
        return finding.fix("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, for fewer TLB misses");
    }
    finding
}

fn numa() -> Finding {
    let nodes = fs::read_dir("/sys/devices/system/node").map_or(1, |entries| {
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter(|name| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok())).count()
    });
    let finding = Finding::note("NUMA", format!("{nodes} node(s)"));
    if nodes > 1 { finding.fix("run near the drive and the GPU: numactl --cpunodebind=N --membind=N") } else { finding }
}

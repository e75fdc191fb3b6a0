//! Facts about devices from sysfs: PCI address, NUMA node, distance between two devices.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use super::ports::GidKind;

/// How far apart two PCI devices are; a smaller value is nearer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// Behind one switch.
    Switch,
    /// Behind several bridges below one host bridge, without passing through the processor.
    Bridges,
    /// Through the host bridge.
    HostBridge,
    /// Through the processor, on one NUMA node.
    Node,
    /// Between NUMA nodes.
    System,
    /// The kernel does not report it.
    Unknown,
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts = ["one switch", "several bridges", "the host bridge", "one NUMA node", "two NUMA nodes", "unknown"];
        f.write_str(texts[*self as usize])
    }
}

const INFINIBAND: &str = "/sys/class/infiniband";
const PCI: &str = "/sys/bus/pci/devices";

/// The protocol of a GID table entry, as the kernel reports it.
pub(super) fn gid_kind(device: &str, port: u8, index: u8) -> GidKind {
    let path = format!("{INFINIBAND}/{device}/ports/{port}/gid_attrs/types/{index}");
    match std::fs::read_to_string(path).unwrap_or_default().trim() {
        "RoCE v2" => GidKind::RoceV2,
        "IB/RoCE v1" => GidKind::RoceV1,
        _ => GidKind::Unknown,
    }
}

/// PCI address of a verbs device; `None` for a software device.
pub(super) fn pci_address(device: &str) -> Option<String> {
    let path = std::fs::canonicalize(format!("{INFINIBAND}/{device}/device")).ok()?;
    let name = path.file_name()?.to_str()?;
    is_pci_address(name).then(|| name.to_lowercase())
}

/// Whether `name` has the form `0000:9b:00.0`.
fn is_pci_address(name: &str) -> bool {
    name.len() >= 12 && name.matches(':').count() == 2 && name.contains('.')
}

/// The NUMA node of a PCI device.
pub(super) fn numa_node(pci_address: &str) -> Option<u32> {
    let text = std::fs::read_to_string(format!("{PCI}/{pci_address}/numa_node")).ok()?;
    text.trim().parse().ok()
}

/// Distance between two PCI devices.
pub(super) fn distance(a: &str, b: &str) -> Distance {
    let place = |address: &str| std::fs::canonicalize(format!("{PCI}/{address}")).ok();
    match (place(a), place(b)) {
        (Some(place_a), Some(place_b)) => between(&place_a, &place_b, (numa_node(a), numa_node(b))),
        _ => Distance::Unknown,
    }
}

/// Compares two sysfs device paths: a root `pciDDDD:BB`, then bridges, then the device.
fn between(a: &Path, b: &Path, nodes: (Option<u32>, Option<u32>)) -> Distance {
    let steps = |path: &Path| -> Vec<PathBuf> {
        let names = path.components().map(|part| PathBuf::from(part.as_os_str()));
        names.skip_while(|name| !name.to_string_lossy().starts_with("pci")).collect()
    };
    let (a, b) = (steps(a), steps(b));
    if a.is_empty() || b.is_empty() {
        return Distance::Unknown;
    }
    let common = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
    match (common, nodes) {
        (0, (Some(a), Some(b))) if a != b => Distance::System,
        (0, _) => Distance::Node,
        (1, _) => Distance::HostBridge,
        // A switch is one upstream bridge above several downstream bridges: each device is two steps below the shared
        // one.
        _ if a.len() - common <= 2 && b.len() - common <= 2 => Distance::Switch,
        _ => Distance::Bridges,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_follow_the_tree() {
        let at = |path: &str| PathBuf::from(format!("/sys/devices/{path}"));
        let gpu = at("pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:00.0/0000:9a:00.0");
        let nic = at("pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:01.0/0000:9b:00.0");
        let deep = at("pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:02.0/0000:9c:00.0/0000:9d:00.0/0000:9e:00.0");
        let beside = at("pci0000:97/0000:97:05.0/0000:a0:00.0");
        let other = at("pci0000:15/0000:15:01.0/0000:16:00.0");
        let nodes = (Some(0), Some(0));
        assert_eq!(between(&gpu, &nic, nodes), Distance::Switch);
        assert_eq!(between(&gpu, &deep, nodes), Distance::Bridges);
        assert_eq!(between(&gpu, &beside, nodes), Distance::HostBridge);
        assert_eq!(between(&gpu, &other, nodes), Distance::Node);
        assert_eq!(between(&gpu, &other, (Some(0), Some(1))), Distance::System);
        assert_eq!(between(&gpu, &at("virtual/net/rxe"), nodes), Distance::Unknown);
        assert!(Distance::Switch < Distance::System && Distance::System < Distance::Unknown);
    }

    #[test]
    fn pci_addresses_are_recognized() {
        assert!(is_pci_address("0000:9b:00.0"));
        assert!(!is_pci_address("virtual"));
        assert!(!is_pci_address("dummy0"));
    }
}

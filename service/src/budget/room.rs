//! The address space and the mappings that this process has left.

use std::fs;

use rustix::process::{Resource, getrlimit};

/// What a process can address: x86-64 has 47 bits for it, other machines as many or more.
const ADDRESS_BYTES: u64 = 1 << 47;
/// What the kernel allows where it does not say.
const MAPPINGS: u64 = 65_530;
/// Mappings that a region takes: its ends are not in huge pages where its middle is.
const MAPPINGS_PER_REGION: u64 = 3;

/// What is left.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// Of the addresses, bytes.
    pub(crate) address_bytes: u64,
    pub(crate) mappings: u64,
}

impl Room {
    /// What this process has left now.
    pub(crate) fn of_process() -> Self {
        let pages = fs::read_to_string("/proc/self/statm").ok();
        let pages = pages.and_then(|text| text.split(' ').next()?.parse::<u64>().ok()).unwrap_or(0);
        let used_bytes = pages.saturating_mul(rustix::param::page_size() as u64);
        let addresses = getrlimit(Resource::As).current.unwrap_or(u64::MAX).min(ADDRESS_BYTES);
        let maps = fs::read("/proc/self/maps").unwrap_or_default();
        let used = maps.iter().filter(|byte| **byte == b'\n').count() as u64;
        let most = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        let most = most.and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(MAPPINGS);
        Room { address_bytes: addresses.saturating_sub(used_bytes), mappings: most.saturating_sub(used) }
    }

    /// Bytes of clients' memory that all connections may have: half of it. The rest is for the service's own: the host
    /// memory of its spaces, tables, threads.
    pub(crate) fn region_bytes(&self) -> u64 {
        self.address_bytes / 2
    }

    /// Regions that all connections may have: three quarters of the mappings.
    pub(crate) fn regions(&self) -> u64 {
        self.mappings / 4 * 3 / MAPPINGS_PER_REGION
    }
}

/// The machine's memory; 0 if the kernel does not say.
pub(crate) fn memory_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok());
    total.map_or(0, |kib: u64| kib.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_address_space_and_mappings_left() {
        let Room { address_bytes, mappings } = Room::of_process();
        assert!((1 << 30..ADDRESS_BYTES).contains(&address_bytes), "{address_bytes}");
        assert!(mappings > 1000, "{mappings}");
    }
}

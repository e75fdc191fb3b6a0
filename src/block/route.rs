//! The route of a block's bytes.

use std::fmt;

use super::Tier;

/// The path that a block's bytes took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Route {
    /// Found in device memory; nothing was copied.
    DeviceHit,
    /// Found in host memory; nothing was copied.
    HostHit,
    /// Read from disk into a host slot.
    DiskToHost,
    /// Read from disk into a host slot as bounce buffer, and copied to the device.
    DiskToHostToDevice,
    /// Read from disk directly into device memory, by libcufile.
    DiskToDevice,
    /// Copied from a host slot to the device.
    HostToDevice,
    /// Copied from the device to a host slot.
    DeviceToHost,
    /// Copied into a host slot, by the caller or from a registered region.
    CallerToHost,
    /// Copied from a host slot into a registered region, in host or device memory.
    HostToCaller,
    /// Copied from a device slot into the caller's host memory.
    DeviceToCaller,
    /// Written from a host slot to disk.
    HostToDisk,
    /// Read from disk directly into registered host memory.
    DiskToRegion,
    /// Written directly from registered host memory to disk.
    RegionToDisk,
    /// Written directly from device memory to disk, by libcufile.
    DeviceToDisk,
    /// Read from a store beyond the node into a host slot.
    RemoteToHost,
    /// Written from a host slot to a store beyond the node.
    HostToRemote,
}

impl Route {
    /// All routes.
    pub const ALL: [Route; 16] = [
        Route::DeviceHit,
        Route::HostHit,
        Route::DiskToHost,
        Route::DiskToHostToDevice,
        Route::DiskToDevice,
        Route::HostToDevice,
        Route::DeviceToHost,
        Route::CallerToHost,
        Route::HostToCaller,
        Route::DeviceToCaller,
        Route::HostToDisk,
        Route::DiskToRegion,
        Route::RegionToDisk,
        Route::DeviceToDisk,
        Route::RemoteToHost,
        Route::HostToRemote,
    ];

    /// Number of routes.
    pub const COUNT: usize = Route::ALL.len();

    /// The name used in metrics, logs and reports.
    pub fn name(self) -> &'static str {
        match self {
            Route::DeviceHit => "device_hit",
            Route::HostHit => "host_hit",
            Route::DiskToHost => "disk_to_host",
            Route::DiskToHostToDevice => "disk_to_host_to_device",
            Route::DiskToDevice => "disk_to_device",
            Route::HostToDevice => "host_to_device",
            Route::DeviceToHost => "device_to_host",
            Route::CallerToHost => "caller_to_host",
            Route::HostToCaller => "host_to_caller",
            Route::DeviceToCaller => "device_to_caller",
            Route::HostToDisk => "host_to_disk",
            Route::DiskToRegion => "disk_to_region",
            Route::RegionToDisk => "region_to_disk",
            Route::DeviceToDisk => "device_to_disk",
            Route::RemoteToHost => "remote_to_host",
            Route::HostToRemote => "host_to_remote",
        }
    }

    /// The tier that served a block that took this route; the host tier also for what came from its caller's memory, or
    /// from beyond the node.
    #[doc(hidden)]
    pub fn served_from(self) -> Tier {
        match (self, self.ends().0) {
            (Route::DeviceHit, _) => Tier::Device,
            (Route::DiskToHostToDevice, _) => Tier::Disk,
            (_, None | Some(Tier::Remote)) => Tier::Host,
            (_, Some(tier)) => tier,
        }
    }

    /// The tiers that its bytes leave and enter. The host slot of a bounced load counts in the read that filled it.
    pub(crate) fn ends(self) -> (Option<Tier>, Option<Tier>) {
        match self {
            Route::DeviceHit | Route::HostHit => (None, None),
            Route::DiskToHost => (Some(Tier::Disk), Some(Tier::Host)),
            Route::DiskToHostToDevice | Route::HostToDevice => (Some(Tier::Host), Some(Tier::Device)),
            Route::DeviceToHost => (Some(Tier::Device), Some(Tier::Host)),
            Route::CallerToHost => (None, Some(Tier::Host)),
            Route::HostToCaller => (Some(Tier::Host), None),
            Route::DeviceToCaller => (Some(Tier::Device), None),
            Route::DiskToDevice => (Some(Tier::Disk), Some(Tier::Device)),
            Route::HostToDisk => (Some(Tier::Host), Some(Tier::Disk)),
            Route::DiskToRegion => (Some(Tier::Disk), None),
            Route::RegionToDisk => (None, Some(Tier::Disk)),
            Route::DeviceToDisk => (Some(Tier::Device), Some(Tier::Disk)),
            Route::RemoteToHost => (Some(Tier::Remote), Some(Tier::Host)),
            Route::HostToRemote => (Some(Tier::Host), Some(Tier::Remote)),
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_is_served_from_the_tier_that_had_the_block() {
        use Route::{DeviceHit, DeviceToCaller, DeviceToDisk, DeviceToHost};
        use Route::{DiskToDevice, DiskToHost, DiskToHostToDevice, DiskToRegion};
        for route in Route::ALL {
            let tier = match route {
                DeviceHit | DeviceToHost | DeviceToDisk | DeviceToCaller => Tier::Device,
                DiskToHost | DiskToHostToDevice | DiskToDevice | DiskToRegion => Tier::Disk,
                _ => Tier::Host,
            };
            assert_eq!(route.served_from(), tier, "{route}");
        }
    }
}

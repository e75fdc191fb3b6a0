//! The routes of blocks: where they come from and where they go.

use kvhoist::DeviceKind;

use crate::pool::Home;

/// A route: where blocks come from and where they go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Cold blocks to host memory.
    DiskToHost,
    /// Cold blocks to the device.
    DiskToDevice(DeviceKind),
    /// Blocks from host memory, written through.
    HostToDisk,
    /// Blocks of a caller's pool on the device, written through.
    DeviceToDisk(DeviceKind),
    /// Cold blocks straight to a caller's pool in host memory, in calls of [`CALL_BLOCKS`](crate::routes::CALL_BLOCKS).
    DiskToPool,
    /// Blocks of a caller's pool in host memory, written straight to disk, in such calls.
    PoolToDisk,
}

impl Way {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Way::DiskToHost => "disk to host",
            Way::DiskToDevice(_) => "disk to device",
            Way::HostToDisk => "host to disk",
            Way::DeviceToDisk(_) => "device to disk",
            Way::DiskToPool => "disk to pool",
            Way::PoolToDisk => "pool to disk",
        }
    }

    pub(crate) fn device(self) -> Option<DeviceKind> {
        match self {
            Way::DiskToDevice(device) | Way::DeviceToDisk(device) => Some(device),
            _ => None,
        }
    }

    pub(crate) fn bypasses_host(self) -> bool {
        matches!(self, Way::DiskToPool | Way::PoolToDisk)
    }

    /// The caller's pool that it needs.
    pub(crate) fn pool(self) -> Option<Home> {
        match self {
            Way::DeviceToDisk(device) => Some(Home::Device(device)),
            Way::DiskToPool | Way::PoolToDisk => Some(Home::Host),
            _ => None,
        }
    }
}

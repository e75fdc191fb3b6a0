//! Blocks: key, prefix chain, segments in memory, and the tier they are in.

mod chain;
mod copy;
mod geometry;
mod ids;
mod key;
mod layout;

pub use chain::{Namespace, PrefixChain};
pub use copy::{CopyOp, Direction};
pub use geometry::BlockGeometry;
pub use ids::{FIXED_BYTES_MAX, FileId, IO_ALIGN, OpKind};
pub use key::BlockKey;
pub use layout::{Layout, Segment};

use std::fmt;

/// A level of the hierarchy, fastest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// GPU HBM, or host memory that plays the device.
    Device,
    /// Pinned host DRAM.
    Host,
    /// NVMe.
    Disk,
    /// A store beyond the node (`Config::remote_store`). It has no slots.
    Remote,
}

impl Tier {
    /// The tiers of the node, fastest first.
    pub const ALL: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Disk];

    /// Number of tiers of the node.
    pub const COUNT: usize = 3;

    /// All tiers, fastest first.
    pub const WITH_REMOTE: [Tier; 4] = [Tier::Device, Tier::Host, Tier::Disk, Tier::Remote];

    /// The name used in metrics, logs and reports.
    pub fn name(self) -> &'static str {
        ["device", "host", "disk", "remote"][self as usize]
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

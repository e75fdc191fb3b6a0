//! Figures of a service, its spaces and its clients.

use kvhoist::{Durations, Route, Tier};

use super::{
    table::{fields, get, put},
    wire::{Item, Malformed, NAMESPACE_BYTES_MAX, Reader, Wire, Writer, malformed},
};

/// Paths, spaces and clients in one status, each.
const ROWS_MAX: usize = 4096;

/// One tier of a space.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
pub struct TierFigures {
    /// Blocks loaded or fetched that were found here.
    pub hits: u64,
    /// Blocks in it now.
    pub resident: u64,
    /// Slots it has.
    pub slots: u64,
    /// Slots given up to make room.
    pub evictions: u64,
    /// New blocks that it refused because it was full.
    pub refused: u64,
    /// Bytes of blocks that came into it.
    pub bytes_in: u64,
}

/// A space's figures since the service opened it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
pub struct SpaceStats {
    /// Per tier, indexed by [`Tier`] as usize.
    pub tiers: [TierFigures; Tier::COUNT],
    /// How long the movements of each route took, indexed by [`Route`] as usize.
    #[cfg_attr(test, proptest(strategy = "super::tests::durations()"))]
    pub durations: [Durations; Route::COUNT],
    /// Blocks loaded that no tier had.
    pub misses: u64,
    /// Blocks stored.
    pub stores: u64,
    /// Stores of blocks that were resident already.
    pub stores_known: u64,
    /// Writes that the disk tier did not take.
    pub writes_refused: u64,
    /// Blocks that were not worth a write to disk.
    pub writes_declined: u64,
    /// Blocks for whose write the budget had no room.
    pub writes_over_budget: u64,
    /// Blocks read from disk whose checksum did not match.
    pub checksum_failures: u64,
    /// Reads of the disk tier that failed.
    pub read_errors: u64,
    /// Writes to the disk tier that failed.
    pub write_errors: u64,
    /// Disk slots taken out of use.
    pub quarantined: u64,
    /// Blocks given up because their client's memory was changed while they were stored.
    pub changed_memory: u64,
    /// Bytes that went straight between disk and clients' memory.
    pub straight_bytes: u64,
    /// Bytes read from the drives.
    pub read_bytes: u64,
    /// Why the disk tier is read-only or out of service; empty otherwise.
    pub disk_trouble: String,
}

impl SpaceStats {
    /// A tier's figures.
    pub fn tier(&self, tier: Tier) -> &TierFigures {
        &self.tiers[tier as usize]
    }

    /// How long the movements of a route took.
    pub fn route_durations(&self, route: Route) -> &Durations {
        &self.durations[route as usize]
    }
}

/// One space.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
pub struct SpaceStatus {
    /// Its name.
    pub namespace: String,
    /// The folder of its store, below each path of the service.
    pub folder: String,
    /// The user that made it.
    pub uid: u32,
    /// Whether all users share it.
    pub shared: bool,
    /// Bytes of every block.
    pub block_bytes: u64,
    /// Disk that it has, bytes.
    pub capacity_bytes: u64,
    /// Host memory that it has, bytes; 0 while it is closed.
    pub host_bytes: u64,
    /// Clients attached to it.
    pub clients: u32,
    /// Its figures; `None` until the first client attaches, when the service opens it.
    pub stats: Option<SpaceStats>,
}

/// One connection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
pub struct ClientStatus {
    /// The service's number for it.
    pub id: u64,
    /// Its process, as the kernel told when it connected.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// The name of its space; empty before it is attached.
    pub namespace: String,
    /// Regions of its memory that the service has mapped.
    pub regions: u32,
    /// Requests that are not replied to yet.
    pub requests: u32,
    /// Bytes of those regions.
    pub region_bytes: u64,
    /// Bytes of blocks that move between its memory and the tiers now.
    pub bytes_in_flight: u64,
}

/// A service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
pub struct ServiceStatus {
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// It takes no more work.
    pub draining: bool,
    /// Disk of all spaces, bytes.
    pub capacity_bytes: u64,
    /// Disk that no space has, bytes.
    pub capacity_left: u64,
    /// Host memory of all spaces, bytes.
    pub host_bytes: u64,
    /// Host memory that no space has, bytes.
    pub host_left: u64,
    /// Connections that were cut off because of malformed frames or unread replies.
    pub cut_off: u64,
    /// Its paths, as it was given them.
    pub paths: Vec<String>,
    /// Its spaces.
    pub spaces: Vec<SpaceStatus>,
    /// Its connections, including the one of this request.
    pub clients: Vec<ClientStatus>,
}

fields!(TierFigures { hits, resident, slots, evictions, refused, bytes_in });
fields!(SpaceStats {
    tiers,
    durations,
    misses,
    stores,
    stores_known,
    writes_refused,
    writes_declined,
    writes_over_budget,
    checksum_failures,
    read_errors,
    write_errors,
    quarantined,
    changed_memory,
    straight_bytes,
    read_bytes,
    disk_trouble
});
fields!(SpaceStatus {
    namespace <= NAMESPACE_BYTES_MAX, folder <= NAMESPACE_BYTES_MAX, uid, shared, block_bytes, capacity_bytes,
    host_bytes, clients, stats
});
fields!(ClientStatus {
    id, pid, uid, namespace <= NAMESPACE_BYTES_MAX, regions, requests, region_bytes, bytes_in_flight, .. u64
});
fields!(ServiceStatus {
    version,
    pid,
    draining,
    capacity_bytes,
    capacity_left,
    host_bytes,
    host_left,
    cut_off,
    paths,
    spaces,
    clients
});

/// The sum, the set of buckets that hold something, and their counts: most routes have none.
impl Wire for Durations {
    fn put(&self, writer: &mut Writer) {
        (self.sum().as_nanos() as u64).put(writer);
        let filled = || self.buckets().map(|(_, count)| count).enumerate().filter(|(_, count)| *count > 0);
        filled().fold(0u32, |set, (at, _)| set | 1 << at).put(writer);
        filled().for_each(|(_, count)| count.put(writer));
    }

    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
        let sum_ns = u64::get(reader, what)?;
        let mut buckets = [0; Durations::BOUNDS_SECONDS.len() + 1];
        let set = u32::get(reader, what)?;
        if set >> buckets.len() > 0 {
            let expected = format!("a set of {} buckets", buckets.len());
            return Err(malformed(what, format!("{set:#x}"), expected));
        }
        for (_, count) in buckets.iter_mut().enumerate().filter(|(at, _)| set >> at & 1 == 1) {
            *count = u64::get(reader, what)?;
        }
        Ok(Durations::from_counts(buckets, sum_ns))
    }
}

/// Makes rows of a status.
macro_rules! rows {
    ($($type:ident $names:expr, $bytes_min:literal;)*) => {
        $(impl Item for $type {
            const NAMES: [&'static str; 2] = $names;
            const BYTES_MIN: usize = $bytes_min;
            const COUNT_MAX: usize = ROWS_MAX;
            const CUT: bool = true;
        })*
    };
}

rows! {
    String ["path", "number of paths"], 2;
    SpaceStatus ["space", "number of spaces"], 37;
    ClientStatus ["client", "number of clients"], 50;
}

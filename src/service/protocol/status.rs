//! Figures of a service, its spaces and its clients.

use super::wire::{Malformed, NAMESPACE_BYTES_MAX, Reader, TEXT_BYTES_MAX, Writer};
use crate::block::Tier;

/// Spaces and clients in one status.
const ROWS_MAX: usize = 4096;
const TEXT_BYTES_MIN: usize = 2;
const SPACE_BYTES_MIN: usize = 37;
const CLIENT_BYTES_MIN: usize = 50;

/// One tier of a space.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
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
pub struct SpaceStats {
    /// Per tier, indexed by [`Tier`] as usize.
    pub tiers: [TierFigures; Tier::COUNT],
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

    fn numbers(&self) -> [u64; 12] {
        [
            self.misses,
            self.stores,
            self.stores_known,
            self.writes_refused,
            self.writes_declined,
            self.writes_over_budget,
            self.checksum_failures,
            self.read_errors,
            self.write_errors,
            self.quarantined,
            self.straight_bytes,
            self.read_bytes,
        ]
    }

    pub(super) fn encode(&self, writer: &mut Writer) {
        for tier in &self.tiers {
            let numbers = [tier.hits, tier.resident, tier.slots, tier.evictions, tier.refused, tier.bytes_in];
            numbers.into_iter().for_each(|number| writer.u64(number));
        }
        self.numbers().into_iter().for_each(|number| writer.u64(number));
        writer.text(&self.disk_trouble, TEXT_BYTES_MAX);
    }

    pub(super) fn decode(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let mut number = || reader.u64("figure");
        let mut tiers = [TierFigures::default(); Tier::COUNT];
        for tier in &mut tiers {
            *tier = TierFigures {
                hits: number()?,
                resident: number()?,
                slots: number()?,
                evictions: number()?,
                refused: number()?,
                bytes_in: number()?,
            };
        }
        Ok(SpaceStats {
            tiers,
            misses: number()?,
            stores: number()?,
            stores_known: number()?,
            writes_refused: number()?,
            writes_declined: number()?,
            writes_over_budget: number()?,
            checksum_failures: number()?,
            read_errors: number()?,
            write_errors: number()?,
            quarantined: number()?,
            straight_bytes: number()?,
            read_bytes: number()?,
            disk_trouble: reader.text("reason", TEXT_BYTES_MAX)?,
        })
    }
}

/// One space.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
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

impl ServiceStatus {
    pub(super) fn encode(&self, writer: &mut Writer) {
        writer.text(&self.version, TEXT_BYTES_MAX);
        writer.u32(self.pid);
        writer.u8(u8::from(self.draining));
        [self.capacity_bytes, self.capacity_left, self.host_bytes, self.host_left, self.cut_off]
            .into_iter()
            .for_each(|number| writer.u64(number));
        writer.count(self.paths.len().min(ROWS_MAX));
        self.paths.iter().take(ROWS_MAX).for_each(|path| writer.text(path, TEXT_BYTES_MAX));
        writer.count(self.spaces.len().min(ROWS_MAX));
        for space in self.spaces.iter().take(ROWS_MAX) {
            writer.text(&space.namespace, NAMESPACE_BYTES_MAX);
            writer.text(&space.folder, NAMESPACE_BYTES_MAX);
            writer.u32(space.uid);
            writer.u8(u8::from(space.shared));
            let sizes = [space.block_bytes, space.capacity_bytes, space.host_bytes];
            sizes.into_iter().for_each(|number| writer.u64(number));
            writer.u32(space.clients);
            writer.u8(u8::from(space.stats.is_some()));
            if let Some(stats) = &space.stats {
                stats.encode(writer);
            }
        }
        writer.count(self.clients.len().min(ROWS_MAX));
        for client in self.clients.iter().take(ROWS_MAX) {
            writer.u64(client.id);
            writer.u32(client.pid);
            writer.u32(client.uid);
            writer.text(&client.namespace, NAMESPACE_BYTES_MAX);
            writer.u32(client.regions);
            writer.u32(client.requests);
            writer.u64(client.region_bytes);
            writer.u64(client.bytes_in_flight);
            // Room for what a later version has to say about one.
            writer.u64(0);
        }
    }

    pub(super) fn decode(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let mut status = ServiceStatus {
            version: reader.text("version", TEXT_BYTES_MAX)?,
            pid: reader.u32("process")?,
            draining: reader.flag("draining")?,
            capacity_bytes: reader.u64("figure")?,
            capacity_left: reader.u64("figure")?,
            host_bytes: reader.u64("figure")?,
            host_left: reader.u64("figure")?,
            cut_off: reader.u64("figure")?,
            ..ServiceStatus::default()
        };
        for _ in 0..reader.count("number of paths", ROWS_MAX, TEXT_BYTES_MIN)? {
            status.paths.push(reader.text("path", TEXT_BYTES_MAX)?);
        }
        for _ in 0..reader.count("number of spaces", ROWS_MAX, SPACE_BYTES_MIN)? {
            status.spaces.push(decode_space(reader)?);
        }
        for _ in 0..reader.count("number of clients", ROWS_MAX, CLIENT_BYTES_MIN)? {
            status.clients.push(decode_client(reader)?);
        }
        Ok(status)
    }
}

fn decode_space(reader: &mut Reader<'_>) -> Result<SpaceStatus, Malformed> {
    Ok(SpaceStatus {
        namespace: reader.text("name", NAMESPACE_BYTES_MAX)?,
        folder: reader.text("folder", NAMESPACE_BYTES_MAX)?,
        uid: reader.u32("user")?,
        shared: reader.flag("shared")?,
        block_bytes: reader.u64("figure")?,
        capacity_bytes: reader.u64("figure")?,
        host_bytes: reader.u64("figure")?,
        clients: reader.u32("clients")?,
        stats: if reader.flag("open")? { Some(SpaceStats::decode(reader)?) } else { None },
    })
}

fn decode_client(reader: &mut Reader<'_>) -> Result<ClientStatus, Malformed> {
    let client = ClientStatus {
        id: reader.u64("client")?,
        pid: reader.u32("process")?,
        uid: reader.u32("user")?,
        namespace: reader.text("name", NAMESPACE_BYTES_MAX)?,
        regions: reader.u32("regions")?,
        requests: reader.u32("requests")?,
        region_bytes: reader.u64("figure")?,
        bytes_in_flight: reader.u64("figure")?,
    };
    reader.u64("reserved bytes")?;
    Ok(client)
}

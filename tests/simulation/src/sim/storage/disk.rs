//! A file on a simulated disk: what readers see, what is on the medium, and what a power cut leaves.

use std::collections::BTreeMap;

use super::rng::Rng;

/// What a disk writes whole or not at all.
pub const SECTOR_BYTES: usize = 512;

type Sector = Box<[u8; SECTOR_BYTES]>;

/// What a sector may hold after a power cut, besides what readers see now.
struct Dirty {
    /// What the medium certainly had at the last sync.
    synced: Sector,
    /// What it held between that and now, if there was such a version: a device may write
    /// overwritten data back late. Older ones are forgotten.
    before: Option<Sector>,
    /// Counts the writes to the file, to tell whether the sector changed during a sync.
    version: u64,
    /// A sync failed that was to cover this version: like a kernel, no later sync tries again.
    given_up: bool,
}

/// One file. Lengths are of whole sectors at least in memory; `len` is what readers see.
#[derive(Default)]
pub(super) struct Disk {
    /// What readers see, padded to whole sectors.
    current: Vec<u8>,
    len: usize,
    dirty: BTreeMap<usize, Dirty>,
    version: u64,
}

/// The state that a sync in flight makes durable.
pub(super) struct SyncPoint(Vec<(usize, u64, Sector)>);

impl Disk {
    pub(super) fn new(mut bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        bytes.resize(len.next_multiple_of(SECTOR_BYTES), 0);
        Disk { current: bytes, len, dirty: BTreeMap::new(), version: 0 }
    }

    pub(super) fn contents(&self) -> &[u8] {
        &self.current[..self.len]
    }

    /// True if readers see nothing but zeros in the first `len` bytes.
    pub(super) fn is_zero(&self, len: usize) -> bool {
        // Few and wide comparisons: each life of a cache asks this.
        static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
        self.contents()[..len.min(self.len)].chunks(ZEROS.len()).all(|part| *part == ZEROS[..part.len()])
    }

    /// Changes the medium itself, behind every cache: rot.
    pub(super) fn flip(&mut self, at: usize, mask: u8) {
        self.current[at] ^= mask;
        if let Some(dirty) = self.dirty.get_mut(&(at / SECTOR_BYTES)) {
            dirty.synced[at % SECTOR_BYTES] ^= mask;
        }
    }

    /// What `len` bytes at `offset` hold; fewer at the end of the file.
    pub(super) fn read(&self, offset: u64, len: usize) -> &[u8] {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.len);
        &self.current[start..start.saturating_add(len).min(self.len)]
    }

    /// Takes a write into the volatile cache.
    pub(super) fn write(&mut self, offset: usize, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        let end = offset + data.len();
        if end > self.current.len() {
            self.current.resize(end.next_multiple_of(SECTOR_BYTES), 0);
        }
        self.len = self.len.max(end);
        self.version += 1;
        for sector in offset / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES) {
            let now = sector_of(&self.current, sector);
            let version = self.version;
            self.dirty
                .entry(sector)
                .and_modify(|dirty| {
                    dirty.before = Some(now.clone());
                    dirty.version = version;
                    dirty.given_up = false;
                })
                .or_insert_with(|| Dirty { synced: now, before: None, version, given_up: false });
        }
        self.current[offset..end].copy_from_slice(data);
    }

    /// The state that a sync starting now makes durable.
    pub(super) fn sync_point(&self) -> SyncPoint {
        let sectors = self.dirty.iter().filter(|(_, dirty)| !dirty.given_up);
        SyncPoint(sectors.map(|(&at, dirty)| (at, dirty.version, sector_of(&self.current, at))).collect())
    }

    /// The sync has reached the medium.
    pub(super) fn synced(&mut self, point: SyncPoint) {
        for (at, version, data) in point.0 {
            let Some(dirty) = self.dirty.get_mut(&at) else { continue };
            if dirty.version == version {
                self.dirty.remove(&at);
            } else {
                // Written again meanwhile. A single write since then replaced `data` itself, which
                // is then no version of its own any more.
                if dirty.before.as_ref() == Some(&data) {
                    dirty.before = None;
                }
                dirty.synced = data;
            }
        }
    }

    /// The sync has failed: what it was to cover is clean to every later one, and may be nowhere but in the cache.
    pub(super) fn sync_failed(&mut self, point: &SyncPoint) {
        for (at, version, _) in &point.0 {
            if let Some(dirty) = self.dirty.get_mut(at).filter(|dirty| dirty.version == *version) {
                dirty.given_up = true;
            }
        }
    }

    /// True if every write has been synced.
    pub(super) fn is_clean(&self) -> bool {
        self.dirty.is_empty()
    }

    /// What the medium holds if the power fails now: each unsynced sector in one of its versions,
    /// and each sector of a write `in_flight` (offset and data) perhaps written.
    pub(super) fn after_power_cut(&self, in_flight: &[(usize, &[u8])], rng: &mut Rng) -> Vec<u8> {
        self.cut(self.current.clone(), in_flight, rng)
    }

    /// The same, at the end of the simulation: the file is empty from then on.
    pub(super) fn take_power_cut(&mut self, in_flight: &[(usize, &[u8])], rng: &mut Rng) -> Vec<u8> {
        let current = std::mem::take(&mut self.current);
        let medium = self.cut(current, in_flight, rng);
        *self = Disk::default();
        medium
    }

    /// What readers see, at the end of the simulation: the file is empty from then on.
    pub(super) fn take_contents(&mut self) -> Vec<u8> {
        let Disk { mut current, len, .. } = std::mem::take(self);
        current.truncate(len);
        current
    }

    fn cut(&self, mut medium: Vec<u8>, in_flight: &[(usize, &[u8])], rng: &mut Rng) -> Vec<u8> {
        let mut len = self.len;
        for (&at, dirty) in &self.dirty {
            let kept = match (rng.below(3), &dirty.before) {
                (0, Some(before)) => before,
                (0 | 1, _) => &dirty.synced,
                _ => continue,
            };
            medium[at * SECTOR_BYTES..][..SECTOR_BYTES].copy_from_slice(&kept[..]);
        }
        for &(offset, data) in in_flight {
            for sector in offset / SECTOR_BYTES..(offset + data.len()).div_ceil(SECTOR_BYTES) {
                if rng.chance(0.5) {
                    let start = (sector * SECTOR_BYTES).max(offset);
                    let end = ((sector + 1) * SECTOR_BYTES).min(offset + data.len());
                    if end > medium.len() {
                        medium.resize(end.next_multiple_of(SECTOR_BYTES), 0);
                    }
                    len = len.max(end);
                    medium[start..end].copy_from_slice(&data[start - offset..end - offset]);
                }
            }
        }
        medium.truncate(len);
        medium
    }
}

fn sector_of(bytes: &[u8], sector: usize) -> Sector {
    let mut copy = Box::new([0; SECTOR_BYTES]);
    copy.copy_from_slice(&bytes[sector * SECTOR_BYTES..][..SECTOR_BYTES]);
    copy
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// What the first byte of the file may be after a power cut.
    fn outcomes(disk: &Disk, in_flight: &[(usize, &[u8])]) -> BTreeSet<u8> {
        let mut rng = Rng::new(1);
        (0..100).map(|_| disk.after_power_cut(in_flight, &mut rng)[0]).collect()
    }

    #[test]
    fn a_power_cut_leaves_some_version_since_the_last_sync() {
        let mut disk = Disk::new(vec![1; 1024]);
        assert_eq!(outcomes(&disk, &[]), [1].into());
        disk.write(0, &[2; 512]);
        assert_eq!(outcomes(&disk, &[]), [1, 2].into());
        disk.write(0, &[3; 512]);
        assert_eq!(outcomes(&disk, &[]), [1, 2, 3].into());
        let point = disk.sync_point();
        disk.synced(point);
        assert!(disk.is_clean());
        assert_eq!(outcomes(&disk, &[]), [3].into());
        assert_eq!(outcomes(&disk, &[(0, &[4; 512])]), [3, 4].into());
    }

    #[test]
    fn a_sync_covers_what_came_before_it_and_no_more() {
        let mut disk = Disk::new(vec![1; 1024]);
        disk.write(0, &[2; 512]);
        let point = disk.sync_point();
        disk.write(0, &[3; 512]);
        assert_eq!(outcomes(&disk, &[]), [1, 2, 3].into());
        disk.synced(point);
        assert_eq!(outcomes(&disk, &[]), [2, 3].into());
    }

    #[test]
    fn what_a_failed_sync_was_to_cover_is_covered_by_no_later_one() {
        let mut disk = Disk::new(vec![1; 1024]);
        disk.write(0, &[2; 512]);
        let point = disk.sync_point();
        disk.sync_failed(&point);
        let point = disk.sync_point();
        disk.synced(point);
        assert_eq!(outcomes(&disk, &[]), [1, 2].into());
        disk.write(0, &[3; 512]);
        let point = disk.sync_point();
        disk.synced(point);
        assert_eq!(outcomes(&disk, &[]), [3].into(), "written again");
    }

    #[test]
    fn sectors_are_never_torn_and_writes_are() {
        let mut disk = Disk::new(vec![1; 4096]);
        let mut rng = Rng::new(2);
        let mut torn = 0;
        disk.write(512, &[2; 1024]);
        for _ in 0..100 {
            let medium = disk.after_power_cut(&[(2048, &[3; 2048])], &mut rng);
            for sector in medium.chunks(SECTOR_BYTES) {
                assert!(sector.iter().all(|byte| *byte == sector[0]));
            }
            assert!(medium[..512].iter().chain(&medium[1536..2048]).all(|byte| *byte == 1), "never written");
            torn += u32::from(medium[512] != medium[1024]);
        }
        assert!(torn > 10, "{torn} of 100 torn");
    }

    #[test]
    fn files_grow_and_reads_end_with_them() {
        let mut disk = Disk::new(vec![1; 100]);
        assert_eq!(disk.read(90, 100), [1; 10]);
        assert!(disk.read(u64::MAX, 100).is_empty());
        disk.write(600, &[2; 5]);
        assert_eq!(disk.read(99, 2), [1, 0]);
        assert_eq!(disk.read(600, 100), [2; 5]);
        assert_eq!(disk.contents().len(), 605);
    }
}

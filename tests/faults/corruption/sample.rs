//! A closed store to be damaged, what it was earlier, and another store of the same shape.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
};

use kvhoist::{
    BlockKey, Cache, Config, DiskPath, Error, StorageKind, WritePolicy, block_on,
    internals::{
        checksum::checksum,
        disk::format::{
            PAGE_BYTES, RECORD_BYTES, TABLE_OFFSET,
            record::{Record, RecordSeal},
            stripe::Stripe,
            superblock::Superblock,
        },
        io::FileId,
    },
};

use super::common::{directory, key, payload};

/// With padding after the payload: a slot has 8192.
pub const BLOCK_BYTES: usize = 5000;
pub const SLOT_BYTES: usize = 8192;

/// Where a record's crc is.
const CRC: usize = 120;

/// The bytes of every member.
pub type Image = Vec<Vec<u8>>;

/// A range of one member's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    pub member: usize,
    pub range: Range<usize>,
}

impl Span {
    pub fn new(member: usize, offset: usize, len: usize) -> Self {
        Span { member, range: offset..offset + len }
    }

    pub fn bytes<'a>(&self, image: &'a Image) -> &'a [u8] {
        &image[self.member][self.range.clone()]
    }

    pub fn bytes_mut<'a>(&self, image: &'a mut Image) -> &'a mut [u8] {
        &mut image[self.member][self.range.clone()]
    }
}

/// A store in three states. Slots of `now` are reused ones, ones as they were in `older`, and free ones.
pub struct Sample {
    pub config: Config,
    pub stripe: Stripe,
    pub uuid: [u8; 16],
    /// What is damaged.
    pub now: Image,
    /// The same store earlier: every slot full.
    pub older: Image,
    /// Another store of this shape, with the same blocks.
    pub other: Image,
    /// All blocks that any of the images ever held, by the numbers of their keys.
    pub payloads: BTreeMap<u64, Vec<u8>>,
    /// Whose block a record is, by the slot and the bytes of the record: number of the key, and generation.
    records: BTreeMap<(u32, Vec<u8>), (u64, u64)>,
}

impl Sample {
    /// Over members with this many slots.
    pub fn new(storage: StorageKind, slots: &[u32]) -> Result<Self, Error> {
        let dir = directory();
        let config = config(storage, dir.path(), slots);
        let all = u64::from(slots.iter().sum::<u32>());
        let mut images = Vec::new();
        // The first two are one store.
        for (name, blocks, removed) in
            [("ours", 0..all, 0), ("ours", 1000..1000 + all / 4, all / 4), ("other", 0..all, 0)]
        {
            let config = with_name(&config, name);
            let cache = block_on(Cache::open(config.clone()))?;
            for n in blocks.clone() {
                // Chains of three.
                let parent = (n % 3 > 0).then(|| key(n - 1));
                block_on(cache.store(&key(n), parent.as_ref(), &payload(n, BLOCK_BYTES)))?;
            }
            remove_some(&cache, all, removed);
            block_on(cache.close())?;
            images.push(read(&config));
        }
        let [older, now, other] = images.try_into().expect("three images");
        let stripe = Stripe::new(&config);
        let head = now[0].first_chunk().expect("a superblock");
        let uuid = Superblock::decode(head).expect("sound").uuid;
        let mut sample =
            Sample { config, stripe, uuid, now, older, other, payloads: BTreeMap::new(), records: BTreeMap::new() };
        sample.records = sample.known_records(all);
        sample.payloads = sample.records.values().map(|(n, _)| (*n, payload(*n, BLOCK_BYTES))).collect();
        Ok(sample)
    }

    fn known_records(&self, all: u64) -> BTreeMap<(u32, Vec<u8>), (u64, u64)> {
        let numbers: BTreeMap<BlockKey, u64> = (0..all).chain(1000..1000 + all).map(|n| (key(n), n)).collect();
        let mut records = BTreeMap::new();
        for image in [&self.older, &self.now] {
            for slot in 0..self.stripe.slots() {
                if let Some(record) = self.decode(image, slot) {
                    let bytes = self.record(slot).bytes(image).to_vec();
                    records.insert((slot, bytes), (numbers[&record.key], record.generation));
                }
            }
        }
        records
    }

    /// What a sound record says.
    pub fn decode(&self, image: &Image, slot: u32) -> Option<Record> {
        let (file, local) = self.stripe.place(slot);
        let bytes = self.record(slot).bytes(image).try_into().expect("a record");
        RecordSeal::new(&self.uuid, file.0).decode(local, BLOCK_BYTES as u32, bytes).expect("an undamaged image")
    }

    /// The bytes of a record that holds in this slot.
    pub fn encode(&self, slot: u32, record: &Record) -> [u8; RECORD_BYTES] {
        let (file, local) = self.stripe.place(slot);
        RecordSeal::new(&self.uuid, file.0).encode(local, record)
    }

    /// The same, changed, with a crc that holds.
    pub fn resealed(&self, slot: u32, record: &Record, change: impl FnOnce(&mut [u8])) -> [u8; RECORD_BYTES] {
        let (file, local) = self.stripe.place(slot);
        let mut bytes = self.encode(slot, record);
        change(&mut bytes[..CRC]);
        let seal = checksum(&self.uuid) ^ (u64::from(file.0) << 48) ^ u64::from(local);
        bytes[CRC..].copy_from_slice(&seal.to_le_bytes());
        let crc = checksum(&bytes);
        bytes[CRC..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Where a slot's record is.
    pub fn record(&self, slot: u32) -> Span {
        let (file, local) = self.stripe.place(slot);
        Span::new(file.0.into(), TABLE_OFFSET as usize + local as usize * RECORD_BYTES, RECORD_BYTES)
    }

    /// Where a slot's block is.
    pub fn block(&self, slot: u32) -> Span {
        Span { range: self.slot(slot).range.start..self.slot(slot).range.start + BLOCK_BYTES, ..self.slot(slot) }
    }

    /// Where a slot is.
    pub fn slot(&self, slot: u32) -> Span {
        let (file, offset) = self.stripe.locate(slot);
        Span::new(file.0.into(), offset as usize, SLOT_BYTES)
    }

    /// Where a member's record table is, and what is between it and the first slot.
    pub fn table_and_gap(&self, member: usize) -> (Span, Span) {
        let geometry = self.stripe.members()[member];
        let (start, len) = (TABLE_OFFSET as usize, geometry.pages as usize * PAGE_BYTES);
        let end = geometry.data_offset as usize;
        (Span::new(member, start, len), Span { member, range: start + len..end })
    }

    /// A full slot of the member with another block than it had earlier.
    pub fn reused(&self, member: usize) -> u32 {
        self.find(member, |now, older| now.is_some() && now != older)
    }

    /// A full slot of the member with the block that it had earlier. It is the `nth`, and has a parent.
    pub fn kept(&self, member: usize, nth: usize) -> u32 {
        let mut slots = self.slots_of(member).filter(|slot| {
            let now = self.decode(&self.now, *slot);
            now == self.decode(&self.older, *slot) && now.is_some_and(|record| record.parent.is_some())
        });
        slots.nth(nth).expect("some slots were left alone")
    }

    /// Two full slots with the same place in their members, the first two.
    pub fn side_by_side(&self) -> (u32, u32) {
        let full = |slot: &u32| self.decode(&self.now, *slot).is_some();
        let mut pairs = self.slots_of(0).zip(self.slots_of(1));
        pairs.find(|(left, right)| full(left) && full(right)).expect("most slots are full")
    }

    /// A free slot of the member.
    pub fn free(&self, member: usize) -> u32 {
        self.find(member, |now, _| now.is_none())
    }

    fn find(&self, member: usize, wanted: impl Fn(Option<Record>, Option<Record>) -> bool) -> u32 {
        let found = |slot: &u32| wanted(self.decode(&self.now, *slot), self.decode(&self.older, *slot));
        self.slots_of(member).find(found).expect("a slot of every kind")
    }

    fn slots_of(&self, member: usize) -> impl Iterator<Item = u32> + '_ {
        let locals = 0..self.stripe.members()[member].slots;
        locals.map(move |local| self.stripe.slot(FileId(member as u16), local))
    }

    /// The blocks of `now`, by the numbers of their keys.
    pub fn live(&self) -> Vec<u64> {
        self.served(&self.now, &[])
    }

    /// What an image serves, by what its bytes were once known to be, or are `crafted` to be: how the library reads
    /// damaged bytes has no say.
    pub fn served(&self, image: &Image, crafted: &[(u32, Record)]) -> Vec<u64> {
        let mut records = self.records.clone();
        for (slot, record) in crafted {
            let n = self.payloads.keys().find(|n| key(**n) == record.key).expect("a known key");
            records.insert((*slot, self.encode(*slot, record).to_vec()), (*n, record.generation));
        }
        let mut newest: BTreeMap<u64, (u64, bool)> = BTreeMap::new();
        for slot in 0..self.stripe.slots() {
            let record = (slot, self.record(slot).bytes(image).to_vec());
            let Some((n, generation)) = records.get(&record) else { continue };
            let right = self.block(slot).bytes(image) == self.payloads[n];
            let counts = newest.entry(*n).or_insert((*generation, right));
            if counts.0 < *generation {
                *counts = (*generation, right);
            }
        }
        newest.into_iter().filter(|(_, (_, right))| *right).map(|(n, _)| n).collect()
    }
}

/// Removes some last blocks of chains, so that free slots lie between full ones.
fn remove_some(cache: &Cache, all: u64, count: u64) {
    let mut left = count;
    for n in (0..all).rev() {
        if left > 0 && n % 3 == 2 && block_on(cache.remove(&key(n))).expect("removed") {
            left -= 1;
        }
    }
}

/// Settings for a store in this directory.
pub fn config(storage: StorageKind, directory: &Path, slots: &[u32]) -> Config {
    let disk = |(at, &blocks): (usize, &u32)| DiskPath::with_blocks(directory.join(format!("ours.{at}")), blocks);
    Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(64)
        .disks(slots.iter().enumerate().map(disk).collect())
        .storage(storage)
        .write_policy(WritePolicy::WriteThrough)
}

fn with_name(config: &Config, name: &str) -> Config {
    let mut config = config.clone();
    for disk in &mut config.disk.paths {
        let file = disk.path.file_name().expect("a file").to_str().expect("UTF-8").replace("ours", name);
        disk.path.set_file_name(file);
    }
    config
}

fn read(config: &Config) -> Image {
    config.disk.paths.iter().map(|disk| std::fs::read(&disk.path).expect("a member")).collect()
}

/// The paths of a store.
pub fn paths(config: &Config) -> Vec<PathBuf> {
    config.disk.paths.iter().map(|disk| disk.path.clone()).collect()
}

//! The record table: records and bytes from anywhere in a sound store.

use std::collections::BTreeMap;

use crate::{
    memory::bounded,
    store_files::{blank_files, config, members},
};
use arbitrary::{Arbitrary, Unstructured};
use kvhoist::{
    BlockKey, Config, block_on,
    internals::{
        checksum::checksum,
        disk::{
            DiskSlots,
            format::{
                PAGE_BYTES, RECORD_BYTES, TABLE_OFFSET,
                record::{COUNTER_MAX, Record, RecordSeal},
                stripe::{PageId, Stripe},
                superblock::{StoreState, Superblock},
            },
            recovery::{Counts, Recovered, RecoveredRecord, open},
        },
    },
};
use kvhoist_simulation::sim::Memory;

const UUID: [u8; 16] = [5; 16];
const BLOCK_BYTES: u32 = 512;
/// Slots of a member at most, so that an input is cheap: some pages.
const SLOTS_MAX: u32 = 110;

#[derive(Debug, Arbitrary)]
struct Input {
    members: [u8; 3],
    edits: Vec<Edit>,
}

#[derive(Debug, Arbitrary)]
enum Edit {
    /// A sound record.
    Record { slot: u16, fields: Fields },
    /// A record that is sound but for some bytes under its seal.
    Forged { slot: u16, fields: Fields, at: u8, bytes: Vec<u8> },
    /// A record of another store, member or slot.
    Misplaced { slot: u16, fields: Fields, uuid: u8, member: u8, local: u16 },
    /// A copy of a whole record.
    Copy { from: u16, to: u16 },
    /// Bytes anywhere in the table.
    Bytes { member: u8, at: u32, bytes: Vec<u8> },
}

#[derive(Debug, Arbitrary)]
struct Fields {
    key: u8,
    parent: Option<u8>,
    generation: u64,
    checksum: u64,
    last_use: u64,
    uses: u8,
}

impl Fields {
    fn record(&self) -> Record {
        // Both ends of the counters are likely: the shift is drawn from the low bits.
        let counter = |value: u64| (value >> (value % 64)) % COUNTER_MAX;
        Record {
            key: BlockKey::new([self.key; 32]),
            parent: self.parent.map(|parent| BlockKey::new([parent; 32])),
            length: BLOCK_BYTES,
            generation: counter(self.generation),
            checksum: self.checksum,
            last_use: counter(self.last_use),
            uses: self.uses % 4,
        }
    }
}

struct Store {
    config: Config,
    stripe: Stripe,
    files: Vec<Vec<u8>>,
}

/// Spoils the table of a new store, opens it, and compares with records read one by one.
pub fn run(data: &[u8]) {
    let Ok(input) = Input::arbitrary_take_rest(Unstructured::new(data)) else { return };
    let blocks: Vec<u32> = input.members.iter().map(|&n| u32::from(n) % SLOTS_MAX).filter(|&n| n > 0).collect();
    if blocks.is_empty() {
        return;
    }
    let mut store = Store::new(&blocks);
    input.edits.iter().for_each(|edit| store.edit(edit));
    let (recovered, records) = store.open();
    store.check(&recovered, &records);
    store.write_back(recovered, records);
}

impl Store {
    fn new(blocks: &[u32]) -> Self {
        let config = config(BLOCK_BYTES as usize, blocks);
        let mut files = blank_files(&config);
        for (member, file) in (0..).zip(&mut files) {
            for (copy, sequence) in [(1, 2), (0, 3)] {
                let whole = Superblock { state: StoreState::Whole, sequence, ..Superblock::new(&config, UUID, member) };
                file[copy * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(&whole.encode());
            }
        }
        Store { stripe: Stripe::new(&config), files, config }
    }

    /// What was recovered; a record's entry in the books is its place among the records.
    fn open(&mut self) -> (Recovered, Vec<RecoveredRecord>) {
        let storage = Memory::new(std::mem::take(&mut self.files));
        let slots = self.stripe.slots() as usize;
        let mut records = Vec::with_capacity(slots);
        let take = &mut |slots: &mut DiskSlots, page: &[RecoveredRecord]| {
            for record in page {
                slots.restore(record.slot, records.len() as u32, record.checksum, record.generation);
                records.push(*record);
            }
        };
        let opening = || block_on(open(&storage, &members(&self.config), &self.config, UUID, &(), take));
        // Eight reads of a megabyte in flight, and 200 bytes a slot.
        let recovered = bounded((16 << 20) + 200 * slots, opening).expect("the superblocks are sound");
        self.files = storage.into_files();
        (recovered, records)
    }

    /// Where a record is.
    fn place(&self, slot: u32) -> (usize, usize) {
        let (file, local) = self.stripe.place(slot);
        (usize::from(file.0), TABLE_OFFSET as usize + local as usize * RECORD_BYTES)
    }

    fn record(&self, slot: u32) -> [u8; RECORD_BYTES] {
        let (file, at) = self.place(slot);
        *self.files[file][at..].first_chunk().expect("the table holds it")
    }

    fn put(&mut self, slot: u32, bytes: &[u8; RECORD_BYTES]) {
        let (file, at) = self.place(slot);
        self.files[file][at..at + RECORD_BYTES].copy_from_slice(bytes);
    }

    fn edit(&mut self, edit: &Edit) {
        let any = |slot: u16| u32::from(slot) % self.stripe.slots();
        match edit {
            Edit::Record { slot, fields } => {
                let (file, local) = self.stripe.place(any(*slot));
                self.put(any(*slot), &RecordSeal::new(&UUID, file.0).encode(local, &fields.record()));
            }
            Edit::Forged { slot, fields, at, bytes } => {
                let (file, local) = self.stripe.place(any(*slot));
                let mut forged = RecordSeal::new(&UUID, file.0).encode(local, &fields.record());
                let at = usize::from(*at) % 120;
                let len = bytes.len().min(120 - at);
                forged[at..at + len].copy_from_slice(&bytes[..len]);
                forged[120..].copy_from_slice(&seal_of(file.0, local));
                let crc = checksum(&forged);
                forged[120..].copy_from_slice(&crc.to_le_bytes());
                self.put(any(*slot), &forged);
            }
            Edit::Misplaced { slot, fields, uuid, member, local } => {
                let bytes = RecordSeal::new(&[*uuid; 16], (*member).into()).encode((*local).into(), &fields.record());
                self.put(any(*slot), &bytes);
            }
            Edit::Copy { from, to } => {
                let bytes = self.record(any(*from));
                self.put(any(*to), &bytes);
            }
            Edit::Bytes { member, at, bytes } => {
                let member = usize::from(*member) % self.files.len();
                let table = &mut self.files[member][TABLE_OFFSET as usize..];
                let at = *at as usize % table.len();
                let len = bytes.len().min(table.len() - at);
                table[at..at + len].copy_from_slice(&bytes[..len]);
            }
        }
    }

    /// Every record that counts by itself is there, in the order of the tables, and nothing else.
    fn check(&self, recovered: &Recovered, records: &[RecoveredRecord]) {
        let mut counts = Counts::default();
        let mut expected = BTreeMap::new();
        for slot in 0..self.stripe.slots() {
            let (file, local) = self.stripe.place(slot);
            let bytes = self.record(slot);
            if bytes == [0; RECORD_BYTES] {
                counts.free += 1;
            } else if let Some(record) = naive(file.0, local, &bytes) {
                counts.valid += 1;
                // Older versions set one more flag, which nobody reads.
                let is_older = bytes[0] & 16 != 0;
                let encoded = RecordSeal::new(&UUID, file.0).encode(local, &record);
                assert!(is_older || encoded == bytes, "one record, one form: {bytes:?}");
                expected.insert(slot, RecoveredRecord { slot, record });
            } else {
                counts.bad += 1;
                assert!(recovered.slots.stale_pages(PageId(0)).any(|page| page == self.stripe.page_of(slot)));
            }
        }
        assert_eq!(recovered.counts, counts);
        let found: BTreeMap<u32, RecoveredRecord> = records.iter().map(|record| (record.slot, *record)).collect();
        assert_eq!((&found, found.len()), (&expected, records.len()));
        assert!(records.iter().all(|record| record.generation < recovered.next_generation));
        assert!(records.is_sorted_by_key(|record| self.stripe.place(record.slot)));
        recovered.slots.validate().expect("the levels agree");
    }

    /// The books go on from there: every other slot is filled, every page written, and all is found again.
    fn write_back(&mut self, recovered: Recovered, records: Vec<RecoveredRecord>) {
        let Recovered { mut slots, next_generation, .. } = recovered;
        let block = |record: RecoveredRecord| (record.key, record.parent, record.last_use, record.uses);
        let mut blocks: Vec<(BlockKey, Option<BlockKey>, u64, u8)> = records.into_iter().map(block).collect();
        let clock = blocks.iter().map(|block| block.2).max().unwrap_or(0);
        for (generation, last_use) in (next_generation..).zip(clock + 1..) {
            let Some(slot) = slots.alloc() else { break };
            slots.commit(slot, blocks.len() as u32, 7, generation);
            // A forged record may hold the last count that the format has; what comes after it is recorded as that.
            blocks.push((BlockKey::new([0xEE; 32]), None, last_use.min(COUNTER_MAX), 1));
        }
        slots.validate().expect("the levels agree");
        for page in (0..self.stripe.pages()).map(kvhoist::internals::disk::PageId) {
            let mut bytes = [0; PAGE_BYTES];
            slots.encode_page(page, &mut bytes, |entry| blocks[entry as usize]).seal();
            let (file, offset) = slots.stripe().page_location(page);
            self.files[usize::from(file.0)][offset as usize..][..PAGE_BYTES].copy_from_slice(&bytes);
        }
        let (again, records) = self.open();
        assert_eq!(again.counts, Counts { valid: u64::from(self.stripe.slots()), ..Counts::default() });
        let mut found: Vec<_> = records.into_iter().map(block).collect();
        found.sort_unstable();
        blocks.sort_unstable();
        assert_eq!(found, blocks);
    }
}

/// What stands for a slot at the end of what its record's crc covers: as `docs/design.md` has it.
fn seal_of(member: u16, local: u32) -> [u8; 8] {
    (checksum(&UUID) ^ (u64::from(member) << 48) ^ u64::from(local)).to_le_bytes()
}

/// The record that is not all zeros, read by the byte diagram of `docs/design.md`; `None` if it does not count.
fn naive(member: u16, local: u32, bytes: &[u8; RECORD_BYTES]) -> Option<Record> {
    let number = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().expect("a word"));
    let key = |at: usize| BlockKey::new(*bytes[at..].first_chunk().expect("a key"));
    let (flags, length) = (bytes[0], u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]));
    let (generation, last_use) = (number(8), number(24));
    let crc = checksum(&[&bytes[..120], &seal_of(member, local)].concat());
    let (flags, uses) = (flags & !28, flags >> 2 & 3);
    let parent = (flags == 3).then(|| key(64));
    let sound = number(120) == crc
        && (flags == 1 || flags == 3)
        && bytes[1..4] == [0; 3]
        && length == BLOCK_BYTES
        && (parent.is_some() || bytes[64..96] == [0; 32])
        && bytes[96..120] == [0; 24]
        && generation.max(last_use) <= COUNTER_MAX;
    sound.then(|| Record { key: key(32), parent, length, generation, checksum: number(16), last_use, uses })
}

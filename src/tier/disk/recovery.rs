//! From bytes to a store: create it, or read back what it holds.
//!
//! Everything goes through [`Storage`], so that a simulated crash recovers like a real one.

use super::{
    DiskSlots, StoreFile,
    format::{
        HEAD_BYTES, PAGE_BYTES, RECORD_BYTES, SUPERBLOCK_OFFSETS, TABLE_OFFSET,
        record::RecordSeal,
        stripe::Stripe,
        superblock::{State, Superblock},
        survey::{Found, Standing, Verdict, survey},
    },
};
use crate::{
    block::BlockKey,
    config::Config,
    error::{Error, Result},
    io::{AlignedBuf, FileId, Storage, read_full, write_full},
};

/// Bytes of the record table in one read. Two reads are in flight: one is read, one is parsed.
const TABLE_CHUNK_BYTES: usize = 1 << 20;

/// A block that the store holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecoveredRecord {
    /// Its slot.
    pub slot: u32,
    /// Its key.
    pub key: BlockKey,
    /// The key before it in its chain.
    pub parent: Option<BlockKey>,
    /// The generation of its record.
    pub generation: u64,
    /// CRC-64/NVME of its payload.
    pub checksum: u64,
    /// The index's clock at its last use.
    pub last_use: u64,
}

/// What the record table came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Records that name a block.
    pub valid: u64,
    /// Free slots.
    pub free: u64,
    /// Records that are torn or damaged; their slots are free.
    pub bad: u64,
}

/// An open store.
pub struct Recovered {
    /// The books of its slots, all free: the caller enters the records.
    pub slots: DiskSlots,
    /// What it holds, in the order of the record table. A block that was evicted and stored again may
    /// have two records: the one with the higher generation counts.
    pub records: Vec<RecoveredRecord>,
    /// The places of the records in the order of their last use, oldest first.
    pub order: Vec<u32>,
    /// What the record table came to.
    pub counts: Counts,
    /// The first generation that no record has.
    pub next_generation: u64,
}

/// Opens the store in `files`, or creates one where there is none.
///
/// # Errors
/// [`Error::Store`] for what is not this store, before anything was written; [`Error::Io`].
pub async fn recover<S: Storage>(storage: &S, files: &[StoreFile], config: &Config) -> Result<Recovered> {
    let recovered = open_or_create(storage, files, config).await;
    if recovered.is_err() {
        files.iter().for_each(StoreFile::undo);
    }
    recovered
}

async fn open_or_create<S: Storage>(storage: &S, files: &[StoreFile], config: &Config) -> Result<Recovered> {
    let stripe = Stripe::new(config);
    let mut heads = Vec::with_capacity(files.len());
    for (file, id) in files.iter().zip(ids()) {
        heads.push(read_head(storage, id).await.map_err(|source| Error::io("read", &file.path, source))?);
    }
    let found: Vec<Found<'_>> = files
        .iter()
        .zip(&heads)
        .map(|(file, head)| Found { path: &file.path, bytes: file.bytes, device: file.device, head })
        .collect();
    match survey(&found, config)? {
        Verdict::Create => {
            for (file, member) in files.iter().zip(stripe.members()) {
                file.allocate(member.bytes)?;
            }
            let uuid = new_uuid();
            format(storage, files, config, &stripe, uuid).await?;
            let records = Vec::new();
            let counts = Counts { free: stripe.slots().into(), ..Counts::default() };
            let slots = DiskSlots::new(stripe, uuid);
            Ok(Recovered { slots, records, order: Vec::new(), counts, next_generation: 1 })
        }
        Verdict::Open(standings) => {
            for (standing, (file, id)) in standings.iter().zip(files.iter().zip(ids())) {
                mend(storage, id, standing).await.map_err(|source| Error::io("write", &file.path, source))?;
            }
            read_tables(storage, files, stripe, standings[0].superblock.uuid).await
        }
    }
}

fn ids() -> impl Iterator<Item = FileId> {
    (0..=u16::MAX).map(FileId)
}

/// 16 random bytes, from the same source as the standard library's hash seeds.
fn new_uuid() -> [u8; 16] {
    use std::hash::{BuildHasher, RandomState};
    let mut uuid = [0; 16];
    for half in uuid.chunks_exact_mut(8) {
        half.copy_from_slice(&RandomState::new().hash_one(0u64).to_le_bytes());
    }
    uuid
}

/// The first bytes of a member; zeros where it is shorter.
async fn read_head<S: Storage>(storage: &S, file: FileId) -> std::io::Result<[u8; HEAD_BYTES]> {
    let mut head = [0; HEAD_BYTES];
    for (half, offset) in head.chunks_exact_mut(PAGE_BYTES).zip(SUPERBLOCK_OFFSETS) {
        let (result, lent) = storage.read(file, offset, AlignedBuf::zeroed(PAGE_BYTES).lend()).await;
        let read = result?;
        half[..read].copy_from_slice(&AlignedBuf::from_lent(lent)[..read]);
    }
    Ok(head)
}

async fn write_page<S: Storage>(
    storage: &S,
    file: FileId,
    offset: u64,
    page: &[u8; PAGE_BYTES],
) -> std::io::Result<()> {
    let mut buf = AlignedBuf::zeroed(PAGE_BYTES);
    buf.copy_from_slice(page);
    write_full(storage, file, offset, buf.lend()).await.0
}

/// Writes the other copy of a superblock where creation or a torn write left none.
async fn mend<S: Storage>(storage: &S, file: FileId, standing: &Standing) -> std::io::Result<()> {
    if !standing.mend_twin {
        return Ok(());
    }
    let mut superblock = standing.superblock.clone();
    superblock.state = State::Whole;
    superblock.sequence = superblock.sequence.saturating_add(1);
    storage.sync(file).await?;
    write_page(storage, file, SUPERBLOCK_OFFSETS[1 - standing.copy], &superblock.encode()).await?;
    storage.sync(file).await
}

/// Creates a store; the order is that of [`format`](super::format), so that a crash at any instant
/// leaves no store or a whole one.
async fn format<S: Storage>(
    storage: &S,
    files: &[StoreFile],
    config: &Config,
    stripe: &Stripe,
    uuid: [u8; 16],
) -> Result<()> {
    let zeros = [0; PAGE_BYTES];
    for (file, (id, member)) in files.iter().zip(ids().zip(stripe.members())) {
        let io = |source| Error::io("format", &file.path, source);
        write_page(storage, id, SUPERBLOCK_OFFSETS[1], &zeros).await.map_err(io)?;
        // A file that this open made reads as zeros; anything else may hold old records.
        if file.device || file.bytes > 0 {
            zero_table(storage, id, member.table_bytes()).await.map_err(io)?;
        }
        storage.sync(id).await.map_err(io)?;
    }
    for (copy, state) in [(0, State::Forming), (1, State::Whole), (0, State::Whole)] {
        for (file, id) in files.iter().zip(ids()) {
            let io = |source| Error::io("format", &file.path, source);
            let mut superblock = Superblock::new(config, uuid, id.0);
            superblock.state = state;
            superblock.sequence = if state == State::Forming { 1 } else { 2 + (1 - copy as u64) };
            write_page(storage, id, SUPERBLOCK_OFFSETS[copy], &superblock.encode()).await.map_err(io)?;
            storage.sync(id).await.map_err(io)?;
        }
    }
    Ok(())
}

async fn zero_table<S: Storage>(storage: &S, file: FileId, bytes: u64) -> std::io::Result<()> {
    let mut at = 0;
    while at < bytes {
        let len = TABLE_CHUNK_BYTES.min(usize::try_from(bytes - at).unwrap_or(usize::MAX));
        write_full(storage, file, TABLE_OFFSET + at, AlignedBuf::zeroed(len).lend()).await.0?;
        at += len as u64;
    }
    Ok(())
}

/// Reads every record; the next chunk is read while one is parsed.
async fn read_tables<S: Storage>(
    storage: &S,
    files: &[StoreFile],
    stripe: Stripe,
    uuid: [u8; 16],
) -> Result<Recovered> {
    let mut counts = Counts::default();
    let mut records = Vec::with_capacity(stripe.slots() as usize / 2);
    for (file, (id, member)) in files.iter().zip(ids().zip(stripe.members())) {
        let io = |source| Error::io("read", &file.path, source);
        let seal = RecordSeal::new(&uuid, id.0);
        let table_bytes = member.table_bytes();
        let read = |at: u64| {
            let len = TABLE_CHUNK_BYTES.min(usize::try_from(table_bytes - at).unwrap_or(usize::MAX));
            read_full(storage, id, TABLE_OFFSET + at, AlignedBuf::zeroed(len.max(PAGE_BYTES)).lend())
        };
        let mut local = 0;
        let mut at = 0;
        let (mut result, mut lent) = read(at).await;
        loop {
            result.map_err(io)?;
            let chunk = AlignedBuf::from_lent(lent);
            at += chunk.len() as u64;
            let parse = async {
                for page in chunk.chunks_exact(PAGE_BYTES) {
                    for bytes in page.chunks_exact(RECORD_BYTES) {
                        if local < member.slots {
                            let bytes = bytes.first_chunk().expect("a chunk of one record");
                            take_record(seal, local, &stripe, id, bytes, &mut counts, &mut records);
                        }
                        local += 1;
                    }
                    if local.is_multiple_of(1024) {
                        crate::io::yield_now().await;
                    }
                }
            };
            if at >= table_bytes {
                parse.await;
                break;
            }
            let ((), next) = tokio::join!(parse, read(at));
            (result, lent) = next;
        }
    }
    // Small keys sort several times faster than whole records.
    let mut order: Vec<(u64, u32)> = (0..).zip(&records).map(|(at, record)| (record.last_use, at)).collect();
    order.sort_unstable();
    let next_generation = records.iter().map(|record| record.generation + 1).max().unwrap_or(1);
    let order = order.into_iter().map(|(_, at)| at).collect();
    Ok(Recovered { slots: DiskSlots::new(stripe, uuid), records, order, counts, next_generation })
}

fn take_record(
    seal: RecordSeal,
    local: u32,
    stripe: &Stripe,
    file: FileId,
    bytes: &[u8; RECORD_BYTES],
    counts: &mut Counts,
    records: &mut Vec<RecoveredRecord>,
) {
    match seal.decode(local, stripe.block_bytes(), bytes) {
        Ok(None) => counts.free += 1,
        Err(_) => counts.bad += 1,
        Ok(Some(record)) => {
            counts.valid += 1;
            records.push(RecoveredRecord {
                slot: stripe.slot(file, local),
                key: record.key,
                parent: record.parent,
                generation: record.generation,
                checksum: record.checksum,
                last_use: record.last_use,
            });
        }
    }
}

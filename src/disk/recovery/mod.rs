//! Creates a store or recovers an existing one, over any [`Storage`].
//!
//! [`format`](super::format) describes the steps of a creation and what a crash between them leaves. Recovery reads the
//! superblocks and makes one sequential pass over the record tables; it reads no payload.

mod collect;
mod pages;
mod table;

pub use collect::{Counts, RecoveredRecord, Threads};
pub(crate) use pages::RecordPages;
pub(crate) use table::{PageVisitor, read_tables};

use std::{io, path::PathBuf, sync::Arc};

use collect::{Collector, Decoder};

use super::{
    files::{StoreFile, random_uuid},
    format::{
        HEAD_BYTES, PAGE_BYTES, SUPERBLOCK_OFFSETS, TABLE_OFFSET,
        pair::{SuperblockPair, UNREADABLE_COPY},
        stripe::Stripe,
        superblock::{SEQUENCE_MAX, StoreState, Superblock},
        survey::{Found, MemberState, OpenPlan, survey_to_write},
    },
    slots::DiskSlots,
};
use crate::{
    block::{FileId, OpKind},
    config::Config,
    error::{Error, Result},
    io::{Storage, is_shortage, transfer_owned},
    memory::{AlignedBuf, Lent},
    shield::log,
};

/// A file or device that the storage engine has open; its index in the list is its [`FileId`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Name in errors.
    pub path: PathBuf,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether it is a device, which may be larger than the store.
    pub device: bool,
    /// Whether it is known to read as zeros, so that a new store's record table need not be written.
    pub zeroed: bool,
}

/// Receives the records of a store, a page at a time, and enters them in its slot table.
///
/// Records arrive in the order of the record tables. A block that was evicted and stored again may have two records;
/// the one with the higher generation is valid. A record that is not entered leaves its slot free.
pub type RecordSink<'a> = dyn FnMut(&mut DiskSlots, &[RecoveredRecord]) + 'a;

/// An open store.
#[derive(Debug)]
pub struct Recovered {
    /// The slot table, with the entered blocks. Pages with invalid records are stale.
    pub slots: DiskSlots,
    /// Results of reading the record tables.
    pub counts: Counts,
    /// The lowest generation above those of all records.
    pub next_generation: u64,
    /// The store was created by this call.
    pub is_new: bool,
}

/// Opens the store in `files`, or creates one if none of them ever held a block. Like [`open`].
///
/// # Errors
/// [`Error::Store`] if the files are not this store; nothing was written then. [`Error::Io`] if the storage failed.
pub async fn recover<S: Storage>(
    storage: &S,
    files: &[StoreFile],
    config: &Config,
    threads: &impl Threads,
    sink: &mut RecordSink<'_>,
) -> Result<Recovered> {
    let members: Vec<Member> = files.iter().map(StoreFile::member).collect();
    open(storage, &members, config, random_uuid()?, threads, sink).await
}

/// Opens the store on these members, or creates it (with this id) if none of them ever held a block. `threads` check
/// and decode records; those that arrive at the `sink`, and their order, do not depend on them.
///
/// # Errors
/// [`Error::Store`] if the members are not one store with these settings; nothing was written then. [`Error::Io`] if
/// the storage failed.
///
/// # Cancel safety
/// May be dropped at any point, which, like a crash, leaves no store or a complete one.
///
/// # Panics
/// If there is not one member for each of `config.disk.paths`, or `config` is not valid.
pub async fn open<S: Storage>(
    storage: &S,
    members: &[Member],
    config: &Config,
    uuid: [u8; 16],
    threads: &impl Threads,
    sink: &mut RecordSink<'_>,
) -> Result<Recovered> {
    let stripe = Stripe::new(config);
    match survey_members(storage, members, config).await? {
        OpenPlan::Open(states) => {
            let uuid = states[0].superblock.uuid;
            let records_uses = states.iter().all(|state| state.superblock.records_uses());
            for ((file, member), state) in files(members).zip(states) {
                repair(storage, file, member, state).await?;
            }
            let decoder = Arc::new(Decoder::new(stripe.clone(), uuid));
            let mut collector = Collector::new(&decoder, DiskSlots::new(stripe.clone(), uuid, records_uses)?, sink);
            let decode = async |first, pages| decoder.decode_on(threads, first, pages).await;
            read_tables(storage, members, &stripe, decode, &mut collector).await?;
            Ok(collector.finish())
        }
        OpenPlan::Create => {
            let counts = Counts { free: stripe.slots().into(), ..Counts::default() };
            let slots = DiskSlots::new(stripe, uuid, true)?;
            create(storage, members, config, uuid).await?;
            Ok(Recovered { slots, counts, next_generation: 1, is_new: true })
        }
    }
}

async fn survey_members<S: Storage>(storage: &S, members: &[Member], config: &Config) -> Result<OpenPlan> {
    assert_eq!(members.len(), config.disk.paths.len(), "one member a configured path");
    let mut heads = Vec::with_capacity(members.len());
    for (file, member) in files(members) {
        // A file shorter than the superblocks is validated by its size.
        let mut buf = AlignedBuf::zeroed(HEAD_BYTES);
        if member.bytes >= HEAD_BYTES as u64 {
            let read = read_superblocks(storage, file, buf).await;
            buf = read.map_err(|error| Error::io("read the superblocks of", &member.path, error))?;
        }
        heads.push(buf);
    }
    let found: Vec<Found<'_>> = members
        .iter()
        .zip(&heads)
        .map(|(member, head)| Found {
            path: &member.path,
            bytes: member.bytes,
            device: member.device,
            head: head.first_chunk().expect("the buffer has the length of a head"),
        })
        .collect();
    // Also if the first look found a copy unreadable: a repair writes over it.
    survey_to_write(&found, config)
}

/// Reads both superblocks, each alone if they cannot be read together: one that the device does not return is as good
/// as damaged, if the other is sound.
async fn read_superblocks<S: Storage>(storage: &S, file: FileId, head: AlignedBuf) -> io::Result<AlignedBuf> {
    let (result, mut head) = transfer_owned(storage, OpKind::Read, file, 0, head.into_io()).await;
    let Err(error) = result else { return Ok(head) };
    if is_shortage(&error) {
        return Err(error);
    }
    let mut page = AlignedBuf::zeroed(PAGE_BYTES);
    for (copy, offset) in head.chunks_exact_mut(PAGE_BYTES).zip(SUPERBLOCK_OFFSETS) {
        let result;
        (result, page) = transfer_owned(storage, OpKind::Read, file, offset, page.into_io()).await;
        match result {
            Ok(()) => copy.copy_from_slice(&page),
            Err(error) if is_shortage(&error) => return Err(error),
            Err(_) => copy.copy_from_slice(&UNREADABLE_COPY),
        }
    }
    let pair = SuperblockPair::decode(head.first_chunk().expect("the buffer has the length of a head"));
    if matches!(pair, SuperblockPair::Valid { .. }) { Ok(head) } else { Err(error) }
}

/// Creates a store; [`format`](super::format) gives the reasons for the order of steps.
async fn create<S: Storage>(storage: &S, members: &[Member], config: &Config, uuid: [u8; 16]) -> Result<()> {
    let stripe = Stripe::new(config);
    for ((file, member), geometry) in files(members).zip(stripe.members()) {
        assert!(member.bytes >= geometry.bytes, "the survey checked the size; files are preallocated before");
        if !member.zeroed {
            zero_table(storage, file, geometry.table_bytes()).await.map_err(|e| write_failed(member, e))?;
        }
        // An interrupted creation may have left a copy B: a torn copy A is recognizable only while B is blank.
        write_page(storage, file, SUPERBLOCK_OFFSETS[1], &[0; PAGE_BYTES])
            .await
            .map_err(|e| write_failed(member, e))?;
    }
    sync_all(storage, members).await?;
    for (copy, state, sequence) in [(0, StoreState::Forming, 1), (1, StoreState::Whole, 2), (0, StoreState::Whole, 3)] {
        for (file, member) in files(members) {
            let new = Superblock::new(config, uuid, file.0);
            write_superblock(storage, file, member, copy, &Superblock { state, sequence, ..new }).await?;
        }
        sync_all(storage, members).await?;
    }
    Ok(())
}

/// Makes both copies valid and whole: finishes a creation, replaces a damaged copy.
///
/// The other copy first, so that the valid one stays untouched until it can be replaced. The device may refuse that, at
/// a bad sector. Then a valid copy that is whole is all that the store needs, and nothing writes to it while the store
/// is open. A valid copy that is forming would have to be written over where a crash may tear it and no second one is
/// left: an error, of a store that was never in use.
async fn repair<S: Storage>(storage: &S, file: FileId, member: &Member, state: MemberState) -> Result<()> {
    let MemberState { mut superblock, copy, repair_other } = state;
    let is_whole = superblock.state == StoreState::Whole;
    superblock.state = StoreState::Whole;
    for (copy, needed) in [(1 - copy, repair_other), (copy, !is_whole)] {
        if !needed {
            continue;
        }
        let path = member.path.display();
        log(|| tracing::warn!(%path, copy, "rewriting a torn, damaged or unfinished superblock"));
        // A forged superblock may have the largest number. Of two equal ones A is valid, and by now both have the same
        // content.
        superblock.sequence = SEQUENCE_MAX.min(superblock.sequence + 1);
        match write_superblock(storage, file, member, copy, &superblock).await {
            Err(Error::Io { source, .. }) if is_whole && !is_shortage(&source) => {
                let what = "a superblock cannot be rewritten; the store opens by its other copy alone";
                log(|| tracing::warn!(%path, copy, error = %source, "{what}"));
            }
            written => {
                written?;
                // A failed flush may be that of what an earlier run wrote.
                sync(storage, file, member).await?;
            }
        }
    }
    Ok(())
}

fn files(members: &[Member]) -> impl Iterator<Item = (FileId, &Member)> {
    (0..).map(FileId).zip(members)
}

fn write_failed(member: &Member, error: io::Error) -> Error {
    Error::io("write the superblocks and record table of", &member.path, error)
}

async fn write_superblock<S: Storage>(
    storage: &S,
    file: FileId,
    member: &Member,
    copy: usize,
    superblock: &Superblock,
) -> Result<()> {
    let bytes = superblock.encode();
    // Decode before writing: a superblock that the next start would refuse must never reach the medium.
    assert_eq!(Superblock::decode(&bytes).as_ref(), Ok(superblock), "a superblock that can be read back");
    write_page(storage, file, SUPERBLOCK_OFFSETS[copy], &bytes).await.map_err(|error| write_failed(member, error))
}

async fn write_page<S: Storage>(storage: &S, file: FileId, offset: u64, bytes: &[u8; PAGE_BYTES]) -> io::Result<()> {
    let mut buf = AlignedBuf::zeroed(PAGE_BYTES);
    buf.copy_from_slice(bytes);
    transfer_owned(storage, OpKind::Write, file, offset, buf.into_io()).await.0
}

async fn zero_table<S: Storage>(storage: &S, file: FileId, bytes: u64) -> io::Result<()> {
    let mut written = 0;
    while written < bytes {
        let len = (bytes - written).min(table::CHUNK_BYTES as u64);
        let buf = AlignedBuf::zeroed(len as usize);
        transfer_owned(storage, OpKind::Write, file, TABLE_OFFSET + written, buf.into_io()).await.0?;
        written += len;
    }
    Ok(())
}

async fn sync_all<S: Storage>(storage: &S, members: &[Member]) -> Result<()> {
    for (file, member) in files(members) {
        sync(storage, file, member).await?;
    }
    Ok(())
}

async fn sync<S: Storage>(storage: &S, file: FileId, member: &Member) -> Result<()> {
    let flushed = storage.transfer(OpKind::Sync, file, 0, Lent::empty()).await;
    flushed.map_err(|error| Error::io("flush", &member.path, error))
}

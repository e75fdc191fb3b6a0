//! Reads all blocks of a store and checks their checksums.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io, mem,
    ops::ControlFlow,
    path::PathBuf,
    time::{Duration, Instant},
};

use futures_util::future::join_all;

use super::{
    Options, Store,
    engine::on_a_runtime,
    fault::{Fault, FaultKind, Faults, key_prefix},
    open::{OpenStore, Opened, Shape, open},
    tables::{Committed, Tables, group_by_key},
};
use crate::{
    block::OpKind,
    checksum::Digest,
    disk::ReadOnlyFile,
    error::Result,
    io::{Storage, transfer_owned},
    memory::AlignedBuf,
};

/// Bytes per read: a slot is read in pieces, which bounds memory for any block size.
const PIECE_BYTES: usize = 1 << 20;

/// Two records of one key: the block was stored again before the record of its first copy was cleared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Duplicate {
    /// The first four bytes of the key, in hex.
    pub key_prefix: String,
    /// The slot with the valid record.
    pub slot: u32,
    /// Generation of the valid record.
    pub generation: u64,
    /// The slot with the superseded record; it becomes free when a cache next opens the store.
    pub superseded_slot: u32,
    /// Generation of the superseded record, which is lower.
    pub superseded_generation: u64,
}

/// Result of a verification.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Verification {
    /// Contents of the superblocks; `None` if the store is too damaged to be opened, in which case nothing else was
    /// read.
    pub shape: Option<Shape>,
    /// The files and devices, in the order in which `disks` must list them.
    pub paths: Vec<PathBuf>,
    /// Slots whose record names a block.
    pub committed: u64,
    /// Slots without a record.
    pub empty: u64,
    /// Slots whose record is invalid.
    pub records_bad: u64,
    /// Slots whose block has a newer copy in another slot. A cache never serves them; they are not read.
    pub superseded: u64,
    /// The first superseded records, at most [`Store::listed_max`].
    pub duplicates: Vec<Duplicate>,
    /// Blocks whose payload matches its checksum.
    pub payloads_good: u64,
    /// Blocks whose payload does not match, or is unreadable.
    pub payloads_bad: u64,
    pub(super) faults: Faults,
    /// Bytes read: record tables and slots.
    pub bytes_read: u64,
    /// How long it took; zero until the end.
    pub elapsed: Duration,
    /// The storage engine used.
    pub storage: &'static str,
    /// Whether all paths were read with direct I/O.
    pub direct_io: bool,
    /// Whether a cache had the store open: faults may be blocks that were being written.
    pub in_use: bool,
    /// Whether everything was read; false until the end, and if the caller stopped early.
    pub complete: bool,
}

impl Verification {
    /// True if everything was read and nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.complete && self.faults.counts.is_empty()
    }

    /// The first faults found, at most [`listed_max`](Store::listed_max).
    pub fn faults(&self) -> &[Fault] {
        &self.faults.listed
    }

    /// Number of faults of each [kind](Fault::kind).
    pub fn fault_counts(&self) -> &BTreeMap<&'static str, u64> {
        &self.faults.counts
    }

    /// Blocks to read in all: those that a cache would serve. 0 while the record tables are being read.
    pub fn blocks(&self) -> u64 {
        self.committed - self.superseded
    }

    /// Blocks read so far.
    pub fn blocks_read(&self) -> u64 {
        self.payloads_good + self.payloads_bad
    }

    /// Of these files, of which nothing was read yet.
    fn new(files: &[ReadOnlyFile], faults: Faults) -> Self {
        Verification {
            paths: files.iter().map(|file| file.path.clone()).collect(),
            faults,
            storage: "none",
            in_use: files.iter().any(|file| file.in_use),
            ..Verification::default()
        }
    }
}

impl Store {
    /// Reads superblocks, record tables and the slot of every block that a cache would serve, and checks all checksums.
    /// Padding and free slots are not read; nothing depends on them.
    ///
    /// `progress` is called after every read with the result so far, and may stop the verification.
    ///
    /// Memory: about 80 bytes per block, and a buffer of at most 1 MiB for each of [`depth`](Self::depth) reads in
    /// flight.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) if the paths are not exactly those of one store, or a cache has it open;
    /// [`Error::Argument`](crate::Error::Argument); [`Error::Io`](crate::Error::Io) if files cannot be opened. Damage
    /// is not an error but part of the result.
    pub fn verify(&self, progress: impl FnMut(&Verification) -> ControlFlow<()> + Send) -> Result<Verification> {
        self.validate()?;
        let options = &self.options;
        match open(&self.paths(), options)? {
            Opened::Store(store) => {
                on_a_runtime(&store, options, async |storage| scrub(&store, storage, options, progress).await)
            }
            Opened::Lost { files, faults: found } => {
                let mut faults = Faults::new(options.listed_max);
                faults.extend(found);
                Ok(Verification { complete: true, ..Verification::new(&files, faults) })
            }
        }
    }
}

async fn scrub<S: Storage>(
    store: &OpenStore,
    storage: &S,
    options: &Options,
    mut progress: impl FnMut(&Verification) -> ControlFlow<()>,
) -> Result<Verification> {
    let started = Instant::now();
    let mut faults = Faults::new(options.listed_max);
    faults.extend(store.faults.iter().cloned());
    let mut report = Verification {
        shape: Some(store.shape.clone()),
        storage: storage.name(),
        direct_io: store.files.iter().all(|file| file.direct),
        ..Verification::new(&store.files, Faults::new(0))
    };
    let mut tables = Tables::new(store, faults, |bytes_read, faults: &mut Faults| {
        report.bytes_read = bytes_read;
        // Lent: there may be a million of them, and this is called for every page.
        mem::swap(&mut report.faults, faults);
        let flow = progress(&report);
        mem::swap(&mut report.faults, faults);
        flow
    });
    tables.read(storage).await?;
    let Tables { mut committed, empty, bad, faults, bytes, stopped, .. } = tables;
    report.committed = committed.len() as u64;
    (report.superseded, report.duplicates) = drop_superseded(&mut committed, options.listed_max);
    (report.empty, report.records_bad, report.bytes_read, report.faults) = (empty, bad, bytes, faults);
    // In slot order, offsets ascend on every member.
    committed.sort_unstable_by_key(|block| block.slot);
    let scrub = Scrub {
        store,
        storage,
        blocks: &committed,
        next: Cell::new(0),
        stopped: Cell::new(stopped),
        report: RefCell::new(report),
        progress: RefCell::new(progress),
    };
    let depth = committed.len().min(options.depth as usize);
    join_all((0..depth).map(|_| scrub.work())).await;
    let complete = !scrub.stopped.get();
    Ok(Verification { elapsed: started.elapsed(), complete, ..scrub.report.into_inner() })
}

/// Keeps the valid record of each key. Returns the number of superseded records, and the first of them.
fn drop_superseded(committed: &mut Vec<Committed>, listed_max: usize) -> (u64, Vec<Duplicate>) {
    group_by_key(committed);
    let (mut count, mut listed) = (0, Vec::new());
    committed.dedup_by(|later, counts| {
        if later.key != counts.key {
            return false;
        }
        count += 1;
        if listed.len() < listed_max {
            listed.push(Duplicate {
                key_prefix: key_prefix(&counts.key),
                slot: counts.slot,
                generation: counts.generation,
                superseded_slot: later.slot,
                superseded_generation: later.generation,
            });
        }
        true
    });
    (count, listed)
}

/// State shared by the workers, all of which one task polls.
struct Scrub<'a, S, F> {
    store: &'a OpenStore,
    storage: &'a S,
    blocks: &'a [Committed],
    next: Cell<usize>,
    stopped: Cell<bool>,
    /// The result so far.
    report: RefCell<Verification>,
    progress: RefCell<F>,
}

impl<S: Storage, F: FnMut(&Verification) -> ControlFlow<()>> Scrub<'_, S, F> {
    /// Checks blocks until none is left.
    async fn work(&self) {
        let mut buffer = None;
        while let Some(block) = self.blocks.get(self.next.replace(self.next.get() + 1)) {
            let Some(outcome) = self.check(block, &mut buffer).await else { break };
            self.count(block, outcome);
            self.report_progress();
        }
    }

    /// Whether the block has the stored payload; `None` once the caller has stopped the verification.
    async fn check(&self, block: &Committed, buffer: &mut Option<AlignedBuf>) -> Option<io::Result<bool>> {
        let stripe = &self.store.stripe;
        let (file, offset) = stripe.locate(block.slot);
        let (slot_bytes, block_bytes) = (stripe.slot_bytes() as usize, stripe.block_bytes() as usize);
        let mut digest = Digest::new();
        for start in (0..slot_bytes).step_by(PIECE_BYTES) {
            if self.stopped.get() {
                return None;
            }
            let len = (slot_bytes - start).min(PIECE_BYTES);
            // Only the last piece of a slot is shorter.
            let piece = buffer.take().filter(|buffer| buffer.len() == len).unwrap_or_else(|| AlignedBuf::zeroed(len));
            let (result, piece) =
                transfer_owned(self.storage, OpKind::Read, file, offset + start as u64, piece.into_io()).await;
            if let Err(error) = result {
                return Some(Err(error));
            }
            digest.update(&piece[..len.min(block_bytes - start)]);
            *buffer = Some(piece);
            self.report.borrow_mut().bytes_read += len as u64;
            if start + len < slot_bytes {
                self.report_progress();
            }
        }
        Some(Ok(digest.finish() == block.checksum))
    }

    fn count(&self, block: &Committed, outcome: io::Result<bool>) {
        let mut report = self.report.borrow_mut();
        let kind = match outcome {
            Ok(true) => {
                report.payloads_good += 1;
                return;
            }
            Ok(false) => FaultKind::Payload,
            Err(error) => FaultKind::PayloadUnreadable { error: error.to_string() },
        };
        let (file, offset) = self.store.stripe.locate(block.slot);
        report.payloads_bad += 1;
        report.faults.add(Fault {
            path: self.store.files[usize::from(file.0)].path.clone(),
            offset,
            slot: Some(block.slot),
            key_prefix: Some(key_prefix(&block.key)),
            kind,
        });
    }

    fn report_progress(&self) {
        if (self.progress.borrow_mut())(&self.report.borrow()).is_break() {
            self.stopped.set(true);
        }
    }
}

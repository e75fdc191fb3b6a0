//! Reads all blocks of a store and checks their checksums.

use std::{
    cell::{Cell, RefCell},
    future::{Future, poll_fn},
    io,
    ops::ControlFlow,
    path::PathBuf,
    pin::Pin,
    task::Poll,
    time::{Duration, Instant},
};

use super::{
    Options, Store,
    engine::on_a_runtime,
    fault::{Fault, FaultKind, Faults, key_prefix},
    open::{OpenStore, Opened, Shape, open},
    tables::{Committed, Tables, group_by_key},
};
use crate::{
    checksum::Digest,
    disk::{ReadOnlyFile, read_tables},
    error::Result,
    io::{Storage, read_into},
    memory::AlignedBuf,
};

/// Bytes per read: a slot is read in pieces, which bounds memory for any block size.
const PIECE_BYTES: usize = 1 << 20;

/// Progress of a verification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Blocks read.
    pub blocks_done: u64,
    /// Blocks to read in all; 0 while the record tables are being read.
    pub blocks: u64,
    /// Bytes read so far.
    pub bytes_read: u64,
    /// Faults found so far.
    pub faults: u64,
}

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
#[derive(Debug, Clone, PartialEq)]
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
    /// All faults found.
    pub faults: Faults,
    /// Bytes read: record tables and slots.
    pub bytes_read: u64,
    /// How long it took.
    pub elapsed: Duration,
    /// The storage engine used.
    pub storage: &'static str,
    /// Whether all paths were read with direct I/O.
    pub direct_io: bool,
    /// Whether a cache had the store open: faults may be blocks that were being written.
    pub in_use: bool,
    /// Whether everything was read; false if the caller stopped early.
    pub complete: bool,
}

impl Verification {
    /// True if everything was read and nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.complete && self.faults.count() == 0
    }

    fn of_a_lost_store(files: &[ReadOnlyFile], faults: Faults) -> Self {
        Verification {
            shape: None,
            paths: files.iter().map(|file| file.path.clone()).collect(),
            committed: 0,
            empty: 0,
            records_bad: 0,
            superseded: 0,
            duplicates: Vec::new(),
            payloads_good: 0,
            payloads_bad: 0,
            faults,
            bytes_read: 0,
            elapsed: Duration::ZERO,
            storage: "none",
            direct_io: false,
            in_use: files.iter().any(|file| file.in_use),
            complete: true,
        }
    }
}

impl Store {
    /// Reads superblocks, record tables and the slot of every block that a cache would serve, and checks all checksums.
    /// Padding and free slots are not read; nothing depends on them.
    ///
    /// `progress` is called after every read, and may stop the verification.
    ///
    /// Memory: about 80 bytes per block, and a buffer of at most 1 MiB for each of [`depth`](Self::depth) reads in
    /// flight.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) if the paths are not exactly those of one store, or a cache has it open;
    /// [`Error::Argument`](crate::Error::Argument); [`Error::Io`](crate::Error::Io) if files cannot be opened. Damage
    /// is not an error but part of the result.
    pub fn verify(&self, progress: impl FnMut(Progress) -> ControlFlow<()> + Send) -> Result<Verification> {
        self.validate()?;
        let options = &self.options;
        match open(&self.paths(), options)? {
            Opened::Store(store) => {
                on_a_runtime(&store, options, async |storage| scrub(&store, storage, options, progress).await)
            }
            Opened::Lost { files, faults: found } => {
                let mut faults = Faults::new(options.listed_max);
                faults.extend(found);
                Ok(Verification::of_a_lost_store(&files, faults))
            }
        }
    }
}

async fn scrub<S: Storage>(
    store: &OpenStore,
    storage: &S,
    options: &Options,
    mut progress: impl FnMut(Progress) -> ControlFlow<()>,
) -> Result<Verification> {
    let started = Instant::now();
    let mut faults = Faults::new(options.listed_max);
    faults.extend(store.faults.iter().cloned());
    let mut tables = Tables::new(store, faults, |bytes_read, faults: &Faults| {
        progress(Progress { blocks_done: 0, blocks: 0, bytes_read, faults: faults.count() })
    });
    read_tables(storage, &store.members(), &store.stripe, &mut tables).await?;
    let Tables { mut committed, empty, bad, faults, bytes, stopped, .. } = tables;
    let committed_count = committed.len() as u64;
    let (superseded, duplicates) = drop_superseded(&mut committed, options.listed_max);
    // In slot order, offsets ascend on every member.
    committed.sort_unstable_by_key(|block| block.slot);
    let tally = Tally { good: 0, bad: 0, bytes_read: bytes, faults };
    let scrub = Scrub {
        store,
        storage,
        blocks: &committed,
        next: Cell::new(0),
        stopped: Cell::new(stopped),
        tally: RefCell::new(tally),
        progress: RefCell::new(progress),
    };
    let depth = committed.len().min(options.depth as usize);
    all((0..depth).map(|_| Box::pin(scrub.work()) as _).collect()).await;
    let complete = !scrub.stopped.get();
    let Tally { good, bad: payloads_bad, bytes_read, faults } = scrub.tally.into_inner();
    Ok(Verification {
        shape: Some(store.shape.clone()),
        paths: store.files.iter().map(|file| file.path.clone()).collect(),
        committed: committed_count,
        empty,
        records_bad: bad,
        superseded,
        duplicates,
        payloads_good: good,
        payloads_bad,
        faults,
        bytes_read,
        elapsed: started.elapsed(),
        storage: storage.name(),
        direct_io: store.files.iter().all(|file| file.direct),
        in_use: store.in_use(),
        complete,
    })
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

struct Tally {
    good: u64,
    bad: u64,
    bytes_read: u64,
    faults: Faults,
}

/// State shared by the workers, all of which one task polls.
struct Scrub<'a, S, F> {
    store: &'a OpenStore,
    storage: &'a S,
    blocks: &'a [Committed],
    next: Cell<usize>,
    stopped: Cell<bool>,
    tally: RefCell<Tally>,
    progress: RefCell<F>,
}

impl<S: Storage, F: FnMut(Progress) -> ControlFlow<()>> Scrub<'_, S, F> {
    /// Checks blocks until none is left.
    async fn work(&self) {
        let mut buffer = None;
        while let Some(block) = self.blocks.get(self.next.replace(self.next.get() + 1)) {
            let Some(outcome) = self.check(block, &mut buffer).await else { break };
            self.count(block, outcome);
            self.report();
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
            let (result, piece) = read_into(self.storage, file, offset + start as u64, piece.into_io()).await;
            if let Err(error) = result {
                return Some(Err(error));
            }
            digest.update(&piece[..len.min(block_bytes - start)]);
            *buffer = Some(piece);
            self.tally.borrow_mut().bytes_read += len as u64;
            if start + len < slot_bytes {
                self.report();
            }
        }
        Some(Ok(digest.finish() == block.checksum))
    }

    fn count(&self, block: &Committed, outcome: io::Result<bool>) {
        let mut tally = self.tally.borrow_mut();
        let kind = match outcome {
            Ok(true) => {
                tally.good += 1;
                return;
            }
            Ok(false) => FaultKind::Payload,
            Err(error) => FaultKind::PayloadUnreadable { error: error.to_string() },
        };
        let (file, offset) = self.store.stripe.locate(block.slot);
        tally.bad += 1;
        tally.faults.add(Fault {
            path: self.store.files[usize::from(file.0)].path.clone(),
            offset,
            slot: Some(block.slot),
            key_prefix: Some(key_prefix(&block.key)),
            kind,
        });
    }

    fn report(&self) {
        let tally = self.tally.borrow();
        let now = Progress {
            blocks_done: tally.good + tally.bad,
            blocks: self.blocks.len() as u64,
            bytes_read: tally.bytes_read,
            faults: tally.faults.count(),
        };
        drop(tally);
        if (self.progress.borrow_mut())(now).is_break() {
            self.stopped.set(true);
        }
    }
}

/// Drives all futures to completion within one task: they share data that is not `Sync`.
async fn all(mut futures: Vec<Pin<Box<dyn Future<Output = ()> + '_>>>) {
    poll_fn(|context| {
        futures.retain_mut(|future| future.as_mut().poll(context).is_pending());
        if futures.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

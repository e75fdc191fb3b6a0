//! Inspects a store: identity, geometry, and use.

use std::collections::BTreeMap;
use std::{ops::ControlFlow, path::PathBuf};

use super::{
    Options, Store,
    engine::on_a_runtime,
    fault::{Fault, FaultKind, Faults},
    open::{OpenStore, Opened, Refused, Shape, open},
    tables::{Tables, group_by_key},
};
use crate::{
    disk::ReadOnlyFile,
    error::{Error, Result},
    io::Storage,
};

/// One file or device of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The file or device.
    pub path: PathBuf,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether it is a block device.
    pub device: bool,
    /// Number of slots.
    pub slots: u32,
    /// Slots that hold a block.
    pub full: u64,
    /// Offset of slot 0.
    pub data_offset: u64,
    /// Sequence number of the superblock; rises with every write of it.
    pub sequence: u64,
}

/// Contents of a store's superblocks and record tables. No payload was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspection {
    /// Contents of the superblocks.
    pub shape: Shape,
    /// The files and devices, in the order in which `disks` must list them.
    pub members: Vec<Member>,
    /// Slots whose record names a block, including [`superseded`](Self::superseded) ones.
    pub full: u64,
    /// Slots without a record.
    pub empty: u64,
    /// Slots whose record is invalid.
    pub bad: u64,
    /// Full slots whose block has a newer copy in another slot; they become free when a cache next opens the store.
    pub superseded: u64,
    /// Blocks without a parent: the first blocks of prefix chains.
    pub roots: u64,
    /// Bytes of the blocks in full slots.
    pub bytes: u64,
    /// Lowest and highest generation.
    pub generations: Option<(u64, u64)>,
    /// The oldest and the latest use, by the index's logical clock.
    pub last_uses: Option<(u64, u64)>,
    /// Whether a cache has the store open.
    pub in_use: bool,
    pub(super) faults: Faults,
}

impl Inspection {
    /// The first faults found, at most [`listed_max`](Store::listed_max).
    pub fn faults(&self) -> &[Fault] {
        &self.faults.listed
    }

    /// Number of faults of each [kind](Fault::kind).
    pub fn fault_counts(&self) -> &BTreeMap<&'static str, u64> {
        &self.faults.counts
    }
}

impl Store {
    /// Reads the superblocks and the record tables, 128 bytes per slot.
    ///
    /// # Errors
    /// [`Error::Store`] if the paths are not exactly those of one store, if the store is too damaged to be opened, or
    /// if a cache has it open; [`Error::Argument`]; [`Error::Io`] if a system call fails.
    pub fn inspect(&self) -> Result<Inspection> {
        self.look().map_err(Error::from)
    }

    /// As [`inspect`](Self::inspect), for a list of stores: an error comes with a word for what it makes of the store,
    /// `damaged`, `unfinished`, `incomplete` or `unreadable`.
    #[doc(hidden)]
    pub fn inspect_or_state(&self) -> Result<Inspection, (&'static str, Error)> {
        self.look().map_err(|Refused { state, error }| (state, error))
    }

    fn look(&self) -> Result<Inspection, Refused> {
        self.validate()?;
        let options = &self.options;
        match open(&self.paths(), options)? {
            Opened::Store(store) => {
                Ok(on_a_runtime(&store, options, async |storage| read(&store, storage, options).await)?)
            }
            Opened::Lost { faults, .. } => {
                let fault = faults.into_iter().find(|fault| fault.kind != FaultKind::SuperblockCopy);
                let fault = fault.expect("a store is lost for a reason");
                Err(Refused { state: "damaged", error: lost(&fault) })
            }
        }
    }
}

/// Why a store cannot be opened, also by a cache.
fn lost(fault: &Fault) -> Error {
    let (found, expected, action) = match fault.kind {
        FaultKind::CutShort { expected } => {
            let found = format!("{} bytes", fault.offset);
            (found, format!("{expected} bytes, as the store was made with"), "restore the whole file")
        }
        FaultKind::Blank => ("an empty file, or one of zeros".into(), "a member of the store".into(), "bring it back"),
        _ => (format!("a damaged store ({fault})"), "one that can be opened".into(), "check the disk"),
    };
    Error::store(&fault.path, found, expected, format!("{action}, or remove the store's files (wipe its devices)"))
}

async fn read<S: Storage>(store: &OpenStore, storage: &S, options: &Options) -> Result<Inspection> {
    let mut faults = Faults::new(options.listed_max);
    faults.extend(store.faults.iter().cloned());
    let mut tables = Tables::new(store, faults, |_, _| ControlFlow::Continue(()));
    tables.read(storage).await?;
    group_by_key(&mut tables.committed);
    let superseded = tables.committed.windows(2).filter(|pair| pair[0].key == pair[1].key).count() as u64;
    let member = |(at, file): (usize, &ReadOnlyFile)| Member {
        path: file.path.clone(),
        bytes: file.bytes,
        device: file.device,
        slots: store.stripe.members()[at].slots,
        full: tables.committed_by_member[at],
        data_offset: store.stripe.members()[at].data_offset,
        sequence: store.superblocks[at].sequence,
    };
    let in_use = store.in_use();
    Ok(Inspection {
        shape: store.shape.clone(),
        members: store.files.iter().enumerate().map(member).collect(),
        full: tables.committed.len() as u64,
        empty: tables.empty,
        bad: tables.bad,
        superseded,
        roots: tables.roots,
        bytes: tables.committed.len() as u64 * store.shape.block_bytes,
        generations: tables.generations.0,
        last_uses: tables.last_uses.0,
        in_use,
        faults: tables.faults,
    })
}

//! Reads the record tables.

use std::{cmp::Reverse, convert::Infallible, ops::ControlFlow, rc::Rc};

use super::{
    fault::{Fault, FaultKind, Faults},
    open::OpenStore,
};
use crate::{
    block::BlockKey,
    disk::{
        PageId, PageVisitor, RecordPages,
        format::{
            PAGE_BYTES, RECORD_BYTES,
            record::{Record, RecordError, written_for},
        },
        read_tables,
    },
    error::Result,
    io::Storage,
};

/// A slot whose record names a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Committed {
    pub key: BlockKey,
    pub slot: u32,
    pub generation: u64,
    pub checksum: u64,
}

/// Smallest and largest value seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Range(pub Option<(u64, u64)>);

impl Range {
    fn add(&mut self, value: u64) {
        let (low, high) = self.0.unwrap_or((value, value));
        self.0 = Some((low.min(value), high.max(value)));
    }
}

/// Visits all record tables of a store.
pub(super) struct Tables<'a, F> {
    store: &'a OpenStore,
    pages: Rc<RecordPages>,
    unreadable: Vec<PageId>,
    /// Called after every page; decides whether to continue.
    go_on: F,
    pub committed: Vec<Committed>,
    pub committed_by_member: Vec<u64>,
    /// Records without a parent.
    pub roots: u64,
    pub empty: u64,
    pub bad: u64,
    pub generations: Range,
    pub last_uses: Range,
    pub faults: Faults,
    pub bytes: u64,
    pub stopped: bool,
}

impl<'a, F: FnMut(u64, &mut Faults) -> ControlFlow<()>> Tables<'a, F> {
    pub fn new(store: &'a OpenStore, faults: Faults, go_on: F) -> Self {
        let members = store.files.len();
        Tables {
            store,
            pages: Rc::new(RecordPages::new(store.stripe.clone(), &store.shape.uuid)),
            unreadable: Vec::new(),
            go_on,
            committed: Vec::new(),
            committed_by_member: vec![0; members],
            roots: 0,
            empty: 0,
            bad: 0,
            generations: Range::default(),
            last_uses: Range::default(),
            faults,
            bytes: 0,
            stopped: false,
        }
    }

    /// Reads the tables until the caller stops it.
    pub async fn read<S: Storage>(&mut self, storage: &S) -> Result<()> {
        let store = self.store;
        read_tables(storage, &store.members(), &store.stripe, async |_, bytes| (None, bytes), self).await
    }

    fn take_in(&mut self, page: PageId, bytes: &[u8; PAGE_BYTES]) {
        let stripe = &self.store.stripe;
        let (file, _, count) = stripe.page_slots(page);
        let (_, page_offset) = stripe.page_location(page);
        // Removed from the list, which therefore never grows beyond the pages of one read.
        if let Some(at) = self.unreadable.iter().position(|&unreadable| unreadable == page) {
            self.unreadable.swap_remove(at);
            self.bad += u64::from(count);
            return self.fault(usize::from(file.0), page_offset, None, FaultKind::RecordsUnreadable);
        }
        self.bytes += PAGE_BYTES as u64;
        let (member, mut offset) = (usize::from(file.0), page_offset);
        let past_end = Rc::clone(&self.pages).decode(page, bytes, |slot, bytes, record| {
            match record {
                Ok(None) => self.empty += 1,
                Ok(Some(record)) => self.enter(member, slot, &record),
                Err(error) => {
                    self.bad += 1;
                    let kind = match error {
                        RecordError::Crc => self.why_crc(bytes),
                        RecordError::Field(field) => FaultKind::RecordField(field),
                    };
                    self.fault(member, offset, Some(slot), kind);
                }
            }
            offset += RECORD_BYTES as u64;
        });
        if let Some(at) = past_end {
            let offset = page_offset + (at * RECORD_BYTES) as u64;
            self.fault(member, offset, None, FaultKind::RecordsPastEnd);
        }
    }

    fn enter(&mut self, member: usize, slot: u32, record: &Record) {
        self.committed_by_member[member] += 1;
        self.roots += u64::from(record.parent.is_none());
        self.generations.add(record.generation);
        self.last_uses.add(record.last_use);
        let (key, generation, checksum) = (record.key, record.generation, record.checksum);
        self.committed.push(Committed { key, slot, generation, checksum });
    }

    /// Distinguishes a misplaced record from a corrupted one.
    fn why_crc(&self, bytes: &[u8; RECORD_BYTES]) -> FaultKind {
        let (member, local) = written_for(&self.store.shape.uuid, bytes);
        let members = self.store.stripe.members();
        match (members.get(usize::from(member)), u32::try_from(local)) {
            (Some(geometry), Ok(local)) if local < geometry.slots => {
                let file = crate::block::FileId(member);
                FaultKind::RecordMisplaced { written_for: self.store.stripe.slot(file, local) }
            }
            _ => FaultKind::RecordCrc,
        }
    }

    fn fault(&mut self, member: usize, offset: u64, slot: Option<u32>, kind: FaultKind) {
        let path = self.store.files[member].path.clone();
        self.faults.add(Fault { path, offset, slot, key_prefix: None, kind });
    }
}

impl<F: FnMut(u64, &mut Faults) -> ControlFlow<()>> PageVisitor for Tables<'_, F> {
    // Unlimited: reading bad disks is the purpose of this pass.
    const UNREADABLE_MAX: u64 = u64::MAX;

    /// This pass is for people, and has no threads.
    type Parsed = Infallible;

    fn unreadable(&mut self, page: PageId) {
        self.unreadable.push(page);
    }

    fn page(&mut self, page: PageId, bytes: &[u8; PAGE_BYTES]) -> ControlFlow<()> {
        self.take_in(page, bytes);
        let flow = (self.go_on)(self.bytes, &mut self.faults);
        self.stopped = flow.is_break();
        flow
    }

    async fn parsed(&mut self, chunk: Infallible) {
        match chunk {}
    }
}

/// Groups records by key, the valid one first: like an opening cache, prefers the newest, and among equally new ones
/// (which no cache writes) the first in the tables. The records arrive in table order.
pub(super) fn group_by_key(committed: &mut [Committed]) {
    committed.sort_by_key(|it| (it.key, Reverse(it.generation)));
}

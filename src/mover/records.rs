//! Writing the record table. Records that share a page and come due together are merged into one
//! write; a page is never written twice at the same time.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    io,
    rc::Rc,
};

use futures_util::future::join_all;
use tokio::sync::oneshot;

use super::{
    Mover,
    results::{is_of_part, worse_of},
};
use crate::{
    block::{BlockKey, IO_ALIGN, OpKind},
    device::CopyEngine,
    disk::PageId,
    error::{Error, Result},
    index::{EntryId, Used},
    io::{Storage, transfer_owned},
    memory::AlignedBuf,
    state::{Locked, blames_disk},
};

/// Pages written at once by `sync`.
const STALE_BATCH: usize = 32;

/// The waiters for a write of a page.
#[derive(Default)]
pub(super) struct Waiters {
    all: Vec<oneshot::Sender<Result<()>>>,
    /// One of them is a store's.
    is_of_store: bool,
}

/// Pages being written, or about to be, and those whose last write failed.
#[derive(Default)]
pub(super) struct RecordPages {
    /// With the waiters for the next write.
    pub(super) written: BTreeMap<PageId, Waiters>,
    failed: BTreeSet<PageId>,
}

impl RecordPages {
    /// Begins a write of the page for its waiters; `None` if there are none, and the page is given up.
    fn begin(&mut self, page: PageId) -> Option<Waiters> {
        let Entry::Occupied(mut waiters) = self.written.entry(page) else { return None };
        if waiters.get().all.is_empty() {
            waiters.remove();
            return None;
        }
        Some(std::mem::take(waiters.get_mut()))
    }

    /// Notes how a write of the page ended. Whether that counts for the health of its disk: a write that fails again
    /// does not unless a store waits for it. Each sync repeats it, also of an idle cache, and one bad place says
    /// nothing of the others.
    fn counts(&mut self, page: PageId, is_of_store: bool, written: &io::Result<()>) -> bool {
        match written {
            Ok(()) => {
                self.failed.remove(&page);
                true
            }
            Err(error) => blames_disk(error) && self.failed.insert(page) || is_of_store,
        }
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Writes the page that holds the record of `slot`; resolves when a write that began after this
    /// call has ended.
    pub(super) async fn write_record(self: &Rc<Self>, slot: u32) -> Result<()> {
        let page = self.shared.lock().disk_slots().page_of(slot);
        self.write_page_for(page, false).await
    }

    /// As [`write_record`](Self::write_record), for a store.
    pub(super) async fn write_page(self: &Rc<Self>, page: PageId) -> Result<()> {
        self.write_page_for(page, true).await
    }

    async fn write_page_for(self: &Rc<Self>, page: PageId, is_of_store: bool) -> Result<()> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut records = self.records.borrow_mut();
            let waiters = records.written.entry(page).or_insert_with(|| {
                let this = Rc::clone(self);
                self.spawn_part(async move { this.serve_page(page).await });
                Waiters::default()
            });
            waiters.all.push(sender);
            waiters.is_of_store |= is_of_store;
        }
        receiver.await.unwrap_or(Err(Error::Closed))
    }

    /// Writes `page` for as long as there are waiters.
    async fn serve_page(&self, page: PageId) {
        let mut buf = AlignedBuf::zeroed(IO_ALIGN);
        loop {
            // Records that come in the same turn get into the same write.
            tokio::task::yield_now().await;
            let Some(Waiters { all, is_of_store }) = self.records.borrow_mut().begin(page) else { return };
            let result;
            (result, buf) = self.write_page_once(page, is_of_store, buf).await;
            for waiter in all {
                drop(waiter.send(result.clone()));
            }
        }
    }

    async fn write_page_once(&self, page: PageId, is_of_store: bool, mut buf: AlignedBuf) -> (Result<()>, AlignedBuf) {
        let (file, offset, unsealed) = {
            let mut state = self.lock();
            let state = &mut *state;
            let index = &state.index;
            let slots = state.disk.as_mut().expect("only a disk tier has records");
            let out: &mut [u8; IO_ALIGN] = buf.first_chunk_mut().expect("the buffer is one page");
            let unsealed = slots.encode_page(page, out, |entry| {
                let id = EntryId::from_u32(entry);
                let Used { last, uses } = index.used(id);
                (index.key(id), index.parent_key(id), last, uses)
            });
            let (file, offset) = slots.stripe().page_location(page);
            (file, offset, unsealed)
        };
        unsealed.seal();
        let (result, buf) = transfer_owned(&self.storage, OpKind::Write, file, offset, buf.into_io()).await;
        self.shared.metrics.record_writes.add(1);
        if self.records.borrow_mut().counts(page, is_of_store, &result) {
            self.shared.account(&self.record_failures, file, OpKind::Write, &result);
        }
        if let Err(source) = result {
            // What is on the medium is older than the index: the page is to be written again.
            self.lock().disk_slots().page_failed(page);
            return (Err(Error::io("write", self.path_of(file), source)), buf);
        }
        // The waiters of the page take the lock next.
        self.written.borrow_mut().push(page);
        (Ok(()), buf)
    }

    /// Locks the state, and notes in it the pages that were written.
    pub(super) fn lock(&self) -> Locked<'_> {
        let mut state = self.shared.lock();
        for page in self.written.borrow_mut().drain(..) {
            state.disk_slots().page_written(page);
        }
        state
    }

    /// Writes the pages whose records name a block that was removed; without a key, all pages that are out of date.
    pub(super) async fn forget_records(self: &Rc<Self>, key: Option<&BlockKey>) -> Result<()> {
        let Some(key) = key else { return self.write_stale_records().await };
        let pages: Vec<_> = match &self.lock().disk {
            Some(slots) => slots.pages_naming(key).collect(),
            None => return Ok(()),
        };
        self.write_pages(&pages).await
    }

    /// Writes the pages that are out of date, and those whose write is in flight: some at a time, in the order of the
    /// table. Until its records are on the medium a page is one or the other, so none is passed over. Returns the
    /// [worse](worse_of) error.
    pub(super) async fn write_stale_records(self: &Rc<Self>) -> Result<()> {
        let (mut from, mut written) = (PageId(0), Ok(()));
        while self.may_write_more(&written) {
            let pages = self.unwritten_pages(from);
            let Some(last) = pages.last() else { break };
            from = PageId(last.0 + 1);
            written = worse_of(written, self.write_pages(&pages).await);
        }
        written
    }

    /// Whether the other pages are written after some came to this: those of a disk that does not take one page are,
    /// until it takes no more blocks.
    fn may_write_more(&self, written: &Result<()>) -> bool {
        written.is_ok() || is_of_part(written) && self.shared.lock().disk_service.writes()
    }

    /// The next pages that are in flight, or out of date.
    fn unwritten_pages(&self, from: PageId) -> Vec<PageId> {
        let mut pages: BTreeSet<PageId> =
            self.records.borrow().written.range(from..).take(STALE_BATCH).map(|(page, _)| *page).collect();
        if let Some(slots) = &self.lock().disk {
            pages.extend(slots.stale_pages(from).take(STALE_BATCH));
        }
        pages.into_iter().take(STALE_BATCH).collect()
    }

    /// Writes pages, also those in flight: an image of before may be another one. Returns the [worse](worse_of) error.
    async fn write_pages(self: &Rc<Self>, pages: &[PageId]) -> Result<()> {
        let mut written = Ok(());
        for batch in pages.chunks(STALE_BATCH) {
            if !self.may_write_more(&written) {
                break;
            }
            let write = |&page| self.within_deadline("the write of records", self.write_page_for(page, false));
            written = join_all(batch.iter().map(write)).await.into_iter().fold(written, worse_of);
        }
        written
    }
}

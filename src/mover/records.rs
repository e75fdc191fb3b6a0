//! Writing the record table. Records that share a page and come due together are merged into one
//! write; a page is never written twice at the same time.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    rc::Rc,
};

use tokio::sync::oneshot;

use super::Mover;
use crate::{
    copy::CopyEngine,
    error::{Error, Result},
    index::EntryId,
    io::{AlignedBuf, IO_ALIGN, Storage, write_full},
    tier::disk::PageId,
};

/// Pages being written, each with those who wait for its next write.
#[derive(Default)]
pub(super) struct RecordPages(BTreeMap<PageId, Vec<oneshot::Sender<Result<()>>>>);

impl RecordPages {
    /// Pages being written.
    #[cfg(feature = "sim")]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Stale pages written at once by `sync`.
const STALE_BATCH: usize = 32;

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Writes the page that holds the record of `slot`; resolves when a write that began after this
    /// call has ended.
    pub(super) async fn write_record(self: &Rc<Self>, slot: u32) -> Result<()> {
        let page = self.shared.lock().disk_slots().page_of(slot);
        self.write_page(page).await
    }

    async fn write_page(self: &Rc<Self>, page: PageId) -> Result<()> {
        let (sender, receiver) = oneshot::channel();
        match self.records.borrow_mut().0.entry(page) {
            Entry::Occupied(mut waiters) => waiters.get_mut().push(sender),
            Entry::Vacant(vacant) => {
                vacant.insert(vec![sender]);
                tokio::task::spawn_local(Rc::clone(self).serve_page(page));
            }
        }
        receiver.await.unwrap_or(Err(Error::Closed))
    }

    /// Writes `page` for as long as somebody asks for it.
    async fn serve_page(self: Rc<Self>, page: PageId) {
        let mut buf = AlignedBuf::zeroed(IO_ALIGN);
        loop {
            // Payloads that completed in the same turn get into the same write.
            tokio::task::yield_now().await;
            let waiters = {
                let mut records = self.records.borrow_mut();
                let waiters = records.0.get_mut(&page).map(std::mem::take).unwrap_or_default();
                if waiters.is_empty() {
                    records.0.remove(&page);
                    return;
                }
                waiters
            };
            let result;
            (result, buf) = self.write_page_once(page, buf).await;
            for waiter in waiters {
                drop(waiter.send(result.clone()));
            }
        }
    }

    async fn write_page_once(&self, page: PageId, mut buf: AlignedBuf) -> (Result<()>, AlignedBuf) {
        let (file, offset) = {
            let mut state = self.shared.lock();
            let state = &mut *state;
            let index = &state.index;
            let slots = state.disk.as_mut().expect("only a disk tier has records");
            let out: &mut [u8; IO_ALIGN] = buf.first_chunk_mut().expect("the buffer is one page");
            slots.encode_page(page, out, |entry| {
                let id = EntryId::from_u32(entry);
                (index.key(id), index.parent_key(id), index.last_use(id))
            });
            slots.page_location(page)
        };
        let (result, lent) = write_full(&self.storage, file, offset, buf.lend()).await;
        let buf = AlignedBuf::from_lent(lent);
        self.shared.metrics.record_writes.add(1);
        if let Err(source) = result {
            // What is on the medium is older than the index: the page is to be written again.
            self.shared.lock().disk_slots().mark_stale(page);
            return (Err(Error::io("write", self.path_of(file), source)), buf);
        }
        (Ok(()), buf)
    }

    /// Writes the pages that say of a slot what is no longer so.
    pub(super) async fn write_stale_records(self: &Rc<Self>) -> Result<()> {
        let stale: Vec<PageId> = match &self.shared.lock().disk {
            Some(slots) => slots.stale_pages().collect(),
            None => return Ok(()),
        };
        for batch in stale.chunks(STALE_BATCH) {
            let writes: Vec<_> = batch
                .iter()
                .map(|page| {
                    let (this, page) = (Rc::clone(self), *page);
                    tokio::task::spawn_local(async move {
                        this.within_deadline("the write of records", this.write_page(page)).await
                    })
                })
                .collect();
            for write in writes {
                write.await.unwrap_or(Err(Error::Closed))?;
            }
        }
        Ok(())
    }
}

//! What `sync` does: every block that is to be on disk is written, then the records, and the files are flushed.

use std::{collections::BTreeSet, io, rc::Rc, time::Duration};

use tokio::sync::oneshot;

use super::{
    Active, Mover,
    results::{is_of_part, worse_of},
    write::DEMOTING_MAX,
};
use crate::{
    block::{BlockKey, FileId, OpKind, Tier},
    device::CopyEngine,
    error::{Error, Result},
    io::Storage,
    memory::Lent,
    state::{Class, Outcome, State},
};

/// Dirty blocks that are listed and put in order in one turn: some tens of microseconds.
const LISTED_AT_ONCE: usize = 64;

/// How often a flush is tried that does not begin, and the pause in between.
const FLUSH_TRIES: u32 = 10;
const FLUSH_PAUSE: Duration = Duration::from_millis(50);

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Writes every block that is dirty, waits for those that are being written, writes the record pages that are out
    /// of date, and flushes the files.
    ///
    /// A refusal of the disk is not among the errors, but with the [refusals](crate::state::refusals).
    pub(super) async fn sync(self: &Rc<Self>) -> Result<()> {
        // Before the dirty blocks: one that is being copied from the device is in flight now, and may be dirty later.
        // Only the keys under this lock: which of them count is looked up under one for each.
        let in_flight: Vec<BlockKey> = self.shared.lock().flights.writes().collect();
        let dirty = match self.shared.config.values_writes() {
            true => self.decide_all().await,
            false => self.each_dirty(|_, key| key).await,
        };
        // One that is among both is waited for twice.
        let mut keys = in_flight.into_iter().chain(dirty);
        let mut transient = None;
        loop {
            let batch = keys.by_ref().take(DEMOTING_MAX as usize);
            let begun: Vec<_> = batch.map(|key| self.begin_sync_write(&key)).collect();
            if begun.is_empty() {
                break;
            }
            for begun in begun {
                let written = match begun {
                    Ok(Some(receiver)) => self.shared.written(receiver).await,
                    Ok(None) => Ok(()),
                    Err(error) => Err(error),
                };
                if let Err(error) = written
                    && (error.is_transient() || matches!(error, Error::Closed))
                {
                    transient = Some(error);
                }
            }
            // All of them may have been written meanwhile.
            crate::io::yield_now().await;
        }
        self.shared.lock().refusals.flush_begins();
        let recorded = self.write_stale_records().await;
        if recorded.is_err() && !is_of_part(&recorded) {
            return recorded;
        }
        // A page that cannot be written does not keep the other blocks from surviving a power cut.
        worse_of(recorded, self.flush().await)?;
        transient.map_or(Ok(()), Err)
    }

    /// What `look` returns for each dirty block, in order. A block that becomes dirty meanwhile may be among them.
    pub(super) async fn each_dirty<T: Ord>(&self, look: impl Fn(&State, BlockKey) -> T) -> BTreeSet<T> {
        let (mut found, mut last) = (BTreeSet::new(), None);
        loop {
            let page: Vec<T> = {
                let state = self.shared.lock();
                let page = state.dirty.after(last, LISTED_AT_ONCE);
                last = page.last().copied();
                page.into_iter().map(|key| look(&state, key)).collect()
            };
            found.extend(page);
            if last.is_none() {
                return found;
            }
            crate::io::yield_now().await;
        }
    }

    /// Starts the write of a dirty block, or joins the one in flight; `None` if there is nothing to wait for.
    fn begin_sync_write(self: &Rc<Self>, key: &BlockKey) -> Result<Option<oneshot::Receiver<Outcome>>> {
        let mut state = self.shared.lock();
        let Some(id) = state.index.find(key) else { return Ok(None) };
        // Of a removed block whose key was stored anew the new one counts, if it is to be written.
        let is_written = state.flights.entry(key, Tier::Disk) == Some(id) || state.flights.is_followed(key);
        if !state.dirty.contains(key) && !is_written {
            return Ok(None);
        }
        // Bounded by the syncs under way.
        let committed = state.begin_write(id, key, Class::Awaited, u32::MAX);
        drop(state);
        Ok(self.begin_committed(committed?))
    }

    /// Makes what the files hold survive a power cut, as far as they let it. An error for good once a flush of one has
    /// failed.
    pub(super) async fn flush(self: &Rc<Self>) -> Result<()> {
        let mut flushed = Ok(());
        for file in (0..).map(FileId).take(self.flushes.len()) {
            if flushed.is_ok() || is_of_part(&flushed) {
                let next = self.within_deadline("a flush of the disk", self.flush_file(file)).await;
                flushed = worse_of(flushed, next);
            }
        }
        flushed
    }

    async fn flush_file(self: &Rc<Self>, file: FileId) -> Result<()> {
        let flush = &self.flushes[usize::from(file.0)];
        // Of all callers that come while a flush is in flight, the first to have its turn flushes for the others.
        let next = flush.begun.get() + 1;
        let turn = flush.turn.acquire().await.expect("never closed");
        if flush.begun.get() < next {
            flush.begun.set(next);
            // It stays taken where the flush panics: nobody passes over what that came to.
            turn.forget();
            let (this, active) = (Rc::clone(self), Active::new(self));
            // A task of its own: its failure counts, even if it has no waiter any more.
            let ended = self.spawn_part(async move {
                let flushed = this.flush_repeatedly(file).await;
                if let Err(source) = &flushed {
                    this.note_failed_flush(file, source);
                }
                this.shared.account(&this.shared.failures, file, OpKind::Sync, &flushed);
                this.flushes[usize::from(file.0)].turn.add_permits(1);
                drop(active);
            });
            // Without a result it has not ended, and the cache does.
            ended.await.ok().flatten().ok_or(Error::Closed)?;
        }
        flush.failed.borrow().clone().map_or(Ok(()), Err)
    }

    /// Notes the failure of a flush, for good.
    fn note_failed_flush(&self, file: FileId, source: &io::Error) {
        let doubt = "what was written before may not survive a power cut, and no later flush can tell";
        let source = io::Error::new(source.kind(), format!("{source}; {doubt}: open the cache anew"));
        let error = Error::io("sync", self.path_of(file), source);
        *self.flushes[usize::from(file.0)].failed.borrow_mut() = Some(error);
    }

    /// Flushes, and again where the flush did not begin.
    async fn flush_repeatedly(&self, file: FileId) -> io::Result<()> {
        let mut tries = 1;
        loop {
            let result = self.storage.transfer(OpKind::Sync, file, 0, Lent::empty()).await;
            match result {
                Err(error) if has_not_begun(&error) && tries < FLUSH_TRIES => {
                    tries += 1;
                    tokio::time::sleep(FLUSH_PAUSE).await;
                }
                result => return result,
            }
        }
    }
}

/// True where a flush did not begin: the ring had no room for it, or the thread that was to make it has ended. `ENOMEM`
/// may be that of a write before it, whose pages the kernel has marked as clean.
fn has_not_begun(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|errno| [libc::EAGAIN, libc::ENOBUFS, libc::EINTR].contains(&errno))
}

//! The ordered end: no new work, finish movements in flight, write dirty blocks, flush. And the end by a defect.

use std::{future::poll_fn, pin::pin, rc::Rc, task::Poll};

use futures_util::{FutureExt, future::select};
use tokio::{sync::mpsc, time::timeout};

use super::{Inbox, Mover, Next};
use crate::{device::CopyEngine, disk::PageId, error::Result, index::EntryId, io::Storage};

/// Record pages whose blocks are looked at under one lock: some tens of microseconds.
const PAGES_PER_LOCK: usize = 16;

/// Number of syncs at the end if each of them passes the deadline.
const SYNCS_MAX: u32 = 8;

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Ends the cache's life on disk. There is no room for commands any more.
    pub(super) async fn drain(self: &Rc<Self>, inbox: &mut Inbox) -> Result<()> {
        self.shared.close();
        let refusals = self.shared.begin_report();
        // A flight or a load that has begun has its movement in flight or in the channel, or its caller is about to
        // send or to submit it, or an I/O thread ends it, which may have sent what is left of it first.
        while self.active.get() > 0 || self.shared.lock().flights.any() || !inbox.urgent.is_empty() {
            let (settled, ended) = (pin!(self.settled.notified()), pin!(self.shared.ended.notified()));
            let mut ended = select(settled, ended);
            let next = poll_fn(|cx| match inbox.poll_next(true, cx) {
                Poll::Pending | Poll::Ready(Next::Command(None)) => ended.poll_unpin(cx).map(|_| Next::Settled),
                next => next,
            });
            match next.await {
                Next::Urgent(request) => self.start_urgent(request),
                Next::Command(command) => command.into_iter().for_each(|command| self.start(command)),
                Next::Settled => {}
            }
        }
        drop_all(&mut inbox.commands).await;
        if self.flushes.is_empty() {
            return Ok(());
        }
        self.close_cufile().await;
        self.mark_used_pages().await;
        let mut result = self.sync().await;
        for _ in 1..SYNCS_MAX {
            self.all_settled().await;
            if !matches!(&result, Err(error) if error.is_transient()) {
                break;
            }
            // The deadline has passed for the writes that the sync waits for, and not for this: they have ended by now,
            // unflushed.
            result = self.sync().await;
        }
        self.all_settled().await;
        result.and_then(|()| refusals.report())
    }

    /// Answers all waiters after a panic of a task, then waits for calls that move blocks to their callers' memory:
    /// they are answered when it is no longer in use, or past the deadline.
    pub(super) async fn end_by_defect(&self) {
        if !self.shared.is_broken() {
            // What operators look at.
            self.shared.retire_disk("a task of the cache has panicked, which is a defect: restart".into());
            self.shared.close();
            let flights = self.shared.lock().flights.finish_all();
            drop(flights);
        }
        drop(timeout(self.shared.deadline(), self.all_settled()).await);
    }

    /// Waits until no movement is under way.
    async fn all_settled(&self) {
        while self.active.get() > 0 {
            self.settled.notified().await;
        }
    }

    /// Marks the record pages of blocks that were used in this run as stale: the next run starts with the use order of
    /// this one. The other pages on the medium have the last uses that the index has.
    async fn mark_used_pages(&self) {
        let pages = self.shared.lock().disk_slots().stripe().pages();
        for first in (0..pages).step_by(PAGES_PER_LOCK) {
            {
                let state = &mut *self.shared.lock();
                let is_used = |entry| state.index.is_used_since_restored(EntryId::from_u32(entry));
                let slots = state.disk.as_mut().expect("only a disk tier has records");
                for page in (first..pages).take(PAGES_PER_LOCK).map(PageId) {
                    if slots.entries_of(page).any(is_used) {
                        slots.mark_stale(page);
                    }
                }
            }
            crate::io::yield_now().await;
        }
    }
}

/// Closes a channel and drops what it has, also what is being sent at this moment: the drop of its receiver leaves that
/// to the last sender.
pub(super) async fn drop_all<T>(receiver: &mut mpsc::UnboundedReceiver<T>) {
    receiver.close();
    while receiver.recv().await.is_some() {}
}

//! The ordered end: no new work, finish movements in flight, write dirty blocks, flush.

use std::rc::Rc;

use tokio::sync::mpsc;

use super::{Mover, Urgent};
use crate::{device::CopyEngine, disk::PageId, error::Result, io::Storage};

/// Number of syncs at the end if each of them passes the deadline.
const SYNCS_MAX: u32 = 8;

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Ends the cache's life on disk. The command channel is closed already.
    pub(super) async fn drain(self: &Rc<Self>, mut urgent: mpsc::UnboundedReceiver<Urgent>) -> Result<()> {
        self.shared.close();
        let refusals = self.shared.begin_report();
        self.shared.give_up_all_unverified();
        // A flight that has begun has its movement in flight or in the channel, or its caller is about to send it, or a
        // caller verifies its block.
        while self.active.get() > 0 || self.shared.lock().flights.len() > 0 {
            tokio::select! {
                biased;
                Some(request) = urgent.recv() => self.start_urgent(request),
                () = self.settled.notified() => {}
                () = self.shared.verified.notified() => {}
            }
        }
        if self.files.is_empty() {
            return Ok(());
        }
        self.close_direct().await;
        // The next run starts with the use order of this one.
        if let Some(slots) = &mut self.shared.lock().disk {
            for page in 0..slots.stripe().pages() {
                slots.mark_stale(PageId(page));
            }
        }
        let mut result = self.sync().await;
        for _ in 1..SYNCS_MAX {
            while self.active.get() > 0 {
                self.settled.notified().await;
            }
            if !matches!(&result, Err(error) if error.is_transient()) {
                break;
            }
            // The deadline has passed for the writes that the sync waits for, and not for this: they have ended by now,
            // unflushed.
            result = self.sync().await;
        }
        while self.active.get() > 0 {
            self.settled.notified().await;
        }
        result.and_then(|()| refusals.report())
    }
}

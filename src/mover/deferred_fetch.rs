//! Fetches whose callers found the lock taken. Its holder looks the block up for them, and begins its read.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::submit::{Begun, Submitter};
use crate::{
    block::{BlockKey, Route, Tier},
    error::{Error, Result},
    index::EntryId,
    state::{Class, DeferredWork, Locked, LookedUp, Outcome},
};

/// What the holder of the lock found, with the movement that has begun, from which tier. Without one the caller looks
/// the block up itself.
type FoundFor = LookedUp<Option<(Tier, Begun)>>;

/// A fetch of a block to host memory, for the holder of the lock.
struct DeferredFetch {
    submitter: Arc<Submitter>,
    key: BlockKey,
    /// `None` once a movement has it, or it is answered.
    waiter: Option<oneshot::Sender<Outcome>>,
    /// The result of the look-up, without a waiter that a movement has.
    found: Option<Result<FoundFor>>,
}

impl Submitter {
    /// Has the holder of the lock look up a block for a fetch to host memory. `None` if the caller is to look it up
    /// itself: no I/O thread reads for it, or it may have to join a movement, to ask the remote tier, or to wait for
    /// room.
    pub(crate) async fn defer_fetch(self: &Arc<Self>, key: &BlockKey) -> Option<Outcome> {
        self.pool.as_ref()?;
        let (waiter, answer) = oneshot::channel();
        let fetch = DeferredFetch { submitter: Arc::clone(self), key: *key, waiter: Some(waiter), found: None };
        self.ends.shared.run_or_defer(fetch);
        match answer.await {
            Ok(outcome) => Some(outcome),
            Err(_) if self.ends.shared.is_broken() => Some(Err(Error::Closed)),
            Err(_) => None,
        }
    }
}

impl DeferredWork for DeferredFetch {
    fn key(&self) -> Option<&BlockKey> {
        Some(&self.key)
    }

    fn run(&mut self, state: &mut Locked<'_>) {
        let (key, submitter) = (&self.key, &*self.submitter);
        // Its caller may be gone.
        if self.waiter.as_ref().is_none_or(oneshot::Sender::is_closed) {
            return;
        }
        let rooms = &submitter.ends.shared.commands;
        let begin = |state: &mut Locked<'_>, id: EntryId, waiter| {
            let (found, requested) = ((key, id), (Tier::Host, Class::Awaited));
            let room = || rooms.try_take().ok();
            submitter.begin(state, found, requested, waiter, room)
        };
        self.found = Some(state.look_up_for(key, &mut self.waiter, rooms.any(), begin));
    }

    fn answer(&mut self) {
        let shared = &self.submitter.ends.shared;
        let outcome = match self.found.take() {
            Some(Ok(LookedUp::Hit(counted))) => {
                shared.metrics.export_hit(Tier::Host, Route::HostHit);
                Ok(Some(shared.leased(Tier::Host, counted)))
            }
            Some(Ok(LookedUp::NoHit(Some((source, begun))))) => {
                shared.metrics.look_ups(Some(source)).export(1);
                return self.submitter.hand_on(begun, &self.key, Tier::Host);
            }
            Some(Ok(LookedUp::Nowhere)) => {
                shared.metrics.misses.export(1);
                Ok(None)
            }
            Some(Err(error)) => Err(error),
            Some(Ok(LookedUp::NoHit(None))) | None => return,
        };
        if let Some(waiter) = self.waiter.take() {
            drop(waiter.send(outcome));
        }
    }
}

//! The way of a fetch whose block was not found at once.

use super::Cache;
use crate::{
    block::{BlockKey, Tier},
    error::{Error, Result},
    index::EntryId,
    mover::{Begun, Urgent},
    shield::shield,
    state::{Class, Locked, LookedUp, Outcome, Pin, Promotion, Use},
};

impl Cache {
    /// Fetches a block to host memory for a caller that found the lock taken: by the holder of the lock, if that can.
    pub(super) async fn fetch_deferred(&self, key: &BlockKey) -> Outcome {
        match shield(self.inner.submitter.defer_fetch(key)).await {
            Some(outcome) => outcome.inspect(|pin| self.write_if_pinned(pin.as_ref(), key)),
            None => self.fetch_waiting(key, Tier::Host).await,
        }
    }

    /// Fetches a block to a tier; waits for the lock.
    pub(super) async fn fetch_waiting(&self, key: &BlockKey, tier: Tier) -> Outcome {
        let asked = match self.inner.shared.look_up(key, tier, self.inner.shared.guard())? {
            LookedUp::Hit(pin) => {
                self.write_if_selected(key);
                return Ok(Some(self.inner.shared.leased(tier, pin)));
            }
            LookedUp::NoHit((state, id)) => self.promote_missing(state, (key, id), tier)?,
            LookedUp::Nowhere => return Ok(None),
        };
        self.pin_promoted(asked, key, tier).await
    }

    /// Begins the promotion of a block that is not resident in `tier`, for its caller.
    #[inline(never)]
    pub(super) fn promote_missing(
        &self,
        state: Locked<'_>,
        (key, id): (&BlockKey, Option<EntryId>),
        tier: Tier,
    ) -> Result<Option<Promotion<Begun>>> {
        let room = || self.shared().commands.try_take().ok();
        let begin = |state: &mut Locked<'_>, id, waiter| {
            self.inner.submitter.begin(state, (key, id), (tier, Class::Awaited), waiter, room)
        };
        self.inner.shared.promote_missing(state, (key, id), tier, begin)
    }

    /// Pins a block in `tier` for its caller, once it has come from elsewhere: where nothing was asked for, from the
    /// remote tier.
    pub(super) async fn pin_promoted(&self, asked: Option<Promotion<Begun>>, key: &BlockKey, tier: Tier) -> Outcome {
        let usage = match &asked {
            Some(_) => Use::Counted,
            None => self.shared().bring(key, Use::Now).await?,
        };
        let pin = shield(self.promote(key, tier, (asked, usage))).await?;
        self.write_if_pinned(pin.as_ref(), key);
        Ok(pin)
    }

    /// Reads a block that the disk has from an earlier run to host memory. One that was cut off is given up.
    pub(super) async fn prove(&self, key: &BlockKey) -> Result<()> {
        shield(self.promote(key, Tier::Host, (None, Use::Counted))).await.map(drop)
    }

    /// Promotes a block, or waits for its promotion, which was asked for. Counts the use that the other half says.
    async fn promote(
        &self,
        key: &BlockKey,
        tier: Tier,
        (mut asked, mut usage): (Option<Promotion<Begun>>, Use),
    ) -> Outcome {
        let (shared, submitter) = (&self.inner.shared, &self.inner.submitter);
        loop {
            let promotion = match asked.take() {
                Some(Promotion::NotStarted) | None => {
                    let room = self.room().await?;
                    // What is not used is dropped after the unlock: it wakes the next caller.
                    let mut room = Some(room);
                    let begin = |state: &mut Locked<'_>, id, waiter| {
                        submitter.begin(state, (key, id), (tier, Class::Awaited), waiter, || room.take())
                    };
                    let requested = (Class::Awaited, usage);
                    let (promotion, source) = shared.lock().promote(key, tier, requested, begin)?;
                    if std::mem::replace(&mut usage, Use::Counted) == Use::Now {
                        shared.metrics.looked_up(source);
                    }
                    promotion
                }
                Some(asked) => asked,
            };
            let (receiver, joined) = match promotion {
                Promotion::Hit(pin) => return Ok(Some(pin)),
                Promotion::Miss | Promotion::NotStarted => return Ok(None),
                Promotion::Joined(receiver) => (receiver, true),
                Promotion::Started(receiver, begun) => {
                    submitter.hand_on(begun, key, tier);
                    (receiver, false)
                }
            };
            match receiver.await.unwrap_or(Err(Error::Closed)) {
                // The movement may have begun before the block was removed and stored anew: its miss is not ours.
                Ok(None) if joined => {}
                outcome => return outcome,
            }
        }
    }

    fn write_if_pinned(&self, pin: Option<&Pin>, key: &BlockKey) {
        if pin.is_some() {
            self.write_if_selected(key);
        }
    }

    /// Begins the write of a block that was used, if its uses decide on that.
    #[inline]
    pub(super) fn write_if_selected(&self, key: &BlockKey) {
        if self.config().selects_for_disk()
            && let Some(write) = self.inner.shared.selected_for_disk(key)
        {
            // Closing: the flight ends with the reactor.
            drop(self.send_urgent(Urgent::Write(write)));
        }
    }
}

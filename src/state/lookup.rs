//! Where a block is: looking it up, asking for its promotion, removing it.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{Class, Locked, NoWait, Outcome, Pin, Shared, State, spare};
use crate::{
    block::{BlockKey, Route, Tier},
    error::Result,
    index::EntryId,
    sync::MutexGuard,
};

/// The result of a look-up. Small: it is made for each hit.
pub(crate) enum LookedUp<N> {
    /// Resident in the wanted tier, and now pinned there, for an [owner](Shared::leased) to be made of it. Counted.
    Hit(CountedPin),
    /// Not resident there, and not counted yet.
    NoHit(N),
    /// No entry has it, and the remote tier does not offer it. Counted as a miss.
    Nowhere,
}

/// A pin of the entry in a slot, counted in the index and as a lease.
#[must_use = "without an owner nobody ends it"]
pub(crate) struct CountedPin {
    id: EntryId,
    slot: u32,
}

/// A block that is resident no more.
#[derive(Default)]
pub(crate) struct Removed {
    /// It was resident until now.
    pub(crate) resident: bool,
    /// Receives the end of its write in flight.
    pub(crate) writing: Option<oneshot::Receiver<Outcome>>,
}

/// How a request for a promotion counts as a use of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// A caller uses the block.
    Now,
    /// A caller prefetches the block, to use it later.
    Announced,
    /// The use was counted before, or the request is a step of another movement.
    Counted,
}

/// The result of a request for a promotion.
pub(crate) enum Promotion<P, R = oneshot::Receiver<Outcome>> {
    /// Resident in the wanted tier, and now pinned there.
    Hit(Pin),
    /// Resident nowhere.
    Miss,
    /// A movement was in flight; the receiver gets its outcome.
    Joined(oneshot::Receiver<Outcome>),
    /// A movement has begun, which the caller hands on; the receiver gets its outcome.
    Started(R, P),
    /// The movement did not begin.
    NotStarted,
}

/// How a block is served from the tier that it was wanted in.
#[inline]
fn hit_route(tier: Tier) -> Route {
    if tier == Tier::Device { Route::DeviceHit } else { Route::HostHit }
}

impl Shared {
    /// Looks `key` up for a fetch, and pins it in `tier` if it is resident there. Counts the use and the hit,
    /// or the miss. A block that is not resident there comes with the lock, and its entry if it has one.
    #[inline(always)] // each hit pays for it
    pub(crate) fn look_up<'a>(
        self: &'a Arc<Self>,
        key: &BlockKey,
        tier: Tier,
        guard: MutexGuard<'a, State>,
    ) -> Result<LookedUp<(Locked<'a>, Option<EntryId>)>> {
        let counted = {
            let mut state = self.locked(guard);
            match state.find_used(key, tier)? {
                LookedUp::Hit(counted) => Some(counted),
                LookedUp::NoHit(id) => return Ok(LookedUp::NoHit((state, id))),
                LookedUp::Nowhere => None,
            }
            // The lock ends here without a move, which would take as long as the lock.
        };
        let Some(counted) = counted else {
            self.metrics.misses.export(1);
            return Ok(LookedUp::Nowhere);
        };
        self.metrics.export_hit(tier, hit_route(tier));
        Ok(LookedUp::Hit(counted))
    }

    /// The owner of a pin that a look-up in `tier` has counted: made where it stays.
    #[inline(always)] // each hit pays for it
    pub(crate) fn leased(self: &Arc<Self>, tier: Tier, CountedPin { id, slot }: CountedPin) -> Pin {
        Pin { shared: Some(Arc::clone(self)), id, tier, slot, route: hit_route(tier), is_leased: true }
    }

    /// Begins the promotion of a block that [was looked up](Self::look_up) and is not resident in `tier`, as
    /// [`promote`](Locked::promote) does. Counts the use, and the hit of the tier that has it, or the miss. `None` if
    /// it is resident nowhere, and offered by the remote tier; then nothing is counted yet.
    #[inline(never)]
    pub(crate) fn promote_missing<P>(
        self: &Arc<Self>,
        mut state: Locked<'_>,
        (key, id): (&BlockKey, Option<EntryId>),
        tier: Tier,
        begin: impl FnOnce(&mut Locked<'_>, EntryId, oneshot::Sender<Outcome>) -> Option<P>,
    ) -> Result<Option<Promotion<P>>> {
        let Some(id) = id else { return Ok(self.miss(state, key)) };
        let source = state.served_tier(id);
        let requested = (Class::Awaited, Use::Now);
        let promotion = state.promote_found((key, id), source, tier, requested, spare::take, begin)?;
        if matches!(promotion, Promotion::Miss) {
            return Ok(self.miss(state, key));
        }
        let counted = self.metrics.look_ups(source);
        counted.add_locked(1, &mut state);
        drop(state);
        counted.export(1);
        spare::make();
        Ok(Some(promotion))
    }

    /// Looks `key` up for a lease of a block that is in host memory already. Where it comes from elsewhere nothing is
    /// counted.
    pub(crate) fn look_up_host(self: &Arc<Self>, key: &BlockKey) -> Result<Option<Pin>> {
        match self.look_up(key, Tier::Host, self.guard())? {
            LookedUp::Hit(counted) => return Ok(Some(self.leased(Tier::Host, counted))),
            LookedUp::NoHit((state, id)) => {
                let is_coming = || state.flights.contains(key, Tier::Host);
                if !id.is_some_and(|id| state.served_tier(id).is_some() || is_coming()) {
                    self.miss::<()>(state, key);
                }
            }
            LookedUp::Nowhere => {}
        }
        Ok(None)
    }

    /// True if the remote tier offers the block.
    #[inline]
    pub(crate) fn is_offered(&self, key: &BlockKey) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.offers(key))
    }

    /// Counts a miss, unless the remote tier offers the block: `None` then.
    fn miss<P>(&self, mut state: Locked<'_>, key: &BlockKey) -> Option<Promotion<P>> {
        if self.is_offered(key) {
            return None;
        }
        self.metrics.misses.add_locked(1, &mut state);
        drop(state);
        self.metrics.misses.export(1);
        Some(Promotion::Miss)
    }

    /// Forgets `key`. Pinned copies stay until their last reader is done.
    ///
    /// Returns an error if its write is overdue: the block is forgotten, but its record may still be written.
    pub(crate) fn remove(self: &Arc<Self>, key: &BlockKey) -> Result<Removed> {
        let mut state = self.lock();
        state.check_open()?;
        let mut removed = Removed::default();
        // A block that was written from a caller's memory and refused has an entry there, and none in the index.
        state.refusals.forget(key);
        if let Some(id) = state.index.find(key)
            && (state.index.best_tier(id).is_some() || Tier::ALL.iter().any(|&tier| state.index.is_filling(id, tier)))
        {
            // A block that is still being written from a caller's memory was never visible.
            removed.resident = state.index.best_tier(id).is_some();
            state.dirty.remove(key);
            if let Some(slot) = state.index.slot(id, Tier::Disk) {
                // The record must go now, although readers may hold the slot longer.
                state.disk_slots().clear(slot, key);
            }
            for (tier, slot) in Tier::ALL.into_iter().zip(state.index.remove(id)) {
                slot.into_iter().for_each(|slot| state.push_free(tier, slot));
            }
        }
        // Bounded by the removals in flight, each of which has a caller.
        match state.join(key, Tier::Disk, Class::Awaited, u32::MAX) {
            Ok(receiver) => removed.writing = Some(receiver),
            Err(NoWait::Overdue) => {
                drop(state);
                return Err(self.timeout("a write of the removed block that is overdue"));
            }
            Err(NoWait::Absent | NoWait::Full) => {}
        }
        Ok(removed)
    }

    /// True if a record on disk may still name `key`, a removed block.
    pub(crate) fn may_be_recorded(self: &Arc<Self>, key: &BlockKey) -> bool {
        self.lock().disk.as_ref().is_some_and(|slots| slots.pages_naming(key).next().is_some())
    }
}

impl Locked<'_> {
    /// Counts the hit and the lease of a caller whose pin is counted.
    #[inline(always)] // each hit pays for it
    fn count_hit(&mut self, id: EntryId, tier: Tier) {
        self.reconsider(id);
        let shared = self.shared();
        shared.leases[tier as usize].add_locked(1, self);
        shared.metrics.hit_locked(tier, hit_route(tier), self);
    }

    /// Counts a use of a block by a caller.
    pub(crate) fn count_use(&mut self, id: EntryId) {
        self.index.touch(id);
        self.index.hit(id);
        self.reconsider(id);
    }

    /// Looks `key` up for a fetch to `tier`, and pins it if it is resident there. Counts the use, the hit and the
    /// lease, or the miss.
    #[inline(always)] // each hit pays for it
    fn find_used(&mut self, key: &BlockKey, tier: Tier) -> Result<LookedUp<Option<EntryId>>> {
        self.check_open()?;
        self.check_device(tier)?;
        let (id, shared) = (self.index.find(key), self.shared());
        if let Some((id, slot)) = id.and_then(|id| Some((id, self.index.pin_used(id, tier)?))) {
            self.count_hit(id, tier);
            return Ok(LookedUp::Hit(CountedPin { id, slot }));
        }
        if id.is_some() || shared.is_offered(key) {
            return Ok(LookedUp::NoHit(id));
        }
        shared.metrics.misses.add_locked(1, self);
        Ok(LookedUp::Nowhere)
    }

    /// Looks `key` up for a fetch to host memory of a caller that did not wait for the lock, and has `begin` begin the
    /// movement of a block that is elsewhere, which takes the waiter, if there `is_room` for one. Counts the use, and
    /// the hit or the miss. A movement that has begun comes with its source; without one, the caller looks the block up
    /// itself, and nothing is counted.
    pub(crate) fn look_up_for<P>(
        &mut self,
        key: &BlockKey,
        waiter: &mut Option<oneshot::Sender<Outcome>>,
        is_room: bool,
        begin: impl FnOnce(&mut Self, EntryId, oneshot::Sender<Outcome>) -> Option<P>,
    ) -> Result<LookedUp<Option<(Tier, P)>>> {
        let id = match self.find_used(key, Tier::Host)? {
            LookedUp::Hit(counted) => return Ok(LookedUp::Hit(counted)),
            LookedUp::NoHit(id) => id,
            LookedUp::Nowhere => return Ok(LookedUp::Nowhere),
        };
        // Who joins a movement may have to look again after it.
        let id = id.filter(|_| is_room && !self.flights.contains(key, Tier::Host));
        let Some((id, source)) = id.and_then(|id| Some((id, self.served_tier(id)?))) else {
            return Ok(LookedUp::NoHit(None));
        };
        let requested = (Class::Awaited, Use::Now);
        let channel = || (waiter.take().expect("no other movement has it"), ());
        match self.promote_found((key, id), Some(source), Tier::Host, requested, channel, begin)? {
            Promotion::Started((), begun) => {
                self.shared().metrics.look_ups(Some(source)).add_locked(1, self);
                Ok(LookedUp::NoHit(Some((source, begun))))
            }
            // The last room for a command went meanwhile, or the channel closed. The use counts once more when the
            // caller asks again.
            _ => Ok(LookedUp::NoHit(None)),
        }
    }

    /// Joins the movement that makes `key` resident in `tier`, or has `begin` begin its flight with this waiter, unless
    /// that has no room for it; also says where the block was found. Counts no hit and no miss: this may be one step of
    /// a larger movement. Counts the use that `usage` says.
    pub(crate) fn promote<P>(
        &mut self,
        key: &BlockKey,
        tier: Tier,
        requested: (Class, Use),
        begin: impl FnOnce(&mut Self, EntryId, oneshot::Sender<Outcome>) -> Option<P>,
    ) -> Result<(Promotion<P>, Option<Tier>)> {
        self.check_open()?;
        self.check_device(tier)?;
        let Some(id) = self.index.find(key) else { return Ok((Promotion::Miss, None)) };
        let source = self.served_tier(id);
        let promotion = self.promote_found((key, id), source, tier, requested, spare::take, begin)?;
        let source = if matches!(promotion, Promotion::Hit(_)) { Some(tier) } else { source };
        Ok((promotion, source))
    }

    /// As [`promote`](Self::promote), of the block of an entry, with the waiter of `channel`. `source` is its fastest
    /// tier in service.
    fn promote_found<P, R>(
        &mut self,
        (key, id): (&BlockKey, EntryId),
        source: Option<Tier>,
        tier: Tier,
        (class, usage): (Class, Use),
        channel: impl FnOnce() -> (oneshot::Sender<Outcome>, R),
        begin: impl FnOnce(&mut Self, EntryId, oneshot::Sender<Outcome>) -> Option<P>,
    ) -> Result<Promotion<P, R>> {
        self.prefetch(id);
        if source.is_some() {
            match usage {
                Use::Now => self.count_use(id),
                Use::Announced => self.index.announce(id),
                Use::Counted => {}
            }
        }
        let route = hit_route(tier);
        if let Some(pin) = self.pin(id, tier, route) {
            return Ok(Promotion::Hit(pin));
        }
        let waiters_max = self.shared().config.limits.waiters_max;
        match self.join(key, tier, class, waiters_max) {
            Ok(receiver) => return Ok(Promotion::Joined(receiver)),
            Err(NoWait::Absent) if source.is_none() => return Ok(Promotion::Miss),
            Err(NoWait::Absent) => {}
            Err(why) => return Err(self.refused_waiter(why, waiters_max)),
        }
        let (sender, receiver) = channel();
        Ok(begin(self, id, sender).map_or(Promotion::NotStarted, |begun| Promotion::Started(receiver, begun)))
    }
}

impl State {
    /// Tells the processor what a movement of the block changes.
    #[inline]
    pub(super) fn prefetch(&self, id: EntryId) {
        self.index.prefetch_around(id);
        if let (Some(slots), Some(slot)) = (&self.disk, self.index.slot(id, Tier::Disk)) {
            slots.prefetch(slot);
        }
    }

    /// The fastest tier in service that has the block: what a fetch of it finds.
    #[inline]
    pub(crate) fn served_tier(&self, id: EntryId) -> Option<Tier> {
        let best = self.index.best_tier(id)?;
        if self.reads_from(best) {
            return Some(best);
        }
        Tier::ALL.into_iter().find(|&tier| self.reads_from(tier) && self.index.slot(id, tier).is_some())
    }

    /// Which tiers in service have the block.
    pub(crate) fn held(&self, id: EntryId) -> [bool; Tier::COUNT] {
        Tier::ALL.map(|tier| self.reads_from(tier) && self.index.slot(id, tier).is_some())
    }

    /// True if a tier in service has the block of `key`; `best` is the fastest of all.
    pub(crate) fn serves(&self, key: &BlockKey, best: Tier) -> bool {
        self.reads_from(best) || self.index.find(key).is_some_and(|id| self.served_tier(id).is_some())
    }

    /// The fastest tier in service of each of the leading `keys`, up to the first that none has.
    pub(super) fn match_served(&self, keys: &[BlockKey]) -> impl Iterator<Item = Tier> {
        keys.iter().map_while(|key| self.served_tier(self.index.find(key)?))
    }

    #[inline]
    pub(crate) fn reads_from(&self, tier: Tier) -> bool {
        match tier {
            Tier::Device => self.device_service.reads(),
            Tier::Host => true,
            Tier::Disk => self.disk_service.reads(),
            Tier::Remote => false,
        }
    }
}

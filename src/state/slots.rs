//! Taking slots, and the requests that wait for one: first come, first served, awaited requests before others.

use std::sync::{Arc, atomic::Ordering};

use tokio::sync::oneshot;

use super::{Class, Filling, KEPT_PART, Locked, Shared, State, requests::Request};
use crate::{
    block::{BlockKey, Tier},
    error::{Error, HeldSlots, Result},
    index::EntryId,
    shield::{log, shield},
    urgency::Urgency,
};

/// What a slot or a share of the budget is for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Purpose<'a> {
    /// A call whose caller waits for this step of it.
    Call,
    /// A step of the movement of this block to this tier, whose flight has begun.
    Movement(&'a BlockKey, Tier),
    /// The first step of a movement of this class, whose flight begins if all that it needs is to be had.
    NewMovement(Class),
}

/// A slot granted to a request, sent after the unlock.
pub(crate) struct Grant {
    tier: Tier,
    slot: u32,
    request: Request,
}

impl Grant {
    /// Gives the slot to the request, or back if the request is gone. Wakes a caller, so call it without the lock.
    pub(crate) fn send(self, shared: &Arc<Shared>) {
        if let Err(Ok(slot)) = self.request.answer.send(Ok(self.slot))
            && let Some(mut state) = shared.lock_unless_broken()
        {
            state.push_free(self.tier, slot);
        }
    }
}

impl State {
    /// True if a request waits for a slot of `tier`.
    #[inline]
    pub(crate) fn has_waiters(&self, tier: Tier) -> bool {
        self.slot_requests[tier as usize].len() > 0
    }

    /// An error after the close: readers may hold host and device slots for ever. But disk slots become free as
    /// movements end, and a movement that [leads to a write](Self::leads_to_write) is the last write-back's.
    fn check_may_wait(&self, tier: Tier, purpose: Purpose) -> Result<()> {
        match purpose {
            _ if tier == Tier::Disk => Ok(()),
            Purpose::Movement(key, to) if self.leads_to_write(key, to) => Ok(()),
            _ => self.check_open(),
        }
    }

    /// Whether a write to disk follows the movement: a close is to bring about that too. A block that libcufile could
    /// not write is none of these: its way through host memory begins anew, which a close refuses.
    pub(super) fn leads_to_write(&self, key: &BlockKey, to: Tier) -> bool {
        to == Tier::Host && self.flights.is_followed(key) && self.disk_service.writes()
    }

    /// Marks a movement as awaited.
    pub(crate) fn raise(&mut self, key: &BlockKey, tier: Tier) {
        // A block that only the device holds is written by way of host memory.
        let tiers: &[Tier] = if tier == Tier::Disk { &[Tier::Disk, Tier::Host] } else { &[tier] };
        for &tier in tiers {
            let Some(number) = self.flights.raise(key, tier) else { continue };
            self.slot_requests.iter_mut().for_each(|queue| queue.raise(number));
            self.raised.flights.push(number);
            self.raise_holders();
        }
    }

    /// How urgent a step of a movement is that holds a host slot: awaited also while a caller waits for a host slot,
    /// which may be this one.
    pub(crate) fn holder_urgency(&self, purpose: Purpose) -> Urgency {
        if !self.slot_requests[Tier::Host as usize].awaited.is_empty() {
            return Urgency::Awaited;
        }
        self.urgency(purpose)
    }

    /// How urgent a step of the movement of this number is, which holds a host slot and had no waiter.
    pub(crate) fn urgency_by_now(&self, number: u64) -> Urgency {
        match self.slot_requests[Tier::Host as usize].awaited.is_empty() {
            true => self.flights.urgency_of(number),
            false => Urgency::Awaited,
        }
    }

    fn urgency(&self, purpose: Purpose) -> Urgency {
        match purpose {
            Purpose::Call => Urgency::Awaited,
            Purpose::Movement(key, tier) => self.flights.urgency(key, tier),
            Purpose::NewMovement(Class::Awaited) => Urgency::Awaited,
            // Its flight has no number yet.
            Purpose::NewMovement(_) => Urgency::Background(0),
        }
    }

    /// While a caller waits for a host slot, every movement that holds one is awaited.
    fn raise_holders(&mut self) {
        let [_, host, disk] = &mut self.slot_requests;
        if !host.awaited.is_empty() {
            disk.awaited.append(&mut disk.background);
            self.raised.holders = true;
        }
    }
}

impl Shared {
    /// Takes a free slot of `tier`, or that of the coldest evictable block. If there is neither, waits behind earlier
    /// requests, up to the deadline. Cancel safe.
    pub(crate) async fn acquire(self: &Arc<Self>, tier: Tier, purpose: Purpose<'_>) -> Result<Filling> {
        let waiting = {
            let mut state = self.lock();
            state.check_service(tier)?;
            let urgency = match tier {
                Tier::Disk => state.holder_urgency(purpose),
                _ => state.urgency(purpose),
            };
            if let Some(slot) = state.take_slot(tier) {
                return Ok(Filling::new(self, tier, slot));
            }
            state.check_may_wait(tier, purpose)?;
            if state.slot_requests[tier as usize].len() >= self.config.limits.waiters_max as usize {
                let waiters_max = u64::from(self.config.limits.waiters_max);
                return Err(state.busy("waiters for a slot", waiters_max, "waiters_max"));
            }
            let waiting = SlotWait::begin(&mut state, tier, purpose, urgency);
            if tier == Tier::Host && state.spares_released() {
                state.ask_for_write_back();
            }
            waiting
        };
        self.watch.notify_one();
        shield(waiting.wait()).await
    }

    /// A host slot for a caller; an error once the cache is closed, when nothing can be stored from it.
    pub(crate) async fn acquire_for_caller(self: &Arc<Self>) -> Result<Filling> {
        self.lock().check_open()?;
        let filling = self.acquire(Tier::Host, Purpose::Call).await?;
        let open = self.lock().check_open();
        open.map(|()| filling)
    }

    /// Host slots that are not parked.
    pub(crate) fn host_slots(&self) -> u32 {
        self.config.host_slots() - self.parked.load(Ordering::Relaxed)
    }

    /// Takes up to `slots` host slots out of use, free ones and those of the coldest blocks, as far as they are
    /// available at once, and gives their memory to the system. They are back in use when they are dropped
    /// ([`unpark`](Self::unpark)). Only for a cache that may ([`HostConfig::parks`](crate::config::HostConfig)).
    pub(crate) fn park(self: &Arc<Self>, slots: usize) -> Vec<Filling> {
        assert!(self.config.host.parks, "the memory of the host tier may be registered");
        let mut parked = Vec::new();
        for filling in std::iter::from_fn(|| self.lock().acquire(Tier::Host)).take(slots) {
            // SAFETY: a filling owns its slot, nothing is in flight on it, and `parks` keeps the arena unregistered.
            if let Err(error) = unsafe { self.arena.discard(filling.slot()) } {
                log(|| tracing::warn!(%error, "the memory of a parked slot stays"));
            }
            parked.push(filling);
        }
        self.lock().count_parked(parked.len(), true);
        parked
    }

    /// Puts parked slots back into use.
    pub(crate) fn unpark(self: &Arc<Self>, parked: Vec<Filling>) {
        if self.home.is_here()
            && let Some(mut state) = self.lock_unless_broken()
        {
            state.count_parked(parked.len(), false);
        }
        drop(parked);
    }

    /// Answers the requests that have waited for a slot past their deadline.
    pub(crate) fn give_up_overdue_slots(self: &Arc<Self>) {
        for tier in Tier::ALL {
            let (overdue, held) = {
                let mut state = self.lock();
                let overdue = state.slot_requests[tier as usize].take_overdue(|since| self.is_overdue(since));
                (overdue, self.held_slots(tier))
            };
            for request in overdue.0 {
                drop(request.answer.send(Err(self.slot_timeout(tier, held))));
            }
        }
    }

    /// The error of a request that waited for a slot of `tier` past its deadline.
    pub(crate) fn slot_timeout(&self, tier: Tier, held: Option<HeldSlots>) -> Error {
        self.metrics.timeouts.add(1);
        let what = ["a device slot", "a host slot", "a disk slot"][tier as usize];
        Error::timeout(what, self.deadline(), held)
    }

    /// The slots of a tier that callers hold, if they hold any.
    pub(crate) fn held_slots(&self, tier: Tier) -> Option<HeldSlots> {
        let (reservations, slots, setting) = match tier {
            Tier::Device => (0, self.config.device_slots(), "device_blocks"),
            Tier::Host => (self.reservations.load(Ordering::Relaxed), self.host_slots(), "host_blocks"),
            Tier::Disk | Tier::Remote => return None,
        };
        let names = self.config.names_of_sizes();
        let setting = names.iter().find(|(blocks, _)| *blocks == setting).map_or(setting, |(_, bytes)| bytes);
        let leases = self.leases[tier as usize].get();
        (leases + reservations > 0).then_some(HeldSlots { leases, reservations, slots: u64::from(slots), setting })
    }
}

impl Locked<'_> {
    /// Takes a slot of `tier`, if one is available at once.
    pub(crate) fn acquire(&mut self, tier: Tier) -> Option<Filling> {
        self.check_service(tier).ok()?;
        let slot = self.take_slot(tier)?;
        Some(Filling::new(self.shared(), tier, slot))
    }

    /// Takes a slot that no earlier request waits for: those get what has come free under this lock.
    fn take_slot(&mut self, tier: Tier) -> Option<u32> {
        let slot = if self.has_waiters(tier) { None } else { self.free_or_evicted(tier) };
        if tier == Tier::Host {
            self.ask_for_write_back();
        }
        slot
    }

    fn ask_for_write_back(&self) {
        if self.write_back_is_due(0, self.shared().config.host.low_watermark) {
            self.shared().write_back.notify_one();
        }
    }

    /// True while released blocks that are dirty are not evicted: a sync in flight covers them.
    pub(super) fn spares_released(&self) -> bool {
        self.refusals.is_sync_in_flight() && !self.shared().config.values_writes()
    }

    /// True while a request waits for a host slot, and what could be evicted may be spared.
    pub(crate) fn is_short_by_sync(&self) -> bool {
        self.spares_released() && self.has_waiters(Tier::Host)
    }

    /// The next block of host memory to be written, so that it can be evicted: a dirty one, or a released one that is
    /// spared while a request waits for a slot.
    pub(crate) fn demotable(&self) -> Option<EntryId> {
        // One whose key a removed block had that is still being written waits for the end of that, which may be far.
        let may_go = |id: &EntryId| !self.flights.contains(&self.index.key(*id), Tier::Disk);
        let spared = || self.is_short_by_sync().then(|| self.index.spared(Tier::Host)).flatten().filter(may_go);
        self.index.demotable(Tier::Host).find(may_go).or_else(spared)
    }

    fn free_or_evicted(&mut self, tier: Tier) -> Option<u32> {
        if let Some(free) = self.pop_free(tier) {
            return Some(free);
        }
        if !self.index.keeps_nothing() {
            let now_ms = self.shared().now_ms();
            self.index.expire(now_ms);
        }
        let spares_dirty = self.spares_released();
        let victim = self.index.victim_unless(tier, spares_dirty)?;
        let key = self.index.key(victim);
        let slot = self.index.evict(victim, tier);
        // Of the blocks that must be written only released ones may be evicted.
        if tier == Tier::Host && self.dirty.remove(&key) {
            self.count(&self.shared().metrics.released_unwritten, 1);
        }
        self.count_eviction(tier);
        if tier == Tier::Disk {
            self.disk_slots().clear(slot, &key);
        }
        Some(slot)
    }

    /// Takes available slots for the requests that wait.
    pub(super) fn grant_slots(&mut self) -> Vec<Grant> {
        let mut granted = Vec::new();
        for tier in Tier::ALL {
            let before = granted.len();
            while self.has_waiters(tier)
                && let Some(slot) = self.free_or_evicted(tier)
            {
                let request = self.slot_requests[tier as usize].pop().expect("a request waits");
                granted.push(Grant { tier, slot, request });
            }
            // Only if a slot was granted: the write-back task takes the lock too, and would wake itself for ever.
            if tier == Tier::Host && granted.len() > before {
                self.ask_for_write_back();
            }
        }
        granted
    }

    /// Counts slots that are parked, or not any longer.
    fn count_parked(&mut self, slots: usize, are_parked: bool) {
        let (shared, slots) = (self.shared(), u32::try_from(slots).expect("no more than there are"));
        match are_parked {
            true => shared.parked.fetch_add(slots, Ordering::Relaxed),
            false => shared.parked.fetch_sub(slots, Ordering::Relaxed),
        };
        let in_use = shared.host_slots();
        self.index.resize(Tier::Host, in_use);
        self.index.limit_kept(Tier::Host, (u64::from(in_use) / KEPT_PART) as usize);
    }
}

/// A request that waits for its slot.
struct SlotWait {
    shared: Arc<Shared>,
    tier: Tier,
    number: u64,
    /// The movement that waits, if one does.
    movement: Option<(BlockKey, Tier)>,
    answer: oneshot::Receiver<Result<u32>>,
}

impl SlotWait {
    fn begin(state: &mut Locked<'_>, tier: Tier, purpose: Purpose, urgency: Urgency) -> Self {
        let shared = state.shared();
        let (sender, answer) = oneshot::channel();
        let movement = match purpose {
            Purpose::Call | Purpose::NewMovement(_) => None,
            Purpose::Movement(key, to) => Some((*key, to)),
        };
        let request = Request { since: shared.looks(), movement, answer: sender };
        let State { slot_requests, flights, .. } = &mut **state;
        let number = match urgency {
            Urgency::Awaited => flights.next_number(),
            Urgency::Background(number) => number,
        };
        slot_requests[tier as usize].insert(number, urgency, request);
        state.raise_holders();
        let waiting = SlotWait { shared: Arc::clone(shared), tier, number, movement, answer };
        waiting.note(state, Some(tier));
        waiting
    }

    /// Notes in the flight which tier its movement waits for.
    fn note(&self, state: &mut State, slot_wanted: Option<Tier>) {
        if let Some(flight) = self.movement.and_then(|(key, to)| state.flights.get_mut(&key, to)) {
            flight.slot_wanted = slot_wanted;
        }
    }

    async fn wait(mut self) -> Result<Filling> {
        let answer = (&mut self.answer).await.unwrap_or(Err(Error::Closed));
        answer.map(|slot| Filling::new(&self.shared, self.tier, slot))
    }
}

impl Drop for SlotWait {
    fn drop(&mut self) {
        self.answer.close();
        if !self.shared.home.is_here() {
            return;
        }
        // Nothing is sent any more. Not under the lock: the waker of the caller may be dropped here.
        let sent = self.answer.try_recv();
        let Some(mut state) = self.shared.lock_unless_broken() else { return };
        self.note(&mut state, None);
        let request = state.slot_requests[self.tier as usize].remove(self.number);
        // Sent just before the channel was closed: the slot has no owner.
        if let Ok(Ok(slot)) = sent {
            state.push_free(self.tier, slot);
        }
        drop(state);
        drop(request);
    }
}

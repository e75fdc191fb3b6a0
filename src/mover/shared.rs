//! What callers and the reactor share: the index, the free slots and the flights under one short
//! lock, and the memory behind the slots.

use std::{
    collections::BTreeSet,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
};

use tokio::sync::{Notify, oneshot};

use super::{
    direct::CufileService,
    flight::{Class, Flights, Joined, Message, Raised},
    offload::Readable,
    refusals::Refusals,
    service::DiskService,
    slots::SlotRequests,
    verify::Ticket,
};
use crate::{
    block::{BlockKey, Route, Segment, Tier},
    config::{Config, WritePolicy},
    device::DevicePool,
    disk::DiskSlots,
    error::{Error, Result},
    fork::Home,
    index::{EntryId, Index},
    memory::Arena,
    metrics::Metrics,
    sync::{Mutex, MutexGuard},
};

/// State under the lock. No I/O, no await, no allocation that grows with the cache.
pub(crate) struct State {
    pub(crate) index: Index,
    /// Free slots of the device and the host tier; the disk's are kept by [`DiskSlots`].
    pub(super) free: [Vec<u32>; 2],
    pub(crate) disk: Option<DiskSlots>,
    pub(crate) flights: Flights,
    /// Checksum of the block in each host slot.
    pub(crate) host_checksums: Vec<u64>,
    /// Likewise in each device slot.
    pub(super) device_checksums: Vec<u64>,
    pub(crate) cufile: CufileService,
    /// Generation of the next record.
    pub(crate) generation: u64,
    pub(super) slot_requests: SlotRequests,
    /// Leases that callers hold on blocks of the device and the host tier.
    pub(super) leases: [u64; 2],
    /// What the budget has not been told yet.
    pub(super) raised: Raised,
    pub(crate) disk_service: DiskService,
    /// Why the device tier is out of service, once it is.
    pub(crate) device_retired: Option<String>,
    /// Blocks of the host tier that the disk tier must take before they may go.
    pub(crate) dirty: BTreeSet<BlockKey>,
    /// Blocks that the disk tier did not take, and nobody was told.
    pub(super) refusals: Refusals,
    closed: bool,
}

/// What callers and the reactor share.
pub(crate) struct Shared {
    pub(crate) config: Config,
    state: Mutex<State>,
    pub(crate) arena: Arc<Arena>,
    pub(crate) device: Option<DevicePool>,
    pub(crate) metrics: Metrics,
    /// Host slots that callers have reserved and not committed.
    pub(crate) reservations: AtomicU64,
    /// Wakes the task that tells the budget of what is raised.
    pub(super) raised: Notify,
    /// Wakes the write-back task.
    pub(crate) write_back: Notify,
    /// Told when a caller has verified a block, and so ended its flight: the end of the cache waits for that.
    pub(super) verified: Notify,
    /// Wakes the task that watches the clock.
    pub(crate) watch: Notify,
    /// How often it has looked at it.
    pub(super) looks: AtomicU64,
    /// Requests that libcufile has not given back.
    pub(super) cufile_stuck: Arc<AtomicI64>,
    pub(super) home: Home,
}

/// What a look-up came to.
pub(crate) enum Found {
    /// Resident in the wanted tier, and now pinned there.
    Hit(Pin),
    /// Resident in another tier only.
    Elsewhere,
    /// Resident nowhere.
    Miss,
}

/// A block that is resident no more.
#[derive(Default)]
pub(crate) struct Removed {
    /// It was resident until now.
    pub(crate) resident: bool,
    /// The end of a write of it that is under way.
    pub(crate) writing: Option<oneshot::Receiver<Message>>,
}

/// What asking for a promotion came to.
pub(crate) enum Promotion {
    /// It is there already.
    Hit(Pin),
    /// It is nowhere.
    Miss,
    /// A movement is under way; its outcome comes here.
    Joined(oneshot::Receiver<Message>),
    /// The caller must start the movement; its outcome comes here.
    Started(oneshot::Receiver<Message>),
}

impl Shared {
    /// `index` and `disk` as recovery left them.
    pub(crate) fn new(
        config: Config,
        arena: Arc<Arena>,
        device: Option<DevicePool>,
        index: Index,
        disk: Option<DiskSlots>,
        generation: u64,
        metrics: Metrics,
    ) -> Self {
        let ascending_from_the_end = |slots: u32| (0..slots).rev().collect::<Vec<_>>();
        let state = State {
            index,
            free: [ascending_from_the_end(config.device_blocks), ascending_from_the_end(config.host_blocks)],
            disk,
            flights: Flights::default(),
            host_checksums: vec![0; config.host_blocks as usize],
            device_checksums: vec![0; config.device_blocks as usize],
            cufile: CufileService::default(),
            generation,
            slot_requests: SlotRequests::default(),
            leases: [0; 2],
            raised: Raised::default(),
            disk_service: DiskService::Full,
            device_retired: None,
            dirty: BTreeSet::new(),
            refusals: Refusals::default(),
            closed: false,
        };
        Shared {
            config,
            state: Mutex::new(state),
            arena,
            device,
            metrics,
            reservations: AtomicU64::new(0),
            raised: Notify::new(),
            write_back: Notify::new(),
            verified: Notify::new(),
            watch: Notify::new(),
            looks: AtomicU64::new(0),
            cufile_stuck: Arc::default(),
            home: Home::here(),
        }
    }

    /// Nothing in a forked child, where there is neither anybody to account to nor memory to give back: the share is
    /// left as it is.
    pub(super) fn at_home(self: Arc<Self>) -> Option<Arc<Self>> {
        if self.home.is_here() {
            return Some(self);
        }
        std::mem::forget(self);
        None
    }

    pub(crate) fn lock(&self) -> Locked<'_> {
        let state = Some(self.state.lock());
        #[cfg(feature = "sim")]
        LOCKS_HELD.set(LOCKS_HELD.get() + 1);
        Locked { shared: self, state }
    }

    /// Looks `key` up for a fetch: pins it in `tier` if it is resident there, and counts the use, and the hit or the
    /// miss unless it is elsewhere.
    pub(crate) fn look_up(self: &Arc<Self>, key: &BlockKey, tier: Tier) -> Result<Found> {
        self.look_up_and_pin(key, tier, true)
    }

    /// Likewise for a load, which copies the block to its caller: it has the route of that copy.
    pub(super) fn look_up_to_copy(self: &Arc<Self>, key: &BlockKey, tier: Tier) -> Result<Found> {
        self.look_up_and_pin(key, tier, false)
    }

    fn look_up_and_pin(self: &Arc<Self>, key: &BlockKey, tier: Tier, is_leased: bool) -> Result<Found> {
        let mut state = self.lock();
        state.check_open()?;
        state.check_device(tier)?;
        let Some(id) = state.index.find(key) else {
            drop(state);
            self.metrics.looked_up(None);
            return Ok(Found::Miss);
        };
        if let Some(slot) = state.pin_used(id, tier) {
            state.leases[tier as usize] += u64::from(is_leased);
            drop(state);
            let route = if tier == Tier::Device { Route::DeviceHit } else { Route::HostHit };
            self.metrics.looked_up(Some(tier));
            if is_leased {
                self.metrics.hit(route, self.config.block_bytes);
            }
            return Ok(Found::Hit(Pin { shared: Some(Arc::clone(self)), id, tier, slot, route, is_leased }));
        }
        if state.index.best_tier(id).is_some() || state.flights.contains(key, tier) {
            return Ok(Found::Elsewhere);
        }
        drop(state);
        self.metrics.looked_up(None);
        Ok(Found::Miss)
    }

    /// Starts or joins the movement that makes `key` resident in `tier`; also says where it was
    /// found. Counts no hit and no miss: this may be one step of a larger movement.
    pub(crate) fn promote(
        self: &Arc<Self>,
        key: &BlockKey,
        tier: Tier,
        class: Class,
    ) -> Result<(Promotion, Option<Tier>)> {
        let mut state = self.lock();
        state.check_open()?;
        state.check_device(tier)?;
        let Some(id) = state.index.find(key) else { return Ok((Promotion::Miss, None)) };
        let route = if tier == Tier::Device { Route::DeviceHit } else { Route::HostHit };
        if let Some(pin) = Pin::take(self, &mut state, id, tier, route) {
            return Ok((Promotion::Hit(pin), Some(tier)));
        }
        let source = state.index.best_tier(id);
        let waiters_max = self.config.waiters_max;
        match state.join(key, tier, class, waiters_max) {
            Joined::Waiting(receiver) => return Ok((Promotion::Joined(receiver), source)),
            Joined::Unverified => return Ok((Promotion::Joined(self.ticket(&mut state, key)), source)),
            Joined::Full => return Err(self.busy("waiters for one block", u64::from(waiters_max), "waiters_max")),
            Joined::Overdue => return Err(self.timeout("a movement of the block that is overdue")),
            Joined::None => {}
        }
        if source.is_none() {
            return Ok((Promotion::Miss, None));
        }
        state.index.touch(id);
        state.index.hit(id);
        Ok((Promotion::Started(state.flights.begin(key, tier, id, class)), source))
    }

    /// A receiver that has a ticket already.
    pub(super) fn ticket(self: &Arc<Self>, state: &mut State, key: &BlockKey) -> oneshot::Receiver<Message> {
        let (sender, receiver) = oneshot::channel();
        let flight = state.flights.get_mut(key, Tier::Host).expect("it was just joined");
        let sent = sender.send(Message::Verify(Ticket::new(self, *key, flight)));
        assert!(sent.is_ok(), "the receiver is here");
        receiver
    }

    /// True where too few host slots could be given up at once, and write-back could help.
    /// `demoting` are on their way already.
    pub(crate) fn write_back_is_due(&self, state: &State, demoting: u32, watermark: f64) -> bool {
        if self.config.write_policy != WritePolicy::WriteBack || state.index.demotable_len(Tier::Host) == 0 {
            return false;
        }
        let available = state.free[Tier::Host as usize].len() + state.index.evictable(Tier::Host) + demoting as usize;
        // At least one, so that a tiny tier is never stuck with dirty blocks only.
        let wanted = (f64::from(self.config.host_blocks) * watermark).ceil().max(1.0);
        (available as f64) < wanted
    }

    fn unpin(&self, state: &mut State, id: EntryId, tier: Tier, is_leased: bool) {
        if is_leased {
            state.leases[tier as usize] -= 1;
        }
        if let Some(slot) = state.index.unpin(id, tier) {
            state.push_free(tier, slot);
        }
        if tier == Tier::Host && state.has_waiters(tier) && self.write_back_is_due(state, 0, 0.0) {
            self.write_back.notify_one();
        }
    }

    /// Forgets `key`. Pinned copies stay until their last reader is done.
    ///
    /// An error where a write of it is overdue: it is forgotten, and its record may be written yet.
    pub(crate) fn remove(&self, key: &BlockKey) -> Result<Removed> {
        let mut state = self.lock();
        state.check_open()?;
        let mut removed = Removed::default();
        if let Some(id) = state.index.find(key)
            && (state.index.best_tier(id).is_some() || Tier::ALL.iter().any(|&tier| state.index.is_filling(id, tier)))
        {
            // Not where it is on its way from a caller's memory: nobody has seen it there.
            removed.resident = state.index.best_tier(id).is_some();
            state.dirty.remove(key);
            state.refusals.forget(key);
            if let Some(slot) = state.index.slot(id, Tier::Disk) {
                // Its record must go now, although whoever reads the slot holds it for a while yet.
                state.disk_slots().clear(slot, key);
            }
            for (tier, slot) in Tier::ALL.into_iter().zip(state.index.remove(id)) {
                slot.into_iter().for_each(|slot| state.push_free(tier, slot));
            }
        }
        // Bounded by the removals under way, each of which has a caller.
        match state.join(key, Tier::Disk, Class::Awaited, u32::MAX) {
            Joined::Waiting(receiver) => removed.writing = Some(receiver),
            Joined::Overdue => {
                drop(state);
                return Err(self.timeout("a write of the removed block that is overdue"));
            }
            Joined::None | Joined::Full | Joined::Unverified => {}
        }
        Ok(removed)
    }

    /// True where a record on disk may name `key`, whose block is gone.
    pub(crate) fn may_be_recorded(&self, key: &BlockKey) -> bool {
        self.lock().disk.as_ref().is_some_and(|slots| slots.pages_naming(key).next().is_some())
    }

    /// Refuses every call from now on, and the requests for slots that may never come free.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let refused = [Tier::Device, Tier::Host].map(|tier| state.slot_requests.take_all(tier));
        drop(state);
        refused.into_iter().for_each(|requests| requests.refuse(&Error::Closed));
    }

    pub(crate) fn busy(&self, what: &'static str, limit: u64, setting: &'static str) -> Error {
        self.metrics.busy.add(1);
        Error::Busy { what, limit, setting }
    }

    /// Requests that libcufile has not given back.
    pub(crate) fn cufile_stuck(&self) -> u64 {
        // A request that comes back just as it is given up on may be taken off before it is added.
        u64::try_from(self.cufile_stuck.load(Ordering::SeqCst)).unwrap_or(0)
    }

    /// The registered buffer around a host slot.
    pub(crate) fn fixed_buffer(&self, slot: u32) -> Option<u16> {
        Some(self.arena.chunk_of(slot))
    }

    /// First byte of a host slot.
    pub(crate) fn host_ptr(&self, slot: u32) -> NonNull<u8> {
        self.arena.slot_ptr(slot)
    }
}

impl State {
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed { Err(Error::Closed) } else { Ok(()) }
    }

    /// After the close host and device slots may never come free: readers hold them for as long as
    /// they like. Disk slots do, as the movements that hold them end; the last write-back needs them.
    pub(super) fn check_may_wait(&self, tier: Tier) -> Result<()> {
        match tier {
            Tier::Disk => Ok(()),
            _ => self.check_open(),
        }
    }

    pub(crate) fn disk_slots(&mut self) -> &mut DiskSlots {
        self.disk.as_mut().expect("only a cache with a disk tier has disk slots")
    }

    /// Waits for the movement of `key` to `tier`, if one is under way. It is awaited from now on, if `class` is.
    pub(super) fn join(&mut self, key: &BlockKey, tier: Tier, class: Class, waiters_max: u32) -> Joined {
        let joined = self.flights.join(key, tier, waiters_max);
        self.raise_joined(key, tier, class, &joined);
        joined
    }

    /// Likewise for the write that follows it.
    pub(super) fn join_next(&mut self, key: &BlockKey, tier: Tier, class: Class, waiters_max: u32) -> Joined {
        let joined = self.flights.join_next(key, tier, waiters_max);
        self.raise_joined(key, tier, class, &joined);
        joined
    }

    fn raise_joined(&mut self, key: &BlockKey, tier: Tier, class: Class, joined: &Joined) {
        if class == Class::Awaited && matches!(joined, Joined::Waiting(_)) {
            self.raise(key, tier);
        }
    }

    /// Free slots of a tier.
    pub(crate) fn free_slots(&self, tier: Tier) -> usize {
        match tier {
            Tier::Disk => self.disk.as_ref().map_or(0, |slots| slots.free_count() as usize),
            tier => self.free[tier as usize].len(),
        }
    }

    /// Pins `id` where it is resident in `tier`, and counts the use in every tier.
    fn pin_used(&mut self, id: EntryId, tier: Tier) -> Option<u32> {
        let slot = self.index.pin(id, tier)?;
        self.index.touch(id);
        self.index.hit(id);
        Some(slot)
    }

    pub(super) fn pop_free(&mut self, tier: Tier) -> Option<u32> {
        match tier {
            Tier::Disk => self.disk.as_mut()?.alloc(),
            tier => self.free[tier as usize].pop(),
        }
    }

    /// An error where blocks cannot go to `tier`.
    pub(super) fn check_service(&self, tier: Tier) -> Result<()> {
        match tier {
            Tier::Disk => self.disk_service.check_writes(),
            Tier::Device | Tier::Host => self.check_device(tier),
        }
    }

    /// An error where blocks of `tier` are on a device that is out of service.
    fn check_device(&self, tier: Tier) -> Result<()> {
        match &self.device_retired {
            Some(reason) if tier == Tier::Device => Err(Error::Unavailable { tier: "device", reason: reason.clone() }),
            _ => Ok(()),
        }
    }

    pub(super) fn push_free(&mut self, tier: Tier, slot: u32) {
        match tier {
            Tier::Disk => self.disk_slots().release(slot),
            tier => self.free[tier as usize].push(slot),
        }
    }
}

impl Shared {
    /// Gives the slots that can be taken to the requests that wait for one, and tells of what was raised.
    #[cold]
    fn unlock_and_serve(&self, mut state: MutexGuard<'_, State>) {
        let granted = self.grant_slots(&mut state);
        let is_raised = !state.raised.is_empty();
        unlock(state);
        if is_raised {
            self.raised.notify_one();
        }
        granted.into_iter().for_each(|grant| grant.send(self));
    }
}

#[inline]
fn unlock(state: MutexGuard<'_, State>) {
    drop(state);
    #[cfg(feature = "sim")]
    LOCKS_HELD.set(LOCKS_HELD.get() - 1);
}

#[cfg(feature = "sim")]
std::thread_local! {
    /// Index locks that this thread holds.
    static LOCKS_HELD: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// True while this thread holds the index lock of some cache: every caller waits for it. What may block, a log above
/// all, has no place there.
#[cfg(feature = "sim")]
pub(crate) fn holds_lock() -> bool {
    LOCKS_HELD.get() > 0
}

/// The state, locked. The unlock gives slots that can be taken to the requests that wait for one, first come, first
/// served.
///
/// Many things set a slot free, and some more than one: the end of a fill lets copies in other tiers go, an evicted
/// suffix its prefix. None of them has to look for requests. Wakers run after the unlock: they are the callers' code,
/// and may drop a future that locks.
pub(crate) struct Locked<'a> {
    shared: &'a Shared,
    /// `None` once unlocked.
    state: Option<MutexGuard<'a, State>>,
}

impl Deref for Locked<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        self.state.as_ref().expect("locked until it is dropped")
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect("locked until it is dropped")
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let Some(state) = self.state.take() else { return };
        if state.slot_requests.is_empty() && state.raised.is_empty() {
            unlock(state);
        } else {
            self.shared.unlock_and_serve(state);
        }
    }
}

/// A slot that is being filled: nobody else's until it is published or dropped.
pub(crate) struct Filling {
    /// `None` once published.
    shared: Option<Arc<Shared>>,
    tier: Tier,
    slot: u32,
}

impl Filling {
    /// Of a slot that was just taken.
    pub(super) fn new(shared: &Arc<Shared>, tier: Tier, slot: u32) -> Self {
        Filling { shared: Some(Arc::clone(shared)), tier, slot }
    }

    pub(crate) fn tier(&self) -> Tier {
        self.tier
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    /// The slot now belongs to the index. Call under the lock that published it.
    pub(crate) fn published(mut self) {
        self.shared = None;
    }

    /// Drops it for a holder of the lock.
    pub(crate) fn release(mut self, state: &mut State) {
        if self.shared.take().is_some() {
            state.push_free(self.tier, self.slot);
        }
    }

    /// The block-sized start of a host slot.
    pub(crate) fn bytes(&self) -> &[u8] {
        assert_eq!(self.tier, Tier::Host, "only host slots are readable");
        let shared = self.shared.as_ref().expect("not published while it can be named");
        // SAFETY: as in `bytes_mut`; `&self` excludes writers, and the arena was zeroed at first.
        unsafe { std::slice::from_raw_parts(shared.host_ptr(self.slot).as_ptr(), shared.config.block_bytes) }
    }

    /// The same, writable.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        assert_eq!(self.tier, Tier::Host, "only host slots are writable");
        let shared = self.shared.as_ref().expect("not published while it can be named");
        // SAFETY: an unpublished slot is this value's alone, and `&mut self` is the only access; the
        // arena lives as long as `shared`, and every slot has at least `block_bytes`.
        unsafe { std::slice::from_raw_parts_mut(shared.host_ptr(self.slot).as_ptr(), shared.config.block_bytes) }
    }
}

// SAFETY: an unpublished slot of the arena, which nobody else reads or writes.
unsafe impl Readable for Filling {
    fn segments(&self) -> Vec<Segment> {
        let bytes = self.bytes();
        vec![Segment { ptr: bytes.as_ptr().cast_mut(), len: bytes.len() }]
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        let Some(shared) = self.shared.take().and_then(Shared::at_home) else { return };
        let mut state = shared.lock();
        if self.tier == Tier::Disk
            && let Some(entry) = state.disk_slots().meta(self.slot).map(|meta| EntryId::from_u32(meta.entry))
        {
            // A write that was dropped in mid-work: the books name a block that nobody will see.
            let key = state.index.key(entry);
            state.disk_slots().clear(self.slot, &key);
        }
        state.push_free(self.tier, self.slot);
    }
}

/// A reader's hold on a full slot: it is neither evicted nor reused until this is dropped.
///
/// Never dropped under the lock: a holder of the lock [releases](Pin::release) it.
pub(crate) struct Pin {
    /// `None` once released.
    shared: Option<Arc<Shared>>,
    id: EntryId,
    tier: Tier,
    slot: u32,
    route: Route,
    /// It is counted as a lease.
    is_leased: bool,
}

impl Pin {
    /// Pins `id`, if it is resident in `tier`, for a holder of the lock.
    pub(crate) fn take(shared: &Arc<Shared>, state: &mut State, id: EntryId, tier: Tier, route: Route) -> Option<Pin> {
        let slot = state.index.pin(id, tier)?;
        Some(Pin { shared: Some(Arc::clone(shared)), id, tier, slot, route, is_leased: false })
    }

    /// Drops it for a holder of the lock.
    pub(crate) fn release(mut self, state: &mut State) {
        if let Some(shared) = self.shared.take() {
            shared.unpin(state, self.id, self.tier, self.is_leased);
        }
    }

    pub(crate) fn id(&self) -> EntryId {
        self.id
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    pub(crate) fn tier(&self) -> Tier {
        self.tier
    }

    pub(crate) fn route(&self) -> Route {
        self.route
    }

    /// Counts it as a lease from now on.
    #[inline]
    pub(crate) fn count_as_lease(&mut self) {
        if !self.is_leased {
            self.shared().lock().leases[self.tier as usize] += 1;
            self.is_leased = true;
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        self.shared.as_ref().expect("not released while it can be named")
    }

    /// The block, where it is in host memory.
    pub(crate) fn bytes(&self) -> &[u8] {
        assert_eq!(self.tier, Tier::Host, "only host slots are readable");
        let shared = self.shared();
        // SAFETY: the slot is full and pinned, so nobody writes to it while `self` lives; the arena
        // lives as long as `shared`, and every slot has at least `block_bytes`.
        unsafe { std::slice::from_raw_parts(shared.host_ptr(self.slot).as_ptr(), shared.config.block_bytes) }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take().and_then(Shared::at_home) {
            shared.unpin(&mut shared.lock(), self.id, self.tier, self.is_leased);
        }
    }
}

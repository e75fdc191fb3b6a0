//! Owners of slots: a filling until its block is published, a pin while it is read.

use std::sync::Arc;

use super::{
    Filling, Locked, Pin, Shared, State,
    deferred::{EndedPin, Work},
};
use crate::{
    block::{BlockKey, Route, Tier},
    index::EntryId,
    remote::Slot,
    sync::Refused,
};

impl Filling {
    /// The owner of a slot that was just taken.
    pub(crate) fn new(shared: &Arc<Shared>, tier: Tier, slot: u32) -> Self {
        Filling { shared: Some(Arc::clone(shared)), tier, slot }
    }

    pub(crate) fn tier(&self) -> Tier {
        self.tier
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    /// Whether it is a slot of this cache.
    pub(crate) fn is_of(&self, cache: &Arc<Shared>) -> bool {
        self.shared.as_ref().is_some_and(|shared| Arc::ptr_eq(shared, cache))
    }

    /// Hands the slot to the index. Call it under the lock that published it.
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

    /// The block-sized start of a host slot, writable.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        assert_eq!(self.tier, Tier::Host, "only host slots are writable");
        let shared = self.shared.as_ref().expect("not published while it can be named");
        // SAFETY: an unpublished slot is this value's alone, and `&mut self` is the only access; the
        // arena lives as long as `shared`, and every slot has at least `block_bytes`.
        unsafe { std::slice::from_raw_parts_mut(shared.host_ptr(self.slot).as_ptr(), shared.config.block_bytes) }
    }
}

impl Slot for Filling {
    fn bytes_mut(&mut self) -> &mut [u8] {
        Filling::bytes_mut(self)
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        let Some(shared) = self.shared.take().and_then(Shared::at_home) else { return };
        let Some(mut state) = shared.lock_unless_broken() else { return };
        if self.tier == Tier::Disk
            && let Some(entry) = state.disk_slots().meta(self.slot).map(|meta| EntryId::from_u32(meta.entry))
        {
            // A write that was dropped before its end: the slot table names a block that is never visible.
            let key = state.index.key(entry);
            state.disk_slots().clear(self.slot, &key);
        }
        state.push_free(self.tier, self.slot);
    }
}

impl Pin {
    /// The owner of a pin that the index has counted.
    pub(super) fn taken(shared: Arc<Shared>, id: EntryId, tier: Tier, slot: u32, route: Route) -> Pin {
        Pin { shared: Some(shared), id, tier, slot, route, is_leased: false }
    }

    /// Drops it for a holder of the lock.
    pub(crate) fn release(self, state: &mut Locked<'_>) {
        drop(self.end(state));
    }

    /// As [`release`](Self::release), and returns what it held of the cache, for the next owner.
    pub(super) fn end(mut self, state: &mut Locked<'_>) -> Arc<Shared> {
        let shared = self.shared.take().expect("not released while it can be named");
        state.unpin(EndedPin { id: self.id, tier: self.tier, is_leased: self.is_leased });
        shared
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
            self.shared().leases[self.tier as usize].add(1);
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
        // SAFETY: the slot is full and pinned, so nothing writes to it while `self` lives; the arena
        // lives as long as `shared`, and every slot has at least `block_bytes`.
        unsafe { std::slice::from_raw_parts(shared.host_ptr(self.slot).as_ptr(), shared.config.block_bytes) }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let Some(shared) = self.shared.take().and_then(Shared::at_home) else { return };
        let pin = EndedPin { id: self.id, tier: self.tier, is_leased: self.is_leased };
        match shared.state.try_lock() {
            Ok(state) => shared.locked(state).unpin(pin),
            Err(Refused::Taken) => shared.defer(Work::Pin(pin)),
            Err(Refused::Broken) => {}
        }
    }
}

impl Locked<'_> {
    /// Pins `id` if it is resident in `tier`.
    pub(crate) fn pin(&mut self, id: EntryId, tier: Tier, route: Route) -> Option<Pin> {
        let slot = self.index.pin(id, tier)?;
        Some(Pin::taken(Arc::clone(self.shared()), id, tier, slot, route))
    }

    #[inline]
    pub(super) fn unpin(&mut self, EndedPin { id, tier, is_leased }: EndedPin) {
        if is_leased {
            self.shared().leases[tier as usize].sub_locked(1, self);
        }
        let mut freed = self.index.unpin(id, tier);
        if tier == Tier::Device && freed.is_none() && !self.device_service.reads() {
            // It cannot be read any more: with its last reader the copy is gone.
            freed = self.index.drop_copy(id, tier);
        }
        if let Some(slot) = freed {
            self.push_free(tier, slot);
        }
        if tier == Tier::Host && self.has_waiters(tier) && self.write_back_is_due(0, 0.0) {
            self.shared().write_back.notify_one();
        }
    }

    /// The checksum of a block that is pinned in device or host memory.
    pub(crate) fn checksum(&self, pin: &Pin) -> u64 {
        self.checksums[pin.tier as usize][pin.slot as usize]
    }

    /// The entry of a block that a call looks up, unless the cache is closed.
    pub(crate) fn find_open(&self, key: &BlockKey) -> Option<EntryId> {
        let id = self.index.find(key).filter(|_| self.check_open().is_ok())?;
        self.prefetch(id);
        Some(id)
    }

    /// Pins a block for a load, if it is in host memory. Counts the use and the hit then.
    pub(crate) fn pin_resident(&mut self, id: EntryId) -> Option<Pin> {
        let pin = self.pin(id, Tier::Host, Route::HostHit)?;
        self.count_use(id);
        self.count(self.shared().metrics.look_ups(Some(Tier::Host)), 1);
        Some(pin)
    }
}

//! The balance of a cache at rest: every slot accounted for, nothing held, nothing in flight.

use std::{
    collections::BTreeSet,
    sync::{Arc, Weak},
};

use super::Mover;
use crate::{
    block::{OpKind, Tier},
    checksum::checksum,
    device::CopyEngine,
    index::EntryId,
    io::Storage,
    state::{Rooms, Shared, State},
};

/// Fails with a message unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

impl Shared {
    /// Checks what must hold while no call and no movement is in flight and no lease, reservation or device lease is
    /// alive; the error says what does not.
    pub(crate) fn check_idle(self: &Arc<Self>) -> Result<(), String> {
        let state = self.lock();
        state.index.validate_idle()?;
        let flights = state.flights.len();
        ensure!(!state.flights.any(), "{flights} flights, or loads of callers, are under way");
        let waiting = Tier::ALL.map(|tier| state.slot_requests[tier as usize].len());
        let leases = [0, 1].map(|tier: usize| self.leases[tier].get());
        ensure!(leases == [0; 2], "{leases:?} leases are counted and none is alive");
        let reservations = self.reservations.load(std::sync::atomic::Ordering::Relaxed);
        ensure!(reservations == 0, "{reservations} reservations are counted and none is alive");
        ensure!(waiting == [0; Tier::COUNT], "{waiting:?} requests wait for slots");
        let rooms = [&self.commands, &self.device_reads].map(Rooms::in_use);
        ensure!(rooms == [(0, 0); 2], "{rooms:?} rooms are taken and waited for, of commands and of reads");
        self.check_memory(&state, Tier::Device, self.config.device_slots())?;
        self.check_memory(&state, Tier::Host, self.config.host_slots())?;
        self.check_disk(&state)?;
        self.check_dirty(&state)?;
        self.check_host_bytes(&state)
    }

    /// Every slot of a tier in memory is free or holds a block, and is not both.
    fn check_memory(&self, state: &State, tier: Tier, slots: u32) -> Result<(), String> {
        let free = &state.free[tier as usize];
        let mut found: BTreeSet<u32> = free.iter().copied().collect();
        ensure!(found.len() == free.len(), "{tier}: a slot is free twice: {free:?}");
        for (_, slot) in state.index.copies(tier) {
            ensure!(found.insert(slot), "{tier}: slot {slot} holds a block and is free");
        }
        ensure!(found.iter().copied().eq(0..slots), "{tier}: of {slots} slots these are accounted for: {found:?}");
        Ok(())
    }

    fn check_disk(&self, state: &State) -> Result<(), String> {
        let Some(slots) = &state.disk else { return Ok(()) };
        slots.validate()?;
        let (free, full, quarantined) = (slots.free_count(), slots.full_count(), slots.quarantined_count());
        ensure!(
            u64::from(free) + u64::from(full) + u64::from(quarantined) == self.config.disk_slots(),
            "disk: {free} slots free, {full} full, {quarantined} quarantined, expected {} in all",
            self.config.disk_slots()
        );
        let mut copies = 0;
        for (id, slot) in state.index.copies(Tier::Disk) {
            let owner = slots.meta(slot).map(|meta| EntryId::from_u32(meta.entry));
            ensure!(owner == Some(id), "disk: slot {slot} of {id:?} is {owner:?}'s");
            copies += 1;
        }
        ensure!(copies == full, "disk: {full} slots are full, {copies} of them of a block");
        Ok(())
    }

    /// The blocks to be written are those that are dirty in the index.
    fn check_dirty(&self, state: &State) -> Result<(), String> {
        let copies = state.index.copies(Tier::Host);
        let dirty = copies.filter(|(id, _)| state.index.is_dirty(*id, Tier::Host)).count();
        ensure!(dirty == state.dirty.len(), "{dirty} dirty blocks, {} of them to be written", state.dirty.len());
        state.dirty.validate()?;
        for key in state.dirty.after(None, usize::MAX) {
            let here = state.index.find(&key).and_then(|id| state.index.slot(id, Tier::Host));
            ensure!(here.is_some(), "{key:?} is to be written, and is not in host memory");
        }
        Ok(())
    }

    /// Every block of the host tier has the bytes that were published.
    fn check_host_bytes(&self, state: &State) -> Result<(), String> {
        for (id, slot) in state.index.copies(Tier::Host) {
            // SAFETY: the slot is full and the lock is held, so nobody writes to it: the index gives no slot away
            // without the lock. The arena lives as long as `self`, and every slot has at least `block_bytes`.
            let bytes = unsafe { std::slice::from_raw_parts(self.host_ptr(slot).as_ptr(), self.config.block_bytes) };
            let matches = checksum(bytes) == state.checksums[Tier::Host as usize][slot as usize];
            ensure!(matches, "host: slot {slot} of {:?} does not match its checksum", state.index.key(id));
        }
        Ok(())
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// The shared half, as long as anything owns it.
    pub(crate) fn weak_shared(&self) -> Weak<Shared> {
        Arc::downgrade(&self.shared)
    }

    /// Checks what must hold on the reactor's side while nothing is in flight.
    pub(crate) fn check_idle(&self) -> Result<(), String> {
        for kind in [OpKind::Read, OpKind::Write] {
            let bytes = self.shared.in_flight.bytes(kind);
            ensure!(bytes == 0, "{bytes} bytes in flight are counted for {kind:?}");
        }
        ensure!(
            self.shared.in_flight.waiting() == 0,
            "{} operations wait for their permit",
            self.shared.in_flight.waiting()
        );
        let pages = self.records.borrow().written.len();
        ensure!(pages == 0, "{pages} record pages are being written");
        ensure!(self.answers.borrow().is_empty(), "{} answers are on their way", self.answers.borrow().len());
        ensure!(self.waiting.get() == 0, "{} blocks of calls are counted as waiting", self.waiting.get());
        let (active, demoting) = (self.active.get(), self.demoting.get());
        ensure!(active == 0 && demoting == 0, "{active} movements are under way, {demoting} of them write-backs");
        self.shared.check_idle()
    }
}

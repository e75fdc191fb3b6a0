//! One pool of host memory, which moves between spaces by use.
//!
//! The cache of a space has slots for all host memory that the space may ever have, and parks those that it does not
//! have now: the memory of a parked slot is the system's. To move memory, one cache parks slots, for which it evicts
//! its coldest blocks, and another puts slots back into use. The ledger counts the bytes of both, so the floors and
//! ceilings of tenants hold as they do when a space is made, and all spaces together never have more than the service.
//!
//! A space is given more when it has evicted as many bytes as a step of the pool: what no space has, or a step of the
//! space that makes the least use of its memory, if that is less than half of its own use. The use is the bytes that
//! are served out of host memory, over the bytes that the space has, averaged over the last moves. Evicted bytes count
//! a sixteenth: an idle space gives its memory to one that only scans, but one with hits does not.

use std::rc::Rc;

use super::{Entry, Space, Spaces, host::HostShare};
use crate::service::protocol::Failure;

/// What moves at a time: this part of the service's host memory.
const STEPS: u64 = 16;
/// How many times the use of its memory must be that of the space that gives some.
const MORE_USE: f64 = 2.0;

impl Spaces {
    /// What moves at a time, bytes.
    fn step(&self, slot_bytes: u64) -> u64 {
        (self.config.host_bytes / STEPS).max(slot_bytes)
    }

    /// After movements of a space: gives it more memory if it has evicted much and others use theirs less.
    pub(in crate::service) fn balance(self: &Rc<Self>, space: &Rc<Space>) {
        let share = &space.host;
        let step = self.step(share.slot_bytes);
        if !self.config.move_host || self.moving.get() || share.evicted(&space.cache) < step {
            return;
        }
        self.open_spaces().iter().for_each(|space| space.host.note(&space.cache));
        share.asked.set(share.seen.get().1);
        let wanted = step.min(self.host.most(&space.namespace).saturating_sub(share.bytes()));
        if wanted < share.slot_bytes {
            return;
        }
        let donor = match self.host.available(&space.namespace) < share.slot_bytes {
            // The space itself is none of them: its use is not twice its own.
            true => match self.donor(&space.namespace, |donor| donor.used() * MORE_USE < share.used()) {
                None => return,
                donor => donor,
            },
            false => None,
        };
        self.moving.set(true);
        tokio::task::spawn_local(Rc::clone(self).give(donor, Rc::clone(space), wanted));
    }

    /// Gives a space memory: a donor's, or what no space has.
    async fn give(self: Rc<Self>, donor: Option<Rc<Space>>, space: Rc<Space>, wanted: u64) {
        let wanted = match donor {
            Some(donor) => self.shrink(&donor, wanted).await,
            None => wanted,
        };
        let bytes = wanted.min(self.host.available(&space.namespace));
        if bytes > 0 && self.host.take(&space.namespace, bytes).is_ok() {
            space.host.resize(&space.cache, space.host.bytes() + bytes, &*self.system).await;
        }
        drop(space);
        self.moved();
    }

    /// Takes up to `wanted` spare bytes of a space; how many it took.
    async fn shrink(&self, donor: &Space, wanted: u64) -> u64 {
        let before = donor.host.bytes();
        let wanted = before - wanted.min(donor.host.spare());
        let taken = before - donor.host.resize(&donor.cache, wanted, &*self.system).await;
        self.host.give_back(&donor.namespace, taken);
        taken
    }

    /// The space that uses its memory least, of those whose memory `space` may have.
    fn donor(&self, space: &str, may_give: impl Fn(&HostShare) -> bool) -> Option<Rc<Space>> {
        let gives = |donor: &Rc<Space>| {
            let share = &donor.host;
            let step = self.step(share.slot_bytes).min(share.spare());
            step > 0 && may_give(share) && self.host.may_move(&donor.namespace, space, step)
        };
        let spaces = self.open_spaces().into_iter().filter(gives);
        spaces.min_by(|one, other| one.host.used().total_cmp(&other.host.used()))
    }

    /// Sets host memory aside for a space that is opened: `wanted` bytes, or all that no space has, and a step at
    /// least, where that is 0. What is missing is taken from spaces that have more than they reserved. Returns what it
    /// has and what of it is reserved.
    pub(super) async fn take_host(&self, space: &str, slot_bytes: u64, wanted: u64) -> Result<(u64, u64), Failure> {
        let least = if wanted == 0 { self.step(slot_bytes).min(self.host.most(space)) } else { wanted };
        self.moves_end().await;
        self.moving.set(true);
        while self.host.available(space) < least
            && let Some(donor) = self.donor(space, |_| true)
            && self.shrink(&donor, least - self.host.available(space)).await > 0
        {}
        let taken = self.host.take(space, wanted);
        self.moved();
        let bytes = taken?;
        Ok((bytes, if wanted == 0 && self.config.move_host { least.min(bytes) } else { bytes }))
    }

    /// Waits until no memory moves.
    pub(super) async fn moves_end(&self) {
        while self.moving.get() {
            self.move_ended.notified().await;
        }
    }

    fn moved(&self) {
        self.moving.set(false);
        self.move_ended.notify_waiters();
    }

    pub(super) fn open_spaces(&self) -> Vec<Rc<Space>> {
        self.entries.borrow().values().filter_map(Entry::space).cloned().collect()
    }
}

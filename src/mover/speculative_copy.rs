//! Copies to the device that begin before their block is verified.
//!
//! A block on its way from disk to the device is in host memory, whole, before its checksum is known. There the
//! processor would have to compute it; in a slot of the device, the device can. The movement that wants the block
//! there offers that: the one that has read it takes a slot, if one is free, and makes the copy visible once it is
//! verified.
//!
//! Only a slot: a caller's memory proves nothing of what is in host memory. Other code may write there, and several
//! blocks may be loaded into one place.
//!
//! The copies are prompt, in small groups. Otherwise blocks that arrive together would leave together and request their
//! successors together, and the disk would idle meanwhile (0.69 of the bare loop, with 32 blocks in flight).

use std::{cell::Cell, rc::Rc, sync::Arc};

use super::{Mover, block_memory::BlockMemory};
use crate::{
    block::{BlockKey, Route, Tier},
    device::CopyEngine,
    index::EntryId,
    io::Storage,
    state::{Filling, Locked, Pin, Unverified},
};

/// The offer of a copy, and where the movement that offers it finds the block on the device, once the block's movement
/// to host memory has ended. There may be none: a movement that has read a block waits for no slot.
pub(super) type DeviceCopy = Rc<Cell<Option<Pin>>>;

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Copies a block to the device, if a slot is free, and verifies it: there, if the device can. What does not match
    /// there is summed up here before anything is concluded from it. Ends the block's flight.
    pub(super) async fn verify_on_device(self: &Rc<Self>, key: &BlockKey, unverified: Unverified, copy: &DeviceCopy) {
        let (id, sum, wanted) = (unverified.source.id(), unverified.sum, unverified.checksum);
        // Who offers it may have given up, as at its deadline.
        let is_wanted = Rc::strong_count(copy) > 1;
        let Some(target) = is_wanted.then(|| self.shared.lock().acquire(Tier::Device)).flatten() else {
            return self.verify_here(key, unverified).await;
        };
        let (result, unverified, target) = match self.copy_promptly(unverified, target).await {
            Ok(copied) => copied,
            Err(lost) => {
                self.shared.lock().index.abort_fill(id, Tier::Host);
                return self.end_flight(key, Tier::Host, Err(lost));
            }
        };
        let (segments, target) = (self.segments(&target.place()).into_owned(), Arc::new(target));
        let on_device = match result {
            Ok(()) => {
                // SAFETY: the target keeps the segments, where nobody writes but the copy, which has ended.
                let sum = unsafe { self.copy.checksum(&segments, Arc::clone(&target) as _) };
                match self.ended(sum).await {
                    Ok(sum) => sum,
                    // The slot stays with the device, which is out of service.
                    Err(_lost) => return self.verify_here(key, unverified).await,
                }
            }
            Err(_) => None,
        };
        let target = Arc::into_inner(target).expect("the engine keeps no owner");
        let matches = matches!(on_device, Some(Ok(found)) if found == wanted);
        let (is_right, unverified) = match matches {
            true => (true, unverified),
            false => self.is_right(unverified, sum, wanted).await,
        };
        // Where host memory holds the right bytes and the device saw others, what is there may be wrong.
        let end = if is_right && (matches || (result.is_ok() && on_device.is_none())) {
            self.shared.count_read(unverified.started);
            let mut state = self.shared.lock();
            copy.set(state.publish_on_device(id, target, wanted));
            state.publish_read(key, unverified)
        } else {
            drop(target);
            self.shared.end_read(key, unverified, is_right)
        };
        self.answer_all(end);
    }
}

impl Locked<'_> {
    /// Makes the copy on the device of a block that is pinned on disk visible, unless the block was removed meanwhile.
    fn publish_on_device(&mut self, id: EntryId, filling: Filling, checksum: u64) -> Option<Pin> {
        match self.pin(id, Tier::Disk, Route::DiskToHost) {
            Some(source) if self.index.begin_fill(id, Tier::Device) => {
                self.publish(id, filling, checksum, Route::DiskToHostToDevice, source)
            }
            source => {
                source.into_iter().for_each(|source| source.release(self));
                filling.release(self);
                None
            }
        }
    }
}

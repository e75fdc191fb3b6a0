//! Copies to the device that begin before their block is verified.
//!
//! A block on its way from disk to the device is in host memory, whole, before its checksum is known. There the
//! processor would have to compute it; at its target, the device can. The movement that wants the block offers the
//! target, and gets the checksum of what was copied there once the block is verified: no caller sees the block before.
//!
//! The copies are prompt, in small groups. Otherwise blocks that arrive together would leave together and request their
//! successors together, and the disk would idle meanwhile (0.69 of the bare loop, with 32 blocks in flight).

use std::{cell::RefCell, rc::Rc, sync::Arc};

use tokio::sync::oneshot;

use super::{Mover, region::Job};
use crate::{
    block::{Segment, Tier},
    device::{CopyEngine, CopyRegion, OwnedBatch, pair_segments},
    error::Result,
    io::Storage,
    state::{Filling, Outcome, Unverified, verify::panicked},
};

/// The target of a block on the device.
pub(super) enum Target {
    /// Any slot that is free once the block has been read. There may be none: a movement that has read a block waits
    /// for no slot.
    AnySlot,
    /// A slot that was free.
    Slot(Filling),
    /// A caller's memory.
    Memory(Job),
}

/// A target that is returned, with the checksum of what was copied there and verified, if anything was. The checksum
/// names the block, and not its entry, because the block may have been removed and stored anew meanwhile.
type Told = (Target, Option<u64>);

/// A target that was offered, for the movement that reads the block.
pub(super) struct Ahead(RefCell<Option<(Target, oneshot::Sender<Told>)>>);

/// A target that was offered, for the movement that offered it.
pub(super) struct Offer {
    ahead: Rc<Ahead>,
    told: oneshot::Receiver<Told>,
}

impl Offer {
    pub(super) fn new(target: Target) -> Self {
        let (tell, told) = oneshot::channel();
        Offer { ahead: Rc::new(Ahead(RefCell::new(Some((target, tell))))), told }
    }

    pub(super) fn ahead(&self) -> Rc<Ahead> {
        Rc::clone(&self.ahead)
    }

    /// Takes the target back; nothing is copied there after that. Waits for a copy in flight, and so for the
    /// verification of its block: for the device, never for the disk.
    ///
    /// # Errors
    /// If the movement that had taken it panicked.
    pub(super) async fn withdraw(self) -> Result<Told> {
        if let Some((target, _)) = self.ahead.0.take() {
            return Ok((target, None));
        }
        self.told.await.map_err(|_| panicked())
    }
}

/// A copy that has ended, of a block that may be wrong.
struct Copied {
    target: Target,
    result: Result<()>,
    /// The checksum of what is there, where the device can tell.
    sum: Option<Result<u64>>,
    tell: oneshot::Sender<Told>,
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Copies a block to the device, if that was offered, and verifies it: there, if the device can. What does not
    /// match there is summed up here before anything is concluded from it.
    pub(super) async fn copy_and_verify(&self, unverified: Unverified, ahead: &Ahead) -> Outcome {
        let wanted = unverified.checksum;
        let (unverified, copied) = self.copy_ahead(unverified, ahead).await;
        let Some(Copied { target, result, sum, tell }) = copied else { return self.verify_here(unverified).await };
        let matches = matches!(sum, Some(Ok(found)) if found == wanted);
        let outcome = match matches {
            true => self.shared.finish_read(unverified, true),
            false => self.verify_here(unverified).await,
        };
        // Where host memory holds the right bytes and the device saw others, what is there may be wrong.
        let is_right = matches!(outcome, Ok(Some(_))) && (matches || (result.is_ok() && sum.is_none()));
        // Who offered it may be gone.
        drop(tell.send((target, is_right.then_some(wanted))));
        outcome
    }

    /// Copies a block where it was offered to be. `None` where that is withdrawn, or no slot is free.
    async fn copy_ahead(&self, unverified: Unverified, ahead: &Ahead) -> (Unverified, Option<Copied>) {
        let Some((target, tell)) = ahead.0.take() else { return (unverified, None) };
        let target = match target {
            Target::AnySlot => self.shared.acquire_now(Tier::Device).map_or(Target::AnySlot, Target::Slot),
            target => target,
        };
        let (segments, regions) = match &target {
            Target::Memory(job) => (job.segments.clone(), job.copy_regions()),
            Target::Slot(filling) => (self.device_segments(filling.slot()), Vec::new()),
            Target::AnySlot => {
                drop(tell.send((target, None)));
                return (unverified, None);
            }
        };
        let (unverified, target, result) = self.copy_onto(unverified, Arc::new(target), &segments, regions).await;
        let sum = match result {
            // SAFETY: the segments are of a slot that `target` is filling, or in regions that it holds; nobody writes
            // there before it is dropped, but for the copy, which has ended.
            Ok(()) => unsafe { self.copy.checksum(&segments, Arc::clone(&target) as _) }.await,
            Err(_) => None,
        };
        let target = Arc::into_inner(target).expect("the engine keeps no owner");
        (unverified, Some(Copied { target, result, sum, tell }))
    }

    /// Copies a block that has been read to `segments`, which `target` keeps.
    async fn copy_onto(
        &self,
        unverified: Unverified,
        target: Arc<Target>,
        segments: &[Segment],
        regions: Vec<CopyRegion>,
    ) -> (Unverified, Arc<Target>, Result<()>) {
        let ops = match pair_segments(&[self.host_segment(unverified.filling.slot())], segments) {
            Ok(ops) => ops,
            Err(error) => return (unverified, target, Err(error)),
        };
        // SAFETY: the source is an unpublished slot, which nobody writes to any more; the target is one too, or lies in
        // regions that the job holds, whose owner promised at registration not to touch a segment while it is loaded.
        // All guards travel.
        let batch = unsafe { OwnedBatch::new(ops, self.promote_direction(), (target, unverified)) };
        // SAFETY: their owner keeps them mapped until `Cache::unregister` has resolved, which tells the engine.
        let batch = unsafe { batch.within(regions) };
        let (result, (target, unverified)) = self.copied(batch.prompt()).await;
        (unverified, target, result)
    }
}

//! Copies to the device that begin before their block is verified.
//!
//! A block on its way from disk to the device is in host memory, whole, before its checksum is known. To sum it up and
//! to copy it each take a turn of the device; at the same time they take one. Whoever wants the block offers the place
//! where it is to go, and is told what was copied there once the block has been found right: nobody sees it before.

use std::{any::Any, cell::RefCell, rc::Rc, sync::Arc};

use tokio::sync::oneshot;

use super::{Job, Mover, flight::Outcome, shared::Filling, verify::Unverified};
use crate::{
    block::{Segment, Tier},
    copy::{CopyBatch, CopyEngine, pair_segments},
    error::{Error, Result},
    index::EntryId,
    io::Storage,
};

/// Where a block is to go on the device.
pub(super) enum Target {
    /// Any slot that is free when the block has been read. There may be none: who has read a block waits for no slot.
    AnySlot,
    /// One that was.
    Slot(Filling),
    /// A caller's memory.
    Memory(Job),
}

/// What became of a target: the block that was copied there and is right, if one was.
type Told = (Target, Option<EntryId>);

/// A target that was offered, for who reads the block.
pub(super) struct Ahead(RefCell<Option<(Target, oneshot::Sender<Told>)>>);

/// The same for who offered it.
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

    /// Takes the target back; nothing is copied there after that. Waits for a copy that is under way, and so for the
    /// verification of its block: for the device, never for the disk.
    ///
    /// # Errors
    /// [`Error::Closed`] if who had taken it ended without a word.
    pub(super) async fn withdraw(self) -> Result<Told> {
        if let Some((target, _)) = self.ahead.0.take() {
            return Ok((target, None));
        }
        self.told.await.map_err(|_| Error::Closed)
    }
}

/// A copy that has ended, of a block that may be wrong.
struct Copied {
    target: Target,
    result: Result<()>,
    tell: oneshot::Sender<Told>,
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Verifies a block that goes to the device next, and copies it there at the same time if that was offered.
    pub(super) async fn verify_and_copy(&self, unverified: Unverified, ahead: &Ahead) -> Outcome {
        let (id, unverified) = (unverified.source.id(), Arc::new(unverified));
        let (verdict, copied) = tokio::join!(self.judge(&unverified), self.copy_ahead(&unverified, ahead));
        let unverified = Arc::into_inner(unverified).expect("the engine keeps no owner");
        let outcome = self.shared.finish_read(unverified, verdict != Verdict::Wrong);
        if let Some(Copied { target, result, tell }) = copied {
            let there = verdict == Verdict::Right && result.is_ok();
            // Who offered it may be gone.
            drop(tell.send((target, there.then_some(id))));
        }
        outcome
    }

    /// The device sums up a block in host memory, where it can: that costs this thread nothing. What does not match is
    /// summed up here before anything is concluded from it.
    async fn judge(&self, unverified: &Arc<Unverified>) -> Verdict {
        let (segment, wanted) = (self.host_segment(unverified.filling.slot()), unverified.checksum);
        let by_device = self.copy.checksum_host(segment, Arc::clone(unverified) as _).await;
        if matches!(by_device, Some(Ok(found)) if found == wanted) {
            return Verdict::Right;
        }
        match self.checksum_of(unverified.filling.bytes()).await == wanted {
            false => Verdict::Wrong,
            true if by_device.is_none() => Verdict::Right,
            true => Verdict::Disputed,
        }
    }

    /// Copies a block where it was offered to be. `None` where that is withdrawn, or no slot is free.
    async fn copy_ahead(&self, unverified: &Arc<Unverified>, ahead: &Ahead) -> Option<Copied> {
        let (target, tell) = ahead.0.take()?;
        let (segments, target): (Vec<Segment>, Arc<dyn Any + Send + Sync>) = match target {
            Target::Memory(job) => (job.segments.clone(), Arc::new(job)),
            Target::Slot(filling) => (self.device_segments(filling.slot()), Arc::new(filling)),
            Target::AnySlot => match self.shared.acquire_now(Tier::Device) {
                Some(filling) => (self.device_segments(filling.slot()), Arc::new(filling)),
                None => {
                    drop(tell.send((Target::AnySlot, None)));
                    return None;
                }
            },
        };
        let (result, target) = match pair_segments(&[self.host_segment(unverified.filling.slot())], &segments) {
            Ok(ops) => {
                let owners = vec![Arc::clone(unverified) as _, target];
                // SAFETY: the source is an unpublished slot, which nobody writes to any more; the target is one too, or
                // lies in regions that the job holds, whose owner promised at registration not to touch a segment
                // while it is loaded. All guards travel.
                let batch = unsafe { CopyBatch::new(ops, self.promote_direction(), owners) };
                let (result, batch) = self.copied(batch).await;
                (result, batch.into_owners().pop().expect("the second of two owners"))
            }
            Err(error) => (Err(error), target),
        };
        let target = match target.downcast::<Filling>() {
            Ok(filling) => Target::Slot(Arc::into_inner(filling).expect("the engine keeps no owner")),
            Err(target) => {
                let job = target.downcast::<Job>().expect("one of the two");
                Target::Memory(Arc::into_inner(job).expect("the engine keeps no owner"))
            }
        };
        Some(Copied { target, result, tell })
    }
}

/// What a block was found to be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Right,
    Wrong,
    /// Right in host memory, where the device saw something else: what it copied may be wrong.
    Disputed,
}

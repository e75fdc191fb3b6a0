//! Copies to the device that begin before their block is verified.
//!
//! A block on its way from disk to the device is in host memory, whole, before its checksum is known. There the
//! processor would have to compute it; in a slot of the device, the device can. The movement that wants the block
//! offers to take one, and learns whether the block was copied there once it is verified: no caller sees it before.
//!
//! Only a slot: a caller's memory proves nothing of what is in host memory. Other code may write there, and several
//! blocks may be loaded into one place.
//!
//! The copies are prompt, in small groups. Otherwise blocks that arrive together would leave together and request their
//! successors together, and the disk would idle meanwhile (0.69 of the bare loop, with 32 blocks in flight).

use std::{cell::RefCell, rc::Rc, sync::Arc};

use tokio::sync::oneshot;

use super::{Mover, block_memory::BlockMemory};
use crate::{
    block::{BlockKey, Tier},
    device::CopyEngine,
    error::{Error, Result},
    io::Storage,
    state::{Filling, Unverified},
};

/// The slot, if one was free, and whether the block was copied there, verified, and made visible in host memory. The
/// error of a device that did not say whether it had ended, with which the slot stays.
type Returned = Result<(Option<Filling>, bool)>;

/// The offer of a copy, for the movement that reads the block: to any slot that is free once the block has been read.
/// There may be none: a movement that has read a block waits for no slot.
pub(super) struct SpeculativeCopy(RefCell<Option<oneshot::Sender<Returned>>>);

/// The offer of a copy, for the movement that offers it.
pub(super) struct Offer {
    copy: Rc<SpeculativeCopy>,
    returned: oneshot::Receiver<Returned>,
}

impl Offer {
    pub(super) fn new() -> Self {
        let (sender, returned) = oneshot::channel();
        Offer { copy: Rc::new(SpeculativeCopy(RefCell::new(Some(sender)))), returned }
    }

    pub(super) fn copy(&self) -> Rc<SpeculativeCopy> {
        Rc::clone(&self.copy)
    }

    /// Takes the offer back; nothing is copied after that. Waits for a copy in flight, and so for the verification of
    /// its block: for the device, never for the disk.
    ///
    /// # Errors
    /// [`Error::Copy`] where the slot stays with the device. [`Error::Closed`] where the movement that had taken the
    /// offer is gone: the cache ends.
    pub(super) async fn withdraw(self) -> Returned {
        if self.copy.0.take().is_some() {
            return Ok((None, false));
        }
        self.returned.await.unwrap_or(Err(Error::Closed))
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Copies a block to the device, if that is still offered and verifies it: there, if the device can. What does not
    /// match there is summed up here before anything is concluded from it. Ends the block's flight.
    pub(super) async fn verify_on_device(
        self: &Rc<Self>,
        key: &BlockKey,
        unverified: Unverified,
        copy: &SpeculativeCopy,
    ) {
        let (sum, wanted) = (unverified.sum, unverified.checksum);
        let Some(returned) = copy.0.take() else { return self.verify_here(key, unverified).await };
        let Some(target) = self.shared.lock().acquire(Tier::Device) else {
            // Who offered it may be gone.
            drop(returned.send(Ok((None, false))));
            return self.verify_here(key, unverified).await;
        };
        let id = unverified.source.id();
        let (result, unverified, target) = match self.copy_promptly(unverified, target).await {
            Ok(copied) => copied,
            Err(lost) => {
                self.shared.lock().index.abort_fill(id, Tier::Host);
                drop(returned.send(Err(lost.clone())));
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
                    Err(lost) => {
                        drop(returned.send(Err(lost)));
                        return self.verify_here(key, unverified).await;
                    }
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
        let is_copied = is_right && (matches || (result.is_ok() && on_device.is_none()));
        let end = self.shared.end_read(key, unverified, is_right);
        // A block that was removed meanwhile may have been stored anew, with other bytes.
        let is_visible = end.0.iter().any(|(_, outcome)| matches!(outcome, Ok(Some(_))));
        drop(returned.send(Ok((Some(target), is_copied && is_visible))));
        self.answer_all(end);
    }
}

//! What a transfer needs, and what a movement has taken of it so far.

use super::{Filling, Locked, Permit, Purpose};
use crate::{
    block::{OpKind, Tier},
    urgency::Urgency,
};

/// A slot, and a share of the bytes in flight.
#[derive(Default)]
pub(crate) struct Taken {
    pub(crate) slot: Option<Filling>,
    pub(crate) permit: Option<Permit>,
}

impl Taken {
    /// The host slot that a read fills, and how urgent it was when its permit was given.
    pub(crate) fn of_read(&self) -> (u32, Urgency) {
        let (slot, permit) = self.slot.as_ref().zip(self.permit.as_ref()).expect("its plan has taken both");
        (slot.slot(), permit.urgency)
    }

    /// The flight for which bytes in flight were taken has a number by now.
    pub(crate) fn set_urgency(&mut self, urgency: Urgency) {
        self.permit.as_mut().expect("its plan has taken one").urgency = urgency;
    }

    pub(crate) fn slot(&mut self) -> Filling {
        self.slot.take().expect("its plan has taken one")
    }

    pub(crate) fn permit(&mut self) -> Permit {
        self.permit.take().expect("its plan has taken one")
    }

    /// Takes what a transfer needs, in this order, as far as it is to be had now; what is missing then.
    pub(crate) fn take(&mut self, state: &mut Locked<'_>, needs: &[Need], purpose: Purpose<'_>) -> Option<Need> {
        let is_missing = |need: &Need| match *need {
            Need::Slot(tier) => {
                self.slot = self.slot.take().or_else(|| state.acquire(tier));
                self.slot.is_none()
            }
            Need::Permit(kind) => {
                let (urgency, shared) = (state.holder_urgency(purpose), state.shared());
                let bytes = shared.config.slot_bytes() as u64;
                let take = || shared.in_flight.take_now(kind, urgency, bytes);
                self.permit = self.permit.take().or_else(take);
                self.permit.is_none()
            }
        };
        needs.iter().copied().find(is_missing)
    }
}

/// What a transfer needs: a slot to fill, bytes in flight.
#[derive(Clone, Copy)]
pub(crate) enum Need {
    Slot(Tier),
    Permit(OpKind),
}

/// What a write to disk needs. Its bytes first: background writes get none while awaited reads wait, and must not hold
/// a slot that a store waits for.
pub(crate) const WRITE: [Need; 2] = [Need::Permit(OpKind::Write), Need::Slot(Tier::Disk)];

pub(crate) const READ: Need = Need::Permit(OpKind::Read);

/// What a read to a host slot needs. The slot first: with it, a movement that waits for bytes is as urgent as the
/// callers that wait for a host slot.
pub(crate) const READ_TO_HOST: [Need; 2] = [Need::Slot(Tier::Host), READ];

//! The requests that wait for a slot. Pure data.

use std::collections::BTreeMap;

use tokio::sync::oneshot;

use crate::{
    block::{BlockKey, Tier},
    error::{Error, Result},
};

/// Requests for slots that wait.
#[derive(Default)]
pub(crate) struct SlotRequests {
    pub(super) tiers: [TierRequests; Tier::COUNT],
}

/// Requests for slots of one tier by their numbers, which grow from request to request.
#[derive(Default)]
pub(super) struct TierRequests {
    pub(super) awaited: BTreeMap<u64, Request>,
    pub(super) background: BTreeMap<u64, Request>,
}

pub(super) struct Request {
    /// Deadline ticks at its creation.
    pub(super) since: u64,
    /// The movement that waits, if one does.
    pub(super) movement: Option<(BlockKey, Tier)>,
    pub(super) answer: oneshot::Sender<Result<u32>>,
}

/// Requests that get no slot, to be answered after the unlock.
#[must_use = "the requests wait for an answer"]
pub(crate) struct Refused(pub(super) Vec<Request>);

impl TierRequests {
    #[inline]
    fn len(&self) -> usize {
        self.awaited.len() + self.background.len()
    }

    pub(super) fn pop(&mut self) -> Option<Request> {
        let first = self.awaited.pop_first().or_else(|| self.background.pop_first());
        first.map(|(_, request)| request)
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Request> {
        self.awaited.remove(&number).or_else(|| self.background.remove(&number))
    }

    pub(super) fn raise(&mut self, number: u64) {
        if let Some(request) = self.background.remove(&number) {
            self.awaited.insert(number, request);
        }
    }
}

impl SlotRequests {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.tiers.iter().map(TierRequests::len).sum::<usize>() == 0
    }

    /// Requests that wait for a slot of `tier`.
    #[inline]
    pub(crate) fn len(&self, tier: Tier) -> usize {
        self.tiers[tier as usize].len()
    }

    /// Takes all requests for slots of `tier` off their queue.
    pub(crate) fn take_all(&mut self, tier: Tier) -> Refused {
        let TierRequests { awaited, background } = std::mem::take(&mut self.tiers[tier as usize]);
        Refused(awaited.into_values().chain(background.into_values()).collect())
    }

    /// Takes these requests off their queue.
    pub(super) fn take(&mut self, tier: Tier, is_taken: impl Fn(&Request) -> bool) -> Refused {
        let TierRequests { awaited, background } = &mut self.tiers[tier as usize];
        let is_taken = |_: &u64, request: &mut Request| is_taken(request);
        let requests = awaited.extract_if(.., is_taken).chain(background.extract_if(.., is_taken));
        Refused(requests.map(|(_, request)| request).collect())
    }
}

impl Refused {
    /// Answers the requests. Wakes callers, so call it without the lock.
    pub(crate) fn refuse(self, error: &Error) {
        for request in self.0 {
            drop(request.answer.send(Err(error.clone())));
        }
    }
}

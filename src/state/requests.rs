//! The requests that wait for a slot. Pure data.

use std::collections::BTreeMap;

use tokio::sync::oneshot;

use crate::{
    block::{BlockKey, Tier},
    error::{Error, Result},
    urgency::Urgency,
};

/// Requests for slots of one tier by their numbers, which grow from request to request.
#[derive(Default)]
pub(crate) struct SlotRequests {
    pub(super) awaited: BTreeMap<u64, Request>,
    pub(super) background: BTreeMap<u64, Request>,
    /// No request waits since earlier.
    oldest: u64,
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

impl SlotRequests {
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.awaited.len() + self.background.len()
    }

    pub(super) fn insert(&mut self, number: u64, urgency: Urgency, request: Request) {
        if self.len() == 0 {
            self.oldest = request.since;
        }
        let queue = if urgency == Urgency::Awaited { &mut self.awaited } else { &mut self.background };
        assert!(queue.insert(number, request).is_none(), "a movement waits for one slot of a tier at a time");
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

    /// Takes all requests off the queue.
    pub(super) fn take_all(&mut self) -> Refused {
        let SlotRequests { awaited, background, .. } = std::mem::take(self);
        Refused(awaited.into_values().chain(background.into_values()).collect())
    }

    /// Takes these requests off the queue.
    pub(super) fn take(&mut self, is_taken: impl Fn(&Request) -> bool) -> Refused {
        let SlotRequests { awaited, background, .. } = self;
        let is_taken = |_: &u64, request: &mut Request| is_taken(request);
        let requests = awaited.extract_if(.., is_taken).chain(background.extract_if(.., is_taken));
        Refused(requests.map(|(_, request)| request).collect())
    }

    /// Takes the requests off the queue that wait since too early a tick.
    pub(super) fn take_overdue(&mut self, is_overdue: impl Fn(u64) -> bool) -> Refused {
        // Not each of them at each tick.
        if self.len() == 0 || !is_overdue(self.oldest) {
            return Refused(Vec::new());
        }
        let overdue = self.take(|request| is_overdue(request.since));
        // One that was raised has an older number than others that wait longer.
        let since = self.awaited.values().chain(self.background.values()).map(|request| request.since);
        self.oldest = since.min().unwrap_or_default();
        overdue
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Ticks of requests whose time is over, and how many were looked at.
    fn overdue(requests: &mut SlotRequests, before: u64) -> (Vec<u64>, usize) {
        let looks = Cell::new(0);
        let is_overdue = |since| {
            looks.set(looks.get() + 1);
            since < before
        };
        let Refused(overdue) = requests.take_overdue(is_overdue);
        (overdue.into_iter().map(|request| request.since).collect(), looks.get())
    }

    #[test]
    fn requests_are_looked_at_only_once_one_of_them_may_be_overdue() {
        let mut requests = SlotRequests::default();
        let request = |since| Request { since, movement: None, answer: oneshot::channel().0 };
        for number in 100..200 {
            requests.insert(number, Urgency::Awaited, request(number / 10));
        }
        // It has a lower number and is younger.
        requests.insert(1, Urgency::Background(1), request(20));
        requests.raise(1);
        assert_eq!(overdue(&mut requests, 10), (Vec::new(), 1), "all are young enough");
        assert_eq!(overdue(&mut requests, 11).0, [10; 10]);
        assert_eq!(overdue(&mut requests, 11), (Vec::new(), 1));
        assert_eq!(overdue(&mut requests, 13).0.len(), 20, "behind the one that was raised");
        assert_eq!(overdue(&mut requests, 99).0.len(), 71);
        assert_eq!(overdue(&mut requests, 99), (Vec::new(), 0));
        requests.insert(300, Urgency::Awaited, request(30));
        assert_eq!(overdue(&mut requests, 30), (Vec::new(), 1));
        assert_eq!(overdue(&mut requests, 31).0, [30]);
    }
}

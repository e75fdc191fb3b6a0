//! Bytes in flight: a bound, and an order. Reads that someone awaits go before writes that
//! someone awaits, and those before writes that nobody awaits. One awaited write at a time may run
//! beside waiting reads, so that no store waits for ever.

use std::{cell::RefCell, collections::VecDeque, rc::Rc};

use tokio::sync::oneshot;

/// How urgent an operation on the disk tier is. Declared most urgent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    /// A read that a caller awaits.
    Read,
    /// A write that a caller awaits.
    Write,
    /// A prefetch or a write-back: nobody awaits it.
    Background,
}

const CLASSES: usize = 3;

/// Bounds the bytes in flight of reads and of writes.
///
/// While an awaited read waits for its share no write is started unless it is awaited and the only
/// one: the writes in flight finish, and the drive is the reads'. Lives on the reactor's thread.
#[derive(Clone)]
pub(crate) struct Budget(Rc<RefCell<Inner>>);

struct Inner {
    limits: [u64; 2],
    in_flight: [u64; 2],
    waiting: [VecDeque<Waiter>; CLASSES],
}

struct Waiter {
    kind: Kind,
    bytes: u64,
    wake: oneshot::Sender<Share>,
}

/// Which limit an operation counts against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bytes read.
    Read = 0,
    /// Bytes written.
    Write = 1,
}

/// A share of the budget; dropping it gives the bytes back.
pub(crate) struct Share {
    budget: Budget,
    kind: Kind,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(read_bytes_max: u64, write_bytes_max: u64) -> Self {
        Budget(Rc::new(RefCell::new(Inner {
            limits: [read_bytes_max, write_bytes_max],
            in_flight: [0; 2],
            waiting: Default::default(),
        })))
    }

    /// Waits for `bytes` of the budget. Cancel safe: a share given to a dropped future goes back.
    pub(crate) async fn take(&self, kind: Kind, class: Class, bytes: u64) -> Share {
        let receiver = {
            let mut inner = self.0.borrow_mut();
            let bytes = bytes.min(inner.limits[kind as usize]);
            if inner.may_start(kind, class) && inner.fits(kind, bytes) {
                inner.in_flight[kind as usize] += bytes;
                return Share { budget: self.clone(), kind, bytes };
            }
            let (wake, receiver) = oneshot::channel();
            inner.waiting[class as usize].push_back(Waiter { kind, bytes, wake });
            receiver
        };
        receiver.await.expect("the queue holds its senders until it sends")
    }

    /// Operations that wait for their share.
    #[cfg(feature = "sim")]
    pub(super) fn waiting(&self) -> usize {
        self.0.borrow().waiting.iter().flatten().filter(|waiter| !waiter.wake.is_closed()).count()
    }

    /// Bytes in flight of a kind.
    pub(super) fn in_flight(&self, kind: Kind) -> u64 {
        self.0.borrow().in_flight[kind as usize]
    }

    /// Starts what fits now, most urgent class first.
    fn start_waiting(&self) {
        loop {
            let waiter = self.0.borrow_mut().pop_next();
            let Some(waiter) = waiter else { return };
            // A waiter that is gone drops the share, which comes back here: the loop in that inner
            // call has then started whatever fits.
            let share = Share { budget: self.clone(), kind: waiter.kind, bytes: waiter.bytes };
            drop(waiter.wake.send(share));
        }
    }
}

const CLASS_ORDER: [Class; CLASSES] = [Class::Read, Class::Write, Class::Background];

impl Inner {
    fn fits(&self, kind: Kind, bytes: u64) -> bool {
        self.in_flight[kind as usize] + bytes <= self.limits[kind as usize]
    }

    /// True where nothing that waits must go before a new operation.
    fn may_start(&self, kind: Kind, class: Class) -> bool {
        let sole_write = class == Class::Write && kind == Kind::Write && self.in_flight[Kind::Write as usize] == 0;
        CLASS_ORDER[..=class as usize]
            .iter()
            .all(|c| self.waiting[*c as usize].is_empty() || (sole_write && *c == Class::Read))
    }

    /// Takes the next waiter off its queue and books its bytes: the front of the most urgent class
    /// that fits. A class waits while one before it waits for the same kind.
    fn pop_next(&mut self) -> Option<Waiter> {
        let mut blocked = [false; 2];
        for class in CLASS_ORDER {
            let Some(front) = self.waiting[class as usize].front() else { continue };
            let (kind, bytes) = (front.kind, front.bytes);
            let sole_write = class == Class::Write && self.in_flight[Kind::Write as usize] == 0;
            if (!blocked[kind as usize] || sole_write) && self.fits(kind, bytes) {
                self.in_flight[kind as usize] += bytes;
                return self.waiting[class as usize].pop_front();
            }
            blocked[kind as usize] = true;
            blocked[Kind::Write as usize] = true;
        }
        None
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.0.borrow_mut().in_flight[self.kind as usize] -= self.bytes;
        self.budget.start_waiting();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn an_awaited_read_goes_before_writes_that_waited_longer() {
        let budget = Budget::new(10, 10);
        let mut read_1 = pin!(budget.take(Kind::Read, Class::Read, 10));
        let mut write_1 = pin!(budget.take(Kind::Write, Class::Write, 5));
        let mut write_1b = pin!(budget.take(Kind::Write, Class::Write, 5));
        let read_share = poll(read_1.as_mut()).expect("fits");
        let write_share = poll(write_1.as_mut()).expect("fits");
        let write_share_b = poll(write_1b.as_mut()).expect("fits");
        let mut background = pin!(budget.take(Kind::Write, Class::Background, 5));
        let mut write_2 = pin!(budget.take(Kind::Write, Class::Write, 5));
        let mut read_2 = pin!(budget.take(Kind::Read, Class::Read, 5));
        assert!(poll(background.as_mut()).is_none() && poll(write_2.as_mut()).is_none());
        assert!(poll(read_2.as_mut()).is_none());
        drop(write_share);
        assert_eq!(budget.in_flight(Kind::Write), 5);
        assert!(poll(write_2.as_mut()).is_none(), "no second write starts while an awaited read waits");
        drop(read_share);
        let read_2 = poll(read_2.as_mut()).expect("the read goes first");
        let write_2 = poll(write_2.as_mut()).expect("then the awaited write");
        assert!(poll(background.as_mut()).is_none(), "10 of 10 bytes are in flight");
        drop(write_2);
        let background = poll(background.as_mut()).expect("then the other");
        drop((background, read_2, write_share_b));
        assert_eq!(budget.in_flight(Kind::Write), 0);
    }

    #[test]
    fn one_awaited_write_runs_beside_waiting_reads_and_no_background_write_does() {
        let budget = Budget::new(10, 10);
        let mut read = pin!(budget.take(Kind::Read, Class::Read, 10));
        let read = poll(read.as_mut()).expect("fits");
        let mut waiting = pin!(budget.take(Kind::Read, Class::Read, 10));
        assert!(poll(waiting.as_mut()).is_none());
        let mut background = pin!(budget.take(Kind::Write, Class::Background, 1));
        assert!(poll(background.as_mut()).is_none(), "nobody awaits it");
        let mut write_1 = pin!(budget.take(Kind::Write, Class::Write, 1));
        let mut write_2 = pin!(budget.take(Kind::Write, Class::Write, 1));
        let write_1 = poll(write_1.as_mut()).expect("the only write");
        assert!(poll(write_2.as_mut()).is_none(), "the second");
        drop(write_1);
        assert!(poll(write_2.as_mut()).is_some(), "now the only one");
        drop(read);
    }

    #[test]
    fn a_cancelled_waiter_gives_its_share_to_the_next() {
        let budget = Budget::new(10, 10);
        let mut first = pin!(budget.take(Kind::Read, Class::Read, 10));
        let share = poll(first.as_mut()).expect("fits");
        let mut kept = pin!(budget.take(Kind::Read, Class::Read, 10));
        {
            let mut cancelled = pin!(budget.take(Kind::Read, Class::Read, 10));
            assert!(poll(cancelled.as_mut()).is_none());
            assert!(poll(kept.as_mut()).is_none());
            drop(share);
            // `cancelled` has been sent the share and is dropped without being polled again.
        }
        assert!(poll(kept.as_mut()).is_some());
    }

    #[test]
    fn more_than_the_whole_budget_waits_for_all_of_it() {
        let budget = Budget::new(10, 10);
        let mut huge = pin!(budget.take(Kind::Read, Class::Read, 1000));
        assert!(poll(huge.as_mut()).is_some());
        assert_eq!(budget.in_flight(Kind::Read), 0, "given back");
    }
}

//! What an I/O thread moves blocks with, a ring or system calls, and where it sleeps.

#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    thread::{self, Thread},
};

use super::{
    ring::{Ring, TRANSFERS_MAX, WakeFd},
    transfer::{Completed, InFlight, Transfer},
    waiter::Waiter,
};
use crate::block::OpKind;

/// Bytes that a thread reads at once, and that it writes at once, but at least two blocks each: enough to keep a few
/// drives busy, and little enough to stay in the processor's cache until the checksum is computed.
const IN_FLIGHT_BYTES_MAX: usize = 16 << 20;

/// Makes the transfers of one thread.
pub trait Driver {
    /// Number of further reads or writes that the thread takes. Reads take no room of writes, nor writes of reads.
    fn room(&self, kind: OpKind) -> usize;

    /// Reads or writes in flight.
    fn in_flight(&self, kind: OpKind) -> usize;

    /// Starts a transfer at the next [`poll`](Self::poll) or [`sleep`](Self::sleep).
    fn start(&mut self, transfer: Transfer, waiter: Waiter);

    /// Submits the started transfers and collects completions, without sleeping.
    fn poll(&mut self);

    /// Whether completed transfers wait to be taken.
    fn has_completed(&self) -> bool;

    /// Takes the next completed transfer.
    fn take_completed(&mut self) -> Option<Completed<Waiter>>;

    /// What wakes the thread.
    fn wake(&self) -> Wake;

    /// Submits the started transfers, and sleeps until one completes or the thread is woken, now or since the last
    /// sleep.
    fn sleep(&mut self);
}

/// Wakes one I/O thread, from any thread.
pub struct Wake(Kind);

enum Kind {
    Ring(WakeFd),
    Thread(Thread),
    /// Of a simulation, or of a model.
    #[cfg(any(test, feature = "sim"))]
    Call(Box<dyn Fn() + Send + Sync>),
}

impl Wake {
    pub(super) fn wake(&self) {
        match &self.0 {
            Kind::Ring(wake) => wake.wake(),
            Kind::Thread(thread) => thread.unpark(),
            #[cfg(any(test, feature = "sim"))]
            Kind::Call(wake) => wake(),
        }
    }

    /// Wakes by this call.
    #[cfg(any(test, feature = "sim"))]
    pub fn by(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Wake(Kind::Call(Box::new(wake)))
    }
}

/// Which transfers a thread takes. It leaves others to other threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Takes {
    None,
    Reads,
    All,
}

/// A thread's ring, if it has one, and its system calls.
pub(super) struct ThreadDriver {
    pub(super) ring: Option<Ring<Waiter>>,
    /// Which transfers it takes.
    pub(super) takes: Takes,
    /// Transfers to be made by system calls, each when it is taken as completed: its bytes are still in the processor's
    /// cache then. Also those whose offset is impossible, which are refused then.
    calls: VecDeque<InFlight<Waiter>>,
    /// How a thread without a ring sleeps.
    park: fn(),
}

impl ThreadDriver {
    /// With a ring.
    pub(super) fn with(ring: Ring<Waiter>) -> Self {
        ThreadDriver { ring: Some(ring), ..ThreadDriver::without_ring(Takes::All) }
    }

    /// Sleeps by `park`, and leaves transfers to the others.
    #[cfg(test)]
    pub(super) fn that_sleeps(park: fn()) -> Self {
        ThreadDriver { park, ..ThreadDriver::without_ring(Takes::None) }
    }

    /// Transfers by system calls, one read and one write at a time.
    pub(super) fn without_ring(takes: Takes) -> Self {
        ThreadDriver { ring: None, takes, calls: VecDeque::new(), park: thread::park }
    }
}

impl Driver for ThreadDriver {
    fn room(&self, kind: OpKind) -> usize {
        // Other threads may be free to make the next calls.
        let is_taken = self.takes == Takes::All || self.takes == Takes::Reads && kind == OpKind::Read;
        if !is_taken || !self.calls.is_empty() {
            return 0;
        }
        let Some(ring) = &self.ring else { return 1 };
        let (count, bytes) = ring.in_flight(kind);
        let more = if count < 2 { 2 - count } else { IN_FLIGHT_BYTES_MAX.saturating_sub(bytes) * count / bytes.max(1) };
        more.min(TRANSFERS_MAX - count)
    }

    fn in_flight(&self, kind: OpKind) -> usize {
        let is_read = |kind| kind == OpKind::Read;
        let calls = self.calls.iter().filter(|call| is_read(call.parts.kind()) == is_read(kind)).count();
        calls + self.ring.as_ref().map_or(0, |ring| ring.in_flight(kind).0)
    }

    fn start(&mut self, transfer: Transfer, waiter: Waiter) {
        let by_calls = transfer.file.by_calls || transfer.kind == OpKind::Sync;
        let transfer = InFlight::new(transfer, waiter);
        match &mut self.ring {
            Some(ring) if !by_calls && transfer.parts.check_offset().is_ok() => ring.start(transfer),
            _ => self.calls.push_back(transfer),
        }
    }

    fn poll(&mut self) {
        if let Some(ring) = &mut self.ring {
            ring.poll();
        }
    }

    fn has_completed(&self) -> bool {
        !self.calls.is_empty() || self.ring.as_ref().is_some_and(Ring::has_completed)
    }

    fn take_completed(&mut self) -> Option<Completed<Waiter>> {
        let by_ring = self.ring.as_mut().and_then(Ring::take_completed);
        by_ring.or_else(|| self.calls.pop_front().map(InFlight::make))
    }

    fn wake(&self) -> Wake {
        Wake(match &self.ring {
            Some(ring) => Kind::Ring(ring.wake_fd()),
            None => Kind::Thread(thread::current()),
        })
    }

    fn sleep(&mut self) {
        match &mut self.ring {
            Some(ring) => ring.wait(),
            None => (self.park)(),
        }
    }
}

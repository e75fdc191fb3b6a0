//! Where a worker sits: its ring, if it has one, and the place where it sleeps.

use std::{
    collections::VecDeque,
    thread::{self, Thread},
};

use super::waiter::Waiter;
use crate::{
    block::OpKind,
    io::uring::{self, Completed, Lane, TRANSFERS_MAX, Transfer},
};

/// Bytes that a worker reads at once, and that it writes at once, but at least two blocks each: enough to keep a few
/// drives busy, and little enough to stay in the processor's cache until the checksum is computed.
const IN_FLIGHT_BYTES_MAX: usize = 16 << 20;

/// What a worker transfers with, and where it sleeps.
pub trait Seat {
    /// Number of further reads or writes that the worker takes. Reads take no room of writes, nor writes of reads.
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

    /// What wakes the worker.
    fn bell(&self) -> Bell;

    /// Submits the started transfers, and sleeps until one completes or the bell rings, now or since it was last heard.
    fn sleep(&mut self);
}

/// Wakes one worker, from any thread.
pub struct Bell(Kind);

enum Kind {
    Ring(uring::Bell),
    Thread(Thread),
    #[cfg(feature = "sim")]
    Task(std::sync::Arc<tokio::sync::Notify>),
    /// Wakes a worker of a model.
    #[cfg(test)]
    Modelled(Rung),
}

/// Whether the bell of a model's worker has rung.
#[cfg(test)]
pub(super) type Rung = std::sync::Arc<(shuttle::sync::Mutex<bool>, shuttle::sync::Condvar)>;

impl Bell {
    pub(super) fn ring(&self) {
        match &self.0 {
            Kind::Ring(bell) => bell.ring(),
            Kind::Thread(thread) => thread.unpark(),
            #[cfg(feature = "sim")]
            Kind::Task(bell) => bell.notify_one(),
            #[cfg(test)]
            Kind::Modelled(rung) => {
                *rung.0.lock().expect("nothing panics under it") = true;
                rung.1.notify_one();
            }
        }
    }

    /// Wakes a worker that is a task.
    #[cfg(feature = "sim")]
    pub fn of_task(bell: std::sync::Arc<tokio::sync::Notify>) -> Self {
        Bell(Kind::Task(bell))
    }

    #[cfg(test)]
    pub(super) fn modelled(rung: Rung) -> Self {
        Bell(Kind::Modelled(rung))
    }
}

impl Seat for Lane<Waiter> {
    fn room(&self, kind: OpKind) -> usize {
        // Other workers may be free to make the next calls.
        if self.has_calls() {
            return 0;
        }
        let (count, bytes) = Lane::in_flight(self, kind);
        let more = if count < 2 { 2 - count } else { IN_FLIGHT_BYTES_MAX.saturating_sub(bytes) * count / bytes.max(1) };
        more.min(TRANSFERS_MAX - count)
    }

    fn in_flight(&self, kind: OpKind) -> usize {
        Lane::in_flight(self, kind).0
    }

    fn start(&mut self, transfer: Transfer, waiter: Waiter) {
        Lane::start(self, transfer, waiter);
    }

    fn poll(&mut self) {
        Lane::poll(self);
    }

    fn has_completed(&self) -> bool {
        Lane::has_completed(self)
    }

    fn take_completed(&mut self) -> Option<Completed<Waiter>> {
        Lane::take_completed(self)
    }

    fn bell(&self) -> Bell {
        Bell(Kind::Ring(Lane::bell(self)))
    }

    fn sleep(&mut self) {
        self.wait();
    }
}

/// A worker without a ring, and how it sleeps.
pub(super) struct Ringless {
    sleep: fn(),
    /// Whether it transfers by system calls, one at a time; otherwise it leaves transfers to the others.
    transfers: bool,
    /// Transfers to be made when they are taken as completed.
    calls: VecDeque<(Transfer, Waiter)>,
}

impl Ringless {
    pub(super) fn new(sleep: fn(), transfers: bool) -> Self {
        Ringless { sleep, transfers, calls: VecDeque::new() }
    }
}

impl Seat for Ringless {
    fn room(&self, kind: OpKind) -> usize {
        usize::from(self.transfers).saturating_sub(Seat::in_flight(self, kind))
    }

    fn in_flight(&self, kind: OpKind) -> usize {
        self.calls.iter().filter(|(transfer, _)| transfer.kind == kind).count()
    }

    fn start(&mut self, transfer: Transfer, waiter: Waiter) {
        self.calls.push_back((transfer, waiter));
    }

    fn poll(&mut self) {}

    fn has_completed(&self) -> bool {
        !self.calls.is_empty()
    }

    fn take_completed(&mut self) -> Option<Completed<Waiter>> {
        let (transfer, waiter) = self.calls.pop_front()?;
        Some(transfer.make(waiter))
    }

    fn bell(&self) -> Bell {
        Bell(Kind::Thread(thread::current()))
    }

    fn sleep(&mut self) {
        (self.sleep)();
    }
}

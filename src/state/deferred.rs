//! Work that threads defer to the holder of the state's lock, such as look-ups and the ends of pins and of reads.
//!
//! To wait for the lock would cost a thread more than such work itself, and all others another turn, while the holder
//! has the memory that the work needs in its processor's caches. So a thread that finds the lock taken defers the work
//! and goes on; a fetch then awaits its answer. Whoever takes the lock does first what was deferred, and looks again
//! once it has released the lock. So nothing stays: where too much comes while a thread looks, the reactor takes the
//! lock next.

use std::sync::atomic::{AtomicBool, Ordering};

use super::Locked;
use crate::{block::Tier, index::EntryId, shield::caught, sync::Mutex};

/// Work that the list has room for before it grows.
const WORKS: usize = 64;

/// A pin that ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EndedPin {
    pub(super) id: EntryId,
    pub(super) tier: Tier,
    /// It is counted as a lease.
    pub(super) is_leased: bool,
}

/// Work for whoever has the lock.
pub(crate) trait DeferredWork: Send {
    /// Does it. Called once.
    fn run(&mut self, state: &mut Locked<'_>);

    /// Answers whom it concerns. Called after it has run, without the lock, by the thread that had it.
    fn answer(&mut self);
}

pub(super) enum Work {
    Pin(EndedPin),
    Other(Box<dyn DeferredWork>),
    /// It has run, or is running.
    Done,
}

/// The work that was deferred.
pub(super) struct Deferred {
    works: Mutex<Works>,
    /// Whether there may be any. A thread that defers work sets it and then tries the lock; a holder unlocks and then
    /// looks at it. Both are read-modify-writes: if the holder was first, the try comes after that unlock, and fails
    /// only because of a later holder, who looks as well.
    any: AtomicBool,
    /// An invariant is broken, and no holder will look. The lock itself does not always tell: who finds it poisoned has
    /// it for a moment.
    is_broken: AtomicBool,
}

struct Works {
    pending: Vec<Work>,
    /// An empty list, for the next ones.
    spare: Vec<Work>,
}

impl Deferred {
    pub(super) fn new() -> Self {
        let works = Works { pending: Vec::with_capacity(WORKS), spare: Vec::with_capacity(WORKS) };
        Deferred { works: Mutex::new(works), any: AtomicBool::new(false), is_broken: AtomicBool::new(false) }
    }

    /// Defers work. Its thread then [tries the lock](super::Shared::serve_deferred).
    pub(super) fn defer(&self, work: Work) {
        self.works.lock().pending.push(work);
        self.any.swap(true, Ordering::AcqRel);
    }

    /// Notes that an invariant is broken, before the last unlock.
    pub(super) fn break_off(&self) {
        self.is_broken.store(true, Ordering::Release);
    }

    pub(super) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }

    /// Whether there may be work, for a thread that has just released the lock.
    #[inline]
    pub(super) fn any(&self) -> bool {
        // The compiler makes a `fetch_or` of nothing a fence, which costs more.
        self.any.compare_exchange(false, false, Ordering::AcqRel, Ordering::Acquire).is_err()
    }

    /// True if there is none but what other threads are deferring.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Relaxed)
    }

    /// Takes all work.
    pub(super) fn take(&self) -> Vec<Work> {
        self.any.swap(false, Ordering::AcqRel);
        let mut works = self.works.lock();
        let spare = std::mem::take(&mut works.spare);
        std::mem::replace(&mut works.pending, spare)
    }

    /// Answers whom work concerns that has run.
    pub(super) fn answer(&self, mut done: Vec<Work>) {
        for work in done.drain(..) {
            if let Work::Other(mut work) = work {
                // A waker that panics is of this work alone.
                _ = caught(move || work.answer());
            }
        }
        self.works.lock().spare = done;
    }
}

impl Locked<'_> {
    /// Does what was deferred before this thread took the lock. It lies in the state meanwhile: after a panic it is
    /// dropped without the lock, with the waiters of reads that are published already.
    #[inline(never)]
    pub(super) fn run_deferred(&mut self) {
        self.follow_ups.done = self.shared().deferred.take();
        for at in 0..self.follow_ups.done.len() {
            match std::mem::replace(&mut self.follow_ups.done[at], Work::Done) {
                Work::Pin(pin) => self.unpin(pin),
                Work::Other(mut work) => {
                    work.run(self);
                    self.follow_ups.done[at] = Work::Other(work);
                }
                Work::Done => {}
            }
        }
    }
}

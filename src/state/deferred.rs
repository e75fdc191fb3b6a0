//! Work that threads defer to the holder of the state's lock, such as look-ups and the ends of pins and of reads.
//!
//! To wait for the lock would cost a thread more than such work itself, and all others another turn, while the holder
//! has the memory that the work needs in its processor's caches. So a thread that finds the lock taken defers the work
//! and goes on; a fetch then awaits its answer. Whoever takes the lock does first some of what was deferred, and
//! looks again once it has released the lock. So nothing stays: where too much comes while a thread looks, the reactor
//! takes the lock next, while there is one.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::atomic::{AtomicBool, Ordering},
};

use super::Locked;
use crate::{
    block::{BlockKey, Tier},
    index::EntryId,
    shield::caught,
    sync::Mutex,
};

/// Works that the holder does under one lock, and answers before it looks for more.
pub(super) const WORKS_PER_LOCK: usize = 32;

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

    /// The block that it looks up.
    fn key(&self) -> Option<&BlockKey> {
        None
    }

    /// The entry that it changes.
    fn entry(&self) -> Option<EntryId> {
        None
    }
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
    /// The reactor is about to take the lock once more, and may not look again. Set and read as `any` is: if it was not
    /// set yet, that lock finds what was deferred before.
    has_ended: AtomicBool,
}

struct Works {
    pending: VecDeque<Work>,
    /// An empty list, for those that are taken next.
    spare: Vec<Work>,
}

impl Deferred {
    pub(super) fn new() -> Self {
        let room = 2 * WORKS_PER_LOCK;
        let works = Works { pending: VecDeque::with_capacity(room), spare: Vec::with_capacity(WORKS_PER_LOCK) };
        let [any, is_broken, has_ended] = [(); 3].map(|()| AtomicBool::new(false));
        Deferred { works: Mutex::new(works), any, is_broken, has_ended }
    }

    /// Defers work. Its thread then [tries the lock](super::Shared::serve_deferred).
    pub(super) fn defer(&self, work: Work) {
        self.works.lock().pending.push_back(work);
        self.any.swap(true, Ordering::AcqRel);
    }

    /// Notes that an invariant is broken, before the last unlock.
    pub(super) fn break_off(&self) {
        self.is_broken.store(true, Ordering::Release);
    }

    pub(super) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }

    /// Notes that the reactor looks with its next lock, and may not look again.
    pub(super) fn end(&self) {
        self.has_ended.swap(true, Ordering::AcqRel);
    }

    /// Whether nobody looks but those who defer work.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.compare_exchange(false, false, Ordering::AcqRel, Ordering::Acquire).is_err()
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

    /// Takes `most` works, the oldest ones.
    pub(super) fn take(&self, most: usize) -> Vec<Work> {
        self.any.swap(false, Ordering::AcqRel);
        let mut works = self.works.lock();
        if works.pending.is_empty() {
            return Vec::new();
        }
        let mut taken = std::mem::take(&mut works.spare);
        let most = most.min(works.pending.len());
        taken.extend(works.pending.drain(..most));
        if !works.pending.is_empty() {
            self.any.store(true, Ordering::Release);
        }
        taken
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
    /// Does [some](WORKS_PER_LOCK) of what was deferred before this thread took the lock. It lies in the state
    /// meanwhile: after a panic it is dropped without the lock, with the waiters of reads that are published already.
    #[inline(never)]
    pub(super) fn run_deferred(&mut self) {
        self.follow_ups.done = self.shared().deferred.take(WORKS_PER_LOCK);
        self.prefetch_deferred();
        for at in 0..self.follow_ups.done.len() {
            match std::mem::replace(&mut self.follow_ups.done[at], Work::Done) {
                Work::Pin(pin) => self.unpin(pin),
                Work::Other(mut work) => {
                    let ran = catch_unwind(AssertUnwindSafe(|| work.run(self)));
                    self.follow_ups.done[at] = Work::Other(work);
                    ran.unwrap_or_else(|panic| resume_unwind(panic));
                }
                Work::Done => {}
            }
        }
    }

    /// Tells the processor what all of the works will read.
    fn prefetch_deferred(&self) {
        let works = &self.follow_ups.done;
        if works.len() < 2 {
            return;
        }
        let others = || works.iter().filter_map(|work| if let Work::Other(work) = work { Some(&**work) } else { None });
        self.index.prefetch_keys(others().filter_map(DeferredWork::key));
        let pins = works.iter().filter_map(|work| if let Work::Pin(pin) = work { Some(pin.id) } else { None });
        pins.chain(others().filter_map(DeferredWork::entry)).for_each(|id| self.index.prefetch(id));
    }
}

//! What threads leave to the holder of the state's lock, such as the ends of pins and of reads.
//!
//! To wait for the lock would cost a thread more than such work itself, and all others another turn, while the holder
//! has the memory that the work needs in its processor's caches. So a thread that finds the lock taken leaves the work,
//! if it needs no answer, and goes on. Whoever takes the lock does first what was left, and looks again once it has
//! released the lock: nothing stays that was left.

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
pub(crate) trait LeftWork: Send {
    /// Does it. Called once.
    fn make(&mut self, state: &mut Locked<'_>);

    /// Answers whom it concerns. Called after it was made, without the lock, by the thread that had it.
    fn answer(&mut self);
}

pub(super) enum Work {
    Pin(EndedPin),
    Other(Box<dyn LeftWork>),
}

/// The work that was left.
pub(super) struct Left {
    works: Mutex<Works>,
    /// Whether there may be any. Only read-modify-writes: a thread that leaves work sets it and then tries the lock; a
    /// holder unlocks and then looks at it. If the holder was first, the try comes after that unlock, and fails only
    /// because of a later holder, who looks as well.
    any: AtomicBool,
}

struct Works {
    left: Vec<Work>,
    /// An empty list, for the next ones.
    spare: Vec<Work>,
}

impl Left {
    pub(super) fn new() -> Self {
        let works = Works { left: Vec::with_capacity(WORKS), spare: Vec::with_capacity(WORKS) };
        Left { works: Mutex::new(works), any: AtomicBool::new(false) }
    }

    /// Leaves work. Its thread then [tries the lock](super::Shared::serve_left) once.
    pub(super) fn leave(&self, work: Work) {
        self.works.lock().left.push(work);
        self.any.swap(true, Ordering::AcqRel);
    }

    /// Whether there may be work, for a thread that has just released the lock.
    #[inline]
    pub(super) fn any(&self) -> bool {
        // As a `fetch_or` of nothing this would be a fence, which costs as much as a hit.
        self.any.compare_exchange(false, false, Ordering::AcqRel, Ordering::Acquire).is_err()
    }

    /// True if there is none but what other threads are leaving.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Relaxed)
    }

    /// Takes all work.
    pub(super) fn take(&self) -> Vec<Work> {
        self.any.swap(false, Ordering::AcqRel);
        let mut works = self.works.lock();
        let spare = std::mem::take(&mut works.spare);
        std::mem::replace(&mut works.left, spare)
    }

    /// Answers whom made work concerns.
    pub(super) fn answer(&self, mut made: Vec<Work>) {
        for work in made.drain(..) {
            if let Work::Other(mut work) = work {
                // A waker that panics is of this work alone.
                _ = caught(move || work.answer());
            }
        }
        self.works.lock().spare = made;
    }
}

impl Locked<'_> {
    /// Does what was left before this thread took the lock.
    #[inline(never)]
    pub(super) fn make_left(&mut self) -> Vec<Work> {
        let mut works = self.shared().left.take();
        for work in &mut works {
            match work {
                Work::Pin(pin) => self.unpin(*pin),
                Work::Other(work) => work.make(self),
            }
        }
        works
    }
}

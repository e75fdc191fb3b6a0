//! The one lock. Every unlock serves the requests for slots.

use std::ops::{Deref, DerefMut};

use super::{Shared, State};
use crate::sync::MutexGuard;

impl Shared {
    pub(crate) fn lock(&self) -> Locked<'_> {
        let state = Some(self.state.lock());
        #[cfg(feature = "sim")]
        {
            LOCKS_HELD.set(LOCKS_HELD.get() + 1);
            LOCKS_TAKEN.set(LOCKS_TAKEN.get() + 1);
        }
        Locked { shared: self, state }
    }

    /// Grants available slots to the requests that wait, and wakes the task that raises priorities.
    #[cold]
    fn unlock_and_serve(&self, mut state: MutexGuard<'_, State>) {
        let granted = self.grant_slots(&mut state);
        let is_raised = !state.raised.is_empty();
        unlock(state);
        if is_raised {
            self.raised.notify_one();
        }
        granted.into_iter().for_each(|grant| grant.send(self));
    }
}

#[inline]
fn unlock(state: MutexGuard<'_, State>) {
    drop(state);
    #[cfg(feature = "sim")]
    LOCKS_HELD.set(LOCKS_HELD.get() - 1);
}

#[cfg(feature = "sim")]
std::thread_local! {
    /// Index locks that this thread holds.
    static LOCKS_HELD: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    /// Index locks that this thread has taken so far.
    static LOCKS_TAKEN: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Number of index locks that this thread has taken so far.
#[cfg(feature = "sim")]
pub fn locks_taken() -> u64 {
    LOCKS_TAKEN.get()
}

/// True while this thread holds the index lock of a cache. Nothing that may block, such as a log, may happen then:
/// every caller would wait for it.
#[cfg(feature = "sim")]
pub fn holds_lock() -> bool {
    LOCKS_HELD.get() > 0
}

/// The state, locked. The unlock grants available slots to the requests that wait, first come, first served.
///
/// Many events free slots, some of them several: the end of a fill makes copies in other tiers evictable, an evicted
/// suffix its prefix. None of them looks for requests. Wakers run after the unlock: they are callers' code, and may
/// drop a future that locks.
pub(crate) struct Locked<'a> {
    shared: &'a Shared,
    /// `None` once unlocked.
    state: Option<MutexGuard<'a, State>>,
}

impl Deref for Locked<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        self.state.as_ref().expect("locked until it is dropped")
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect("locked until it is dropped")
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let Some(state) = self.state.take() else { return };
        if state.slot_requests.is_empty() && state.raised.is_empty() {
            unlock(state);
        } else {
            self.shared.unlock_and_serve(state);
        }
    }
}

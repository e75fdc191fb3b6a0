//! Room that callers take up, of which there is so much: among the commands to the reactor, and among its reads of
//! device blocks.
//!
//! Room that comes free is no waiter's. As many waiters are woken as there is room for, the first come first, and the
//! first of them to be polled takes it; all are woken when nothing is taken. So a waiter that is not polled holds up
//! nobody: the room that it leaves wakes others with the next that comes free, and while somebody waits some is taken.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::oneshot;

use super::Shared;
use crate::{
    error::{Error, Result},
    fork::Home,
    shield::shield,
    sync::Mutex,
};

/// Commands that may be queued before those who ask wait; what is under way is bounded by
/// [`Config::movements_max`](crate::Config::movements_max).
pub(super) const COMMANDS_MAX: u32 = 1024;

/// What callers take up, and those who wait for some. Its lock may be taken under the state's, never around it.
#[derive(Clone)]
pub(crate) struct Rooms(Arc<Shares>);

struct Shares {
    count: Mutex<Count>,
    home: Home,
}

struct Count {
    taken: u32,
    max: u32,
    is_closed: bool,
    /// By their numbers, which grow from caller to caller. Without those that were woken.
    waiting: BTreeMap<u64, Waiter>,
    /// Callers that waited so far.
    waited: u64,
}

struct Waiter {
    /// Deadline ticks when its wait began.
    since: u64,
    /// Its drop wakes.
    wake: oneshot::Sender<()>,
}

/// Room for one. Its drop makes it free again, and wakes callers: never under the state's lock.
pub(crate) struct Room(Rooms);

/// Why there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// It is taken, or others came before.
    Full,
    Closed,
}

/// One who waits, and is in the line until this is dropped.
struct Waiting<'a> {
    rooms: &'a Rooms,
    number: u64,
    woken: oneshot::Receiver<()>,
}

impl Shared {
    /// Room of `rooms`, for which a caller waits up to its deadline. Cancel safe.
    pub(crate) async fn room(&self, rooms: &Rooms, what: &'static str) -> Result<Room> {
        let (since, mut number) = (self.looks(), None);
        loop {
            let mut waiting = match rooms.enter(&mut number, since) {
                Ok(room) => return Ok(room),
                Err(None) => return Err(Error::Closed),
                Err(Some(_)) if self.is_overdue(since) => return Err(self.timeout(what)),
                Err(Some(waiting)) => waiting,
            };
            self.watch.notify_one();
            // An error: the sender wakes by its drop.
            _ = shield(&mut waiting.woken).await;
        }
    }

    /// Wakes those who have waited for room past their deadline.
    pub(crate) fn give_up_overdue_rooms(&self) {
        for rooms in [&self.commands, &self.device_reads] {
            rooms.wake(|count| {
                let overdue = count.waiting.extract_if(.., |_, waiter| self.is_overdue(waiter.since));
                overdue.map(|(_, waiter)| waiter).collect()
            });
        }
    }

    /// Whether a caller waits for room.
    pub(super) fn is_room_awaited(&self) -> bool {
        [&self.commands, &self.device_reads].iter().any(|rooms| !rooms.0.count.lock().waiting.is_empty())
    }

    /// Gives no room from now on.
    pub(crate) fn close_rooms(&self) {
        for rooms in [&self.commands, &self.device_reads] {
            rooms.wake(|count| {
                count.is_closed = true;
                std::mem::take(&mut count.waiting).into_values().collect()
            });
        }
    }
}

impl Rooms {
    pub(super) fn new(max: u32) -> Self {
        let count = Count { taken: 0, max, is_closed: false, waiting: BTreeMap::new(), waited: 0 };
        Rooms(Arc::new(Shares { count: Mutex::new(count), home: Home::here() }))
    }

    /// Room, if there is some at once.
    pub(crate) fn try_take(&self) -> std::result::Result<Room, NoRoom> {
        let mut count = self.0.count.lock();
        count.check(None)?;
        count.taken += 1;
        Ok(Room(self.clone()))
    }

    /// How much room there is in all.
    pub(super) fn max(&self) -> u32 {
        self.0.count.lock().max
    }

    /// Whether there is room at this moment.
    pub(crate) fn any(&self) -> bool {
        self.0.count.lock().check(None).is_ok()
    }

    /// Room that is taken, and callers that wait for some.
    pub(crate) fn in_use(&self) -> (u32, usize) {
        let count = self.0.count.lock();
        (count.taken, count.waiting.len())
    }

    /// Room, or a place in the line, which has the caller's `number` once it has one; neither once it is closed.
    fn enter(&self, number: &mut Option<u64>, since: u64) -> std::result::Result<Room, Option<Waiting<'_>>> {
        let mut count = self.0.count.lock();
        match count.check(*number) {
            Ok(()) => {
                count.taken += 1;
                Ok(Room(self.clone()))
            }
            Err(NoRoom::Closed) => Err(None),
            Err(NoRoom::Full) => {
                let number = *number.get_or_insert(count.waited);
                count.waited = count.waited.max(number + 1);
                let (wake, woken) = oneshot::channel();
                let earlier = count.waiting.insert(number, Waiter { since, wake });
                assert!(earlier.is_none(), "a caller waits in one place");
                Err(Some(Waiting { rooms: self, number, woken }))
            }
        }
    }

    /// Wakes those that `select` takes off the line, after the unlock: wakers are callers' code.
    fn wake(&self, select: impl FnOnce(&mut Count) -> Vec<Waiter>) {
        // Also where the reactor has panicked.
        let selected = self.0.count.lock_unless_poisoned().map(|mut count| select(&mut count));
        selected.into_iter().flatten().for_each(|waiter| drop(waiter.wake));
    }
}

impl Count {
    /// Whether there is room for a caller, after those that wait with a smaller `number`: a new one has none.
    fn check(&self, number: Option<u64>) -> std::result::Result<(), NoRoom> {
        let is_first = self.waiting.first_key_value().is_none_or(|(&first, _)| number.is_some_and(|own| own < first));
        match (self.is_closed, is_first && self.taken < self.max) {
            (true, _) => Err(NoRoom::Closed),
            (false, true) => Ok(()),
            (false, false) => Err(NoRoom::Full),
        }
    }

    /// Takes those off the line that room which came free wakes.
    fn freed(&mut self) -> Vec<Waiter> {
        self.taken -= 1;
        let woken = if self.taken == 0 { usize::MAX } else { (self.max - self.taken) as usize };
        std::iter::from_fn(|| self.waiting.pop_first()).take(woken).map(|(_, waiter)| waiter).collect()
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.0.wake(Count::freed);
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.rooms.0.home.is_here() {
            return;
        }
        // First: its own waker is not to be woken.
        self.woken.close();
        self.rooms.wake(|count| count.waiting.remove(&self.number).into_iter().collect());
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, sync::Arc, sync::atomic::Ordering};

    use futures_util::FutureExt;

    use super::*;
    use crate::{config::Config, state::LOOKS_PER_DEADLINE};

    fn shared() -> Arc<Shared> {
        Shared::of_test(Config::default().block_bytes(4096).host_blocks(1).movements_max(2))
    }

    #[test]
    fn room_that_a_waiter_leaves_goes_to_another_and_newcomers_wait_behind() {
        let shared = shared();
        let rooms = &shared.commands;
        let taken = [rooms.try_take().expect("two"), rooms.try_take().expect("of two")];
        let [mut first, mut second, mut gone, mut third] = [(); 4].map(|()| Box::pin(shared.room(rooms, "room")));
        for waits in [&mut first, &mut second, &mut gone, &mut third] {
            assert!(waits.now_or_never().is_none());
        }
        drop(gone);
        assert_eq!(rooms.in_use(), (2, 3), "who has left waits no more");
        let [one, other] = taken;
        drop(one);
        assert_eq!(rooms.in_use(), (1, 2), "the first is woken");
        assert_eq!(rooms.try_take().err(), Some(NoRoom::Full), "others came before");
        assert!((&mut second).now_or_never().is_none(), "nobody woke it");
        drop(other);
        assert_eq!(rooms.in_use(), (0, 0), "nothing is taken, and all are woken");
        let third = (&mut third).now_or_never().expect("woken").expect("room");
        let second = (&mut second).now_or_never().expect("woken").expect("room");
        assert!((&mut first).now_or_never().is_none(), "it came late");
        drop((second, third));
        assert!((&mut first).now_or_never().is_some_and(|room| room.is_ok()));
        assert_eq!(rooms.in_use(), (0, 0));
    }

    #[test]
    fn a_wait_for_room_ends_at_its_deadline_or_with_the_cache() {
        let shared = shared();
        for rooms in [&shared.commands, &shared.device_reads] {
            let _taken = [rooms.try_take().expect("two"), rooms.try_take().expect("of two")];
            let mut waits = pin!(shared.room(rooms, "room"));
            assert!(waits.as_mut().now_or_never().is_none() && shared.is_room_awaited());
            for _ in 0..=LOOKS_PER_DEADLINE {
                shared.give_up_overdue_rooms();
                assert!(waits.as_mut().now_or_never().is_none(), "its time has not come");
                shared.looks.fetch_add(1, Ordering::Relaxed);
            }
            shared.give_up_overdue_rooms();
            assert!(matches!(waits.now_or_never(), Some(Err(Error::Timeout { what: "room", .. }))));
            assert!(!shared.is_room_awaited());
        }
        let _taken = [(); 2].map(|()| shared.commands.try_take().expect("room"));
        let mut waits = pin!(shared.room(&shared.commands, "room"));
        assert!(waits.as_mut().now_or_never().is_none());
        shared.close();
        assert!(matches!(waits.now_or_never(), Some(Err(Error::Closed))));
        assert_eq!(shared.commands.try_take().err(), Some(NoRoom::Closed));
    }
}

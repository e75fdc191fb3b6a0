//! Single flight: one movement per key and destination, for any number of waiters.
//!
//! Pure data.

mod table;
#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::sync::oneshot;

use self::table::{Placed, Table};
use super::{Few, Outcome};
use crate::{
    block::{BlockKey, Tier},
    index::{EntryId, KeyHasher},
    urgency::Urgency,
};

/// Those who wait for a movement: mostly one.
pub(crate) type Waiters = Few<oneshot::Sender<Outcome>>;

/// Waiters of movements that are overdue, each with the tier of which its block waits for a slot.
pub(crate) type Overdue = Vec<(oneshot::Sender<Outcome>, Option<Tier>)>;

/// Whether a movement has a waiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// A caller or another movement waits for it.
    Awaited,
    /// A prefetch or a write-back.
    Background,
}

/// The waiters of one movement.
pub(crate) struct Flight {
    /// Tells it from earlier and later ones of the same key.
    pub(crate) number: u64,
    /// The entry that it moves; [`EntryId::NONE`] once that is gone. If it was removed, the key may name another one.
    entry: EntryId,
    class: Class,
    /// The reactor has started it. A promotion begins with its caller, and starts when its command is served.
    started: bool,
    /// Its waiters got a timeout.
    overdue: bool,
    /// The tier of which it waits for a slot.
    pub(crate) slot_wanted: Option<Tier>,
    pub(crate) waiters: Waiters,
    /// `Some` if a write to disk follows, of the block that the key names when this movement ends: the waiters for that
    /// write.
    next: Option<Waiters>,
}

/// Movements in flight, by key and destination.
pub(crate) struct Flights {
    by_target: Table<Flight>,
    /// Movements that may become overdue, with their places in the table, by number, the oldest first. Also some that
    /// have ended: no more than there are others, and [`ENDED_MAX`].
    by_age: VecDeque<(u64, u32)>,
    /// The last number that was given. Read without the lock, by the task that watches the clock.
    begun: Arc<AtomicU64>,
    /// Overdue movements in flight.
    overdue: [usize; Tier::COUNT],
    /// Reads to callers' memory that I/O threads make, or will be given: they have no waiters, and are not in the
    /// table.
    pub(super) loads: usize,
    /// Waiters that no movement has, or that have left one, to be dropped after the unlock: a caller's waker goes too,
    /// which may run.
    pub(super) gone: Vec<oneshot::Sender<Outcome>>,
}

/// Movements that have ended and are still listed by age, however few are in flight.
const ENDED_MAX: usize = 64;

/// Movements requested as [`Urgency::Background`] that have a waiter by now.
#[derive(Debug, Default)]
pub(crate) struct Raised {
    /// By number.
    pub(crate) flights: Vec<u64>,
    /// All movements that hold a host slot.
    pub(crate) holders: bool,
}

impl Raised {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.flights.is_empty() && !self.holders
    }
}

/// Why waiters do not wait for a movement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoWait {
    /// No movement is in flight.
    Absent,
    /// It has the largest permitted number of waiters.
    Full,
    /// It is overdue.
    Overdue,
}

impl Flights {
    /// No flights. `begun` holds the number of the latest movement from now on.
    pub(crate) fn new(begun: Arc<AtomicU64>, hasher: KeyHasher) -> Self {
        Flights {
            by_target: Table::new(hasher),
            by_age: VecDeque::new(),
            begun,
            overdue: [0; Tier::COUNT],
            loads: 0,
            gone: Vec::new(),
        }
    }

    /// True while a movement of `key` to `tier` is in flight.
    pub(crate) fn contains(&self, key: &BlockKey, tier: Tier) -> bool {
        self.by_target.get(key, tier).is_some()
    }

    /// The entry that the movement of `key` to `tier` moves, while it is in flight.
    pub(crate) fn entry(&self, key: &BlockKey, tier: Tier) -> Option<EntryId> {
        self.by_target.get(key, tier).map(|flight| flight.entry)
    }

    /// Notes that the entry of a movement is gone while the movement is in flight: another block may get its id.
    pub(crate) fn forget_entry(&mut self, key: &BlockKey, tier: Tier) {
        if let Some(flight) = self.by_target.get_mut(key, tier) {
            flight.entry = EntryId::NONE;
        }
    }

    /// True if the block of `key` is being written, or will be when the movement in flight ends.
    pub(crate) fn is_written(&self, key: &BlockKey) -> bool {
        self.is_followed(key) || self.contains(key, Tier::Disk)
    }

    /// Whether a write follows the movement of `key` to host memory.
    pub(crate) fn is_followed(&self, key: &BlockKey) -> bool {
        self.by_target.get(key, Tier::Host).is_some_and(|flight| flight.next.is_some())
    }

    /// Keys of the blocks that are being written, or will be when the movement in flight ends. In no order.
    pub(crate) fn writes(&self) -> impl Iterator<Item = BlockKey> + '_ {
        let is_write = |placed: &&Placed<Flight>| placed.tier == Tier::Disk || placed.value.next.is_some();
        self.by_target.iter().filter(is_write).map(|placed| placed.key)
    }

    /// The movement of `key` to `tier`, while it is in flight.
    pub(crate) fn get_mut(&mut self, key: &BlockKey, tier: Tier) -> Option<&mut Flight> {
        self.by_target.get_mut(key, tier)
    }

    /// Joins the movement in flight, if there is one: what receives its outcome.
    pub(crate) fn join(
        &mut self,
        key: &BlockKey,
        tier: Tier,
        waiters_max: u32,
    ) -> Result<oneshot::Receiver<Outcome>, NoWait> {
        let flight = self.by_target.get_mut(key, tier).ok_or(NoWait::Absent)?;
        if flight.overdue {
            return Err(NoWait::Overdue);
        }
        if !has_room(&mut flight.waiters, 1, waiters_max, &mut self.gone) {
            return Err(NoWait::Full);
        }
        let (sender, receiver) = oneshot::channel();
        flight.waiters.push(sender);
        Ok(receiver)
    }

    /// Has waiters wait for a write of `entry`: for the movement in flight, if that is one, else for the write that
    /// follows it, which is of the block that `key` names when it ends. That follows whatever this returns, unless no
    /// movement is in flight. Gives waiters back that cannot wait.
    pub(crate) fn wait_for_write(
        &mut self,
        (key, tier): (&BlockKey, Tier),
        entry: EntryId,
        waiters: Waiters,
        waiters_max: u32,
    ) -> Result<(), (NoWait, Waiters)> {
        let Some(flight) = self.by_target.get_mut(key, tier) else { return Err((NoWait::Absent, waiters)) };
        let is_of_entry = tier == Tier::Disk && flight.entry == entry;
        let others = if is_of_entry { &mut flight.waiters } else { flight.next.get_or_insert_default() };
        if flight.overdue {
            return Err((NoWait::Overdue, waiters));
        }
        if !has_room(others, waiters.len(), waiters_max, &mut self.gone) {
            return Err((NoWait::Full, waiters));
        }
        others.extend(waiters);
        Ok(())
    }

    /// Has those who wait for the write of `key` wait for another one, which follows it.
    pub(super) fn write_again(&mut self, key: &BlockKey) {
        if let Some(flight) = self.by_target.get_mut(key, Tier::Disk) {
            let waiters = std::mem::take(&mut flight.waiters);
            flight.next.get_or_insert_default().extend(waiters);
        }
    }

    /// Begins a movement of `entry`, with its first waiters; returns its number. One that is not `started` is
    /// [started](Self::start) later.
    pub(crate) fn begin(
        &mut self,
        (key, tier): (&BlockKey, Tier),
        entry: EntryId,
        class: Class,
        waiters: Waiters,
        started: bool,
    ) -> u64 {
        let number = self.next_number();
        let flight = Flight { number, entry, class, started, overdue: false, slot_wanted: None, waiters, next: None };
        let place = self.by_target.insert(key, tier, flight).expect("one movement per key and tier");
        self.forget_ended();
        self.by_age.push_back((number, place));
        number
    }

    /// Takes movements that have ended off the list by age: those before all others, and all once they are too many.
    fn forget_ended(&mut self) {
        let Flights { by_target, by_age, .. } = self;
        let is_in_flight = |&(number, place): &(u64, u32)| is_at(by_target, number, place);
        while by_age.front().is_some_and(|oldest| !is_in_flight(oldest)) {
            by_age.pop_front();
        }
        if by_age.len() > 2 * by_target.len() + ENDED_MAX {
            by_age.retain(is_in_flight);
        }
    }

    /// A new number, for a movement that begins or for a request in the same queue.
    pub(crate) fn next_number(&mut self) -> u64 {
        // Under the state's lock, so no other thread changes the counter.
        self.begun.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// How urgent the movement of `key` to `tier` is.
    pub(crate) fn urgency(&self, key: &BlockKey, tier: Tier) -> Urgency {
        match self.by_target.get(key, tier) {
            Some(Flight { class: Class::Background, number, .. }) => Urgency::Background(*number),
            _ => Urgency::Awaited,
        }
    }

    /// How urgent the movement of this number is, which had no waiter.
    pub(crate) fn urgency_of(&self, number: u64) -> Urgency {
        let listed = self.by_age.binary_search_by_key(&number, |(number, _)| *number);
        let flight = listed.ok().and_then(|at| self.by_target.at(self.by_age[at].1));
        match flight.map(|placed| &placed.value) {
            Some(flight) if flight.number == number && flight.class == Class::Awaited => Urgency::Awaited,
            _ => Urgency::Background(number),
        }
    }

    /// Whether the movement of `key` to `tier` has a waiter.
    pub(crate) fn class(&self, key: &BlockKey, tier: Tier) -> Class {
        self.by_target.get(key, tier).map_or(Class::Awaited, |flight| flight.class)
    }

    /// Marks a movement as awaited; returns its number if it was not.
    pub(crate) fn raise(&mut self, key: &BlockKey, tier: Tier) -> Option<u64> {
        let flight = self.by_target.get_mut(key, tier)?;
        (std::mem::replace(&mut flight.class, Class::Awaited) == Class::Background).then_some(flight.number)
    }

    /// Marks the movement as started. False if there is none, or if it has been started already.
    #[must_use = "a movement that is started must be ended"]
    pub(crate) fn start(&mut self, key: &BlockKey, tier: Tier) -> bool {
        self.by_target.get_mut(key, tier).is_some_and(|flight| !std::mem::replace(&mut flight.started, true))
    }

    /// Ends a movement. Returns its waiters, to be answered after the unlock, and those for the write that follows, if
    /// one does.
    pub(crate) fn finish(&mut self, key: &BlockKey, tier: Tier) -> (Waiters, Option<Waiters>) {
        let Flights { by_target, overdue, .. } = self;
        let finished = by_target.remove(key, tier, |flight| {
            overdue[tier as usize] -= usize::from(flight.overdue);
            (std::mem::take(&mut flight.waiters), flight.next.take())
        });
        finished.unwrap_or_default()
    }

    /// Marks movements up to the number `begun` that are still in flight as overdue, so many of them at most. Returns
    /// their waiters, each with the tier of which its block waits for a slot, and whether these were all.
    pub(crate) fn take_overdue(&mut self, begun: u64, most: usize) -> (Overdue, bool) {
        let mut waiters = Vec::new();
        for _ in 0..most {
            let Some((number, place)) = self.by_age.pop_front_if(|(number, _)| *number <= begun) else { break };
            if !is_at(&self.by_target, number, place) {
                continue;
            }
            let Placed { key, tier, .. } = *self.by_target.at(place).expect("it is there");
            // A block on its way to the device may be waiting for a slot of the host tier.
            let slot_wanted = Tier::ALL.into_iter().find_map(|tier| self.by_target.get(&key, tier)?.slot_wanted);
            let flight = self.by_target.get_mut(&key, tier).expect("it is there");
            flight.overdue = true;
            self.overdue[tier as usize] += 1;
            let next = flight.next.iter_mut().flat_map(std::mem::take);
            let told = std::mem::take(&mut flight.waiters).into_iter().chain(next);
            waiters.extend(told.map(|waiter| (waiter, slot_wanted)));
        }
        (waiters, self.by_age.front().is_none_or(|(number, _)| *number > begun))
    }

    /// Number of movements to a tier that are in flight and overdue.
    pub(crate) fn overdue(&self, tier: Tier) -> usize {
        self.overdue[tier as usize]
    }

    /// True while a movement in flight is overdue.
    pub(crate) fn any_overdue(&self) -> bool {
        self.overdue != [0; Tier::COUNT]
    }

    /// Ends all movements.
    pub(crate) fn finish_all(&mut self) -> Vec<Flight> {
        self.by_age.clear();
        self.overdue = [0; Tier::COUNT];
        self.by_target.drain().collect()
    }

    /// Number of movements in flight.
    pub(crate) fn len(&self) -> usize {
        self.by_target.len()
    }

    /// Whether anything is in flight, also what is not listed.
    pub(crate) fn any(&self) -> bool {
        self.len() + self.loads > 0
    }

    /// A caller has planned a read to its memory. [`Shared::end_loads`](super::Shared::end_loads) ends it.
    pub(crate) fn begin_load(&mut self) {
        self.loads += 1;
    }
}

/// True if the movement of this number is in flight, and at this place.
fn is_at(flights: &Table<Flight>, number: u64, place: u32) -> bool {
    flights.at(place).is_some_and(|placed| placed.value.number == number)
}

/// Whether a movement may have so many more waiters. Those that left make room: a movement without a caller begins with
/// a dropped waiter.
fn has_room(waiters: &mut Waiters, more: usize, most: u32, gone: &mut Vec<oneshot::Sender<Outcome>>) -> bool {
    if waiters.len() + more > most as usize {
        let (left, waiting): (Waiters, Waiters) =
            std::mem::take(waiters).into_iter().partition(oneshot::Sender::is_closed);
        *waiters = waiting;
        gone.extend(left);
    }
    waiters.len() + more <= most as usize
}

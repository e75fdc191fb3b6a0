//! Single flight: one movement per key and destination, for any number of waiters.
//!
//! Pure data: `M` is the message that answers a waiter, `U` a block that waits to be verified.

mod table;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::sync::oneshot;

use self::table::Table;
use crate::{
    block::{BlockKey, Tier},
    index::{EntryId, KeyHasher},
    sync::Mutex,
    urgency::Urgency,
};

/// Whether a movement has a waiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// A caller or another movement waits for it.
    Awaited,
    /// A prefetch or a write-back.
    Background,
}

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

/// The waiters of one movement.
pub(crate) struct Flight<M, U> {
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
    pub(crate) waiters: Vec<oneshot::Sender<M>>,
    /// `Some` if a write to disk follows, of the block that the key names when this movement ends: the waiters for that
    /// write.
    next: Option<Vec<oneshot::Sender<M>>>,
    /// The block as it was read, verified by the first ticket that claims it. Its movement has ended.
    pub(crate) unverified: Option<Arc<Unclaimed<U>>>,
    /// Tickets in flight: not dropped, and not redeemed after another ticket had claimed the block.
    pub(crate) tickets: u32,
}

/// A block that waits to be verified. A waiter claims it without the state's lock, and then owns it alone.
pub(crate) struct Unclaimed<U>(Mutex<Option<U>>);

impl<U> Unclaimed<U> {
    pub(crate) fn new(block: U) -> Arc<Self> {
        Arc::new(Unclaimed(Mutex::new(Some(block))))
    }

    /// The block, for the first claim.
    pub(crate) fn claim(&self) -> Option<U> {
        self.0.lock().take()
    }

    fn is_claimed(&self) -> bool {
        self.0.lock().is_none()
    }
}

/// A started movement: its number, and the entry that it moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Started {
    pub(crate) number: u64,
    pub(crate) entry: EntryId,
}

/// Movements in flight, by key and destination.
pub(crate) struct Flights<M, U> {
    by_target: Table<Flight<M, U>>,
    /// Movements that may become overdue, by number, the oldest first.
    by_age: BTreeMap<u64, (BlockKey, Tier)>,
    /// The last number that was given. Read without the lock, by the task that watches the clock.
    begun: Arc<AtomicU64>,
    /// Overdue movements in flight.
    overdue: usize,
    /// Waiters that have left, to be dropped after the unlock: the waker of a caller may go with one.
    pub(super) gone: Vec<oneshot::Sender<M>>,
}

/// What a flight leaves when it ends.
pub(crate) struct Finished<M> {
    /// Its waiters, which the caller answers after releasing the lock.
    pub(crate) waiters: Vec<oneshot::Sender<M>>,
    /// The waiters of the write that follows, if one does.
    pub(crate) next: Option<Vec<oneshot::Sender<M>>>,
}

/// The result of joining a flight.
pub(crate) enum Joined<M> {
    /// A movement is in flight; its outcome arrives here.
    Waiting(oneshot::Receiver<M>),
    /// It has been read and waits to be verified.
    Unverified,
    /// No movement is in flight.
    None,
    /// It has the largest permitted number of waiters.
    Full,
    /// It is overdue.
    Overdue,
}

impl<M, U> Flight<M, U> {
    /// True if a write to disk follows it.
    pub(crate) fn is_followed(&self) -> bool {
        self.next.is_some()
    }

    /// True if its block has been read and not claimed.
    pub(crate) fn is_unclaimed(&self) -> bool {
        self.unverified.as_ref().is_some_and(|block| !block.is_claimed())
    }
}

impl<M, U> Flights<M, U> {
    /// No flights. `begun` holds the number of the latest movement from now on.
    pub(crate) fn new(begun: Arc<AtomicU64>, hasher: KeyHasher) -> Self {
        Flights { by_target: Table::new(hasher), by_age: BTreeMap::new(), begun, overdue: 0, gone: Vec::new() }
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
        let followed = self.by_target.get(key, Tier::Host).is_some_and(Flight::is_followed);
        followed || self.contains(key, Tier::Disk)
    }

    /// Keys of the blocks that are being written, or will be when the movement in flight ends. In no order.
    pub(crate) fn writes(&self) -> impl Iterator<Item = BlockKey> + '_ {
        let writes = self.by_target.iter().filter(|(_, tier, flight)| *tier == Tier::Disk || flight.next.is_some());
        writes.map(|(key, ..)| *key)
    }

    /// The movement of `key` to `tier`, while it is in flight.
    pub(crate) fn get_mut(&mut self, key: &BlockKey, tier: Tier) -> Option<&mut Flight<M, U>> {
        self.by_target.get_mut(key, tier)
    }

    /// As [`get_mut`](Self::get_mut), without the waiters that have left.
    pub(crate) fn get_awaited(&mut self, key: &BlockKey, tier: Tier) -> Option<&mut Flight<M, U>> {
        let flight = self.by_target.get_mut(key, tier)?;
        prune(&mut flight.waiters, &mut self.gone);
        Some(flight)
    }

    /// Joins the movement in flight, if there is one.
    pub(crate) fn join(&mut self, key: &BlockKey, tier: Tier, waiters_max: u32) -> Joined<M> {
        let Some(flight) = self.by_target.get_mut(key, tier) else { return Joined::None };
        if flight.is_unclaimed() {
            return Joined::Unverified;
        }
        if flight.overdue {
            return Joined::Overdue;
        }
        wait(&mut flight.waiters, waiters_max, &mut self.gone)
    }

    /// Requests a write of the block that `key` names when the movement in flight ends, and waits for that write. The
    /// write follows whatever this returns, unless no movement is in flight or it comes from disk.
    pub(crate) fn join_next(&mut self, key: &BlockKey, tier: Tier, waiters_max: u32) -> Joined<M> {
        let Some(flight) = self.by_target.get_mut(key, tier) else { return Joined::None };
        if flight.is_unclaimed() {
            return Joined::Unverified;
        }
        let next = flight.next.get_or_insert_default();
        if flight.overdue { Joined::Overdue } else { wait(next, waiters_max, &mut self.gone) }
    }

    /// Has waiters of a write of `entry` wait for the one in flight, or for the one that follows the write of a removed
    /// entry. Gives them back where no write is in flight, or it is overdue.
    pub(crate) fn pass_to_write(
        &mut self,
        key: &BlockKey,
        entry: EntryId,
        waiters: Vec<oneshot::Sender<M>>,
    ) -> std::result::Result<(), Vec<oneshot::Sender<M>>> {
        let Some(flight) = self.by_target.get_mut(key, Tier::Disk) else { return Err(waiters) };
        let of_entry = if flight.entry == entry { &mut flight.waiters } else { flight.next.get_or_insert_default() };
        if flight.overdue {
            return Err(waiters);
        }
        of_entry.extend(waiters);
        Ok(())
    }

    /// Starts a movement of `entry`, with its first waiter.
    pub(crate) fn begin(&mut self, key: &BlockKey, tier: Tier, entry: EntryId, class: Class) -> oneshot::Receiver<M> {
        let (sender, receiver) = oneshot::channel();
        self.begin_for(key, tier, entry, class, vec![sender]);
        receiver
    }

    /// As [`begin`](Self::begin), and marks it as started.
    pub(crate) fn begin_started(
        &mut self,
        key: &BlockKey,
        tier: Tier,
        entry: EntryId,
        class: Class,
        waiters: Vec<oneshot::Sender<M>>,
    ) -> Started {
        self.begin_for(key, tier, entry, class, waiters);
        self.start(key, tier).expect("it has just begun")
    }

    /// Starts a movement of `entry`, with its first waiters.
    fn begin_for(
        &mut self,
        key: &BlockKey,
        tier: Tier,
        entry: EntryId,
        class: Class,
        waiters: Vec<oneshot::Sender<M>>,
    ) {
        let number = self.next_number();
        let flight = Flight {
            number,
            entry,
            class,
            started: false,
            overdue: false,
            slot_wanted: None,
            waiters,
            next: None,
            unverified: None,
            tickets: 0,
        };
        assert!(self.by_target.insert(key, tier, flight), "one movement per key and tier");
        self.by_age.insert(number, (*key, tier));
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
        let flight = self.by_age.get(&number).and_then(|(key, tier)| self.by_target.get(key, *tier));
        match flight {
            Some(Flight { class: Class::Awaited, .. }) => Urgency::Awaited,
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

    /// Marks the movement as started. `None` if there is none, or if it has been started already.
    #[must_use = "a movement that is started must be ended"]
    pub(crate) fn start(&mut self, key: &BlockKey, tier: Tier) -> Option<Started> {
        let flight = self.by_target.get_mut(key, tier).filter(|flight| !flight.started)?;
        flight.started = true;
        Some(Started { number: flight.number, entry: flight.entry })
    }

    /// Ends a movement.
    pub(crate) fn finish(&mut self, key: &BlockKey, tier: Tier) -> Finished<M> {
        let Some(flight) = self.by_target.remove(key, tier) else {
            return Finished { waiters: Vec::new(), next: None };
        };
        match flight.overdue {
            true => self.overdue -= 1,
            false => drop(self.by_age.remove(&flight.number)),
        }
        Finished { waiters: flight.waiters, next: flight.next }
    }

    /// Marks movements up to the number `begun` that are still in flight as overdue. Returns their waiters, each with
    /// the tier of which its block waits for a slot.
    pub(crate) fn take_overdue(&mut self, begun: u64) -> Vec<(oneshot::Sender<M>, Option<Tier>)> {
        let mut waiters = Vec::new();
        while let Some(oldest) = self.by_age.first_entry()
            && *oldest.key() <= begun
        {
            let target = oldest.remove();
            // A block on its way to the device may be waiting for a slot of the host tier.
            let slot_wanted = Tier::ALL.into_iter().find_map(|tier| self.by_target.get(&target.0, tier)?.slot_wanted);
            let flight = self.by_target.get_mut(&target.0, target.1).expect("every movement by age is in flight");
            // It was read in time: the first waiter to be polled ends it.
            if flight.is_unclaimed() {
                continue;
            }
            flight.overdue = true;
            self.overdue += 1;
            let next = flight.next.iter_mut().flat_map(std::mem::take);
            let told = std::mem::take(&mut flight.waiters).into_iter().chain(next);
            waiters.extend(told.map(|waiter| (waiter, slot_wanted)));
        }
        waiters
    }

    /// True while a movement in flight is overdue.
    pub(crate) fn any_overdue(&self) -> bool {
        self.overdue > 0
    }

    /// Keys of the blocks that wait to be verified.
    pub(crate) fn unverified(&self) -> Vec<BlockKey> {
        let waiting = self.by_target.iter().filter(|(_, _, flight)| flight.is_unclaimed());
        waiting.map(|(key, ..)| *key).collect()
    }

    /// Ends all movements.
    pub(crate) fn finish_all(&mut self) -> Vec<Flight<M, U>> {
        self.by_age.clear();
        self.overdue = 0;
        self.by_target.drain().collect()
    }

    /// Number of movements in flight.
    pub(crate) fn len(&self) -> usize {
        self.by_target.len()
    }
}

/// Takes the waiters that have left.
fn prune<M>(waiters: &mut Vec<oneshot::Sender<M>>, gone: &mut Vec<oneshot::Sender<M>>) {
    gone.extend(waiters.extract_if(.., |waiter| waiter.is_closed()));
}

/// Adds a waiter to a movement, unless it has the largest permitted number.
fn wait<M>(waiters: &mut Vec<oneshot::Sender<M>>, waiters_max: u32, gone: &mut Vec<oneshot::Sender<M>>) -> Joined<M> {
    if waiters.len() >= waiters_max as usize {
        // Waiters that left make room: a movement without a caller begins with a dropped waiter.
        prune(waiters, gone);
    }
    if waiters.len() >= waiters_max as usize {
        return Joined::Full;
    }
    let (sender, receiver) = oneshot::channel();
    waiters.push(sender);
    Joined::Waiting(receiver)
}

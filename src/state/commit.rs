//! Stores: making a filled host slot visible, and the write that follows.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{Class, Few, Filling, Locked, NoWait, Outcome, PendingWrite, Pin, Shared, State, Waiters, is_of_memory};
use crate::{
    block::{BlockKey, Route, Tier},
    config::Eviction,
    disk::Origin,
    error::{Error, Result},
    index::EntryId,
};

/// The next step of a store.
pub(crate) enum Committed {
    /// None: the policy is satisfied.
    Done,
    /// Wait for the outcome of a write that is in flight, or follows the movement in flight.
    Wait(oneshot::Receiver<Outcome>),
    /// Send the write to the reactor, and wait for its outcome.
    Write(PendingWrite, oneshot::Receiver<Outcome>),
}

/// What a store finds of its block.
pub(crate) enum Known {
    /// It is resident, or refused.
    Yes(Committed),
    /// The disk has it from an earlier run, whose end may have cut its write off: only a read tells.
    Unproven,
    /// Its bytes are needed.
    No,
}

/// The end of a flight: the answers to its waiters, sent after the lock is released, and the write that follows. Boxed:
/// every read would move it.
pub(crate) type FlightEnd = (Few<(oneshot::Sender<Outcome>, Outcome)>, Option<Box<PendingWrite>>);

impl Shared {
    /// Begins a store: as [`store_known`](Locked::store_known), and with a slot for a block whose bytes are needed, if
    /// one is available.
    pub(crate) fn begin_store(
        self: &Arc<Self>,
        key: &BlockKey,
        parent: Option<&BlockKey>,
    ) -> Result<(Known, Option<Filling>)> {
        let mut state = self.lock();
        let known = state.store_known(key, parent)?;
        let slot = if matches!(known, Known::No) { state.acquire(Tier::Host) } else { None };
        Ok((known, slot))
    }

    /// Makes a filled host slot visible under `key`.
    pub(crate) fn commit(
        self: &Arc<Self>,
        key: &BlockKey,
        parent: Option<&BlockKey>,
        filling: Filling,
        checksum: u64,
    ) -> Result<Committed> {
        self.commit_if(key, parent, filling, checksum, Route::CallerToHost, || true)
    }

    /// As [`commit`](Self::commit), of a block that came by `route`, if `is_wanted` is true under the lock.
    pub(crate) fn commit_if(
        self: &Arc<Self>,
        key: &BlockKey,
        parent: Option<&BlockKey>,
        filling: Filling,
        checksum: u64,
        route: Route,
        is_wanted: impl FnOnce() -> bool,
    ) -> Result<Committed> {
        let mut state = self.lock();
        if let Err(error) = state.check_open() {
            filling.release(&mut state);
            return Err(error);
        }
        // What was brought from the remote tier is awaited or announced.
        if !is_wanted() || route == Route::CallerToHost && state.refuses_store(key, parent) {
            filling.release(&mut state);
            return Ok(Committed::Done);
        }
        let id = state.index.insert(*key, parent.copied());
        let is_new = state.index.begin_fill(id, Tier::Host);
        if is_new {
            let published = state.index.complete_fill(id, Tier::Host, filling.slot());
            assert!(published, "nothing can come between the two");
            state.checksums[Tier::Host as usize][filling.slot() as usize] = checksum;
            filling.published();
        } else {
            // Another caller stored it meanwhile, or it is being read from disk: the bytes are the same.
            filling.release(&mut state);
            state.check_arrives(id)?;
        }
        self.metrics.stored_locked(is_new, route, &mut state);
        let class = if route == Route::CallerToHost { Class::Awaited } else { Class::Background };
        let committed = state.apply_policy(id, key, class);
        drop(state);
        self.metrics.export_stored(is_new, route);
        if is_new && route == Route::CallerToHost {
            self.note_stored(key);
        }
        committed
    }

    /// Ends the flight of the write of `id` as [`end_flight`](Locked::end_flight) does, and gives its source back.
    ///
    /// The block is clean then, also if the disk refused it, which is noted: otherwise the host tier would fill with
    /// blocks that cannot be evicted. Where memory of a caller was not there, the disk refused nothing; if another
    /// caller has stored the block meanwhile, that copy is written instead.
    pub(crate) fn end_write<'a>(
        self: &'a Arc<Self>,
        mut state: Locked<'a>,
        key: &BlockKey,
        id: EntryId,
        source: Option<Arc<Pin>>,
        outcome: Outcome,
    ) -> FlightEnd {
        if source.is_none() && outcome.as_ref().err().is_some_and(is_of_memory) {
            state.write_other_copy(key, id);
        } else {
            state.note_written(key, id, outcome.as_ref().err());
        }
        // A library may still hold it. It keeps the entry, whose id the flight has, until the flight has ended.
        let held = source.and_then(|source| Arc::try_unwrap(source).map(|pin| pin.release(&mut state)).err());
        let end = state.end_flight(key, Tier::Disk, outcome);
        // A pin takes the lock when it is dropped.
        drop(state);
        drop(held);
        end
    }

    /// True if a store of the block is to begin with a read of it.
    pub(crate) fn is_unproven(self: &Arc<Self>, key: &BlockKey) -> bool {
        let mut state = self.lock();
        state.index.find(key).is_some_and(|id| state.is_unproven(id))
    }

    /// Waits for a write to disk.
    pub(crate) async fn written(&self, receiver: oneshot::Receiver<Outcome>) -> Result<()> {
        receiver.await.unwrap_or(Err(Error::Closed)).map(drop)
    }
}

impl State {
    /// True for a block of which the node has no copy but one on disk that is [`Known::Unproven`].
    fn is_unproven(&mut self, id: EntryId) -> bool {
        let on_disk = self.index.slot(id, Tier::Disk).filter(|_| self.index.slot(id, Tier::Host).is_none());
        on_disk.is_some_and(|slot| self.disk_service.reads() && self.disk_slots().origin(slot) == Origin::EARLIER_RUN)
    }
}

impl Locked<'_> {
    /// The next step for a block that is resident already.
    pub(crate) fn store_known(&mut self, key: &BlockKey, parent: Option<&BlockKey>) -> Result<Known> {
        self.check_open()?;
        let id = self.index.find(key);
        let on_disk = id.and_then(|id| self.index.slot(id, Tier::Disk)).filter(|_| self.disk_service.reads());
        let Some(id) = id.filter(|&id| on_disk.is_some() || self.index.slot(id, Tier::Host).is_some()) else {
            return Ok(if self.refuses_store(key, parent) { Known::Yes(Committed::Done) } else { Known::No });
        };
        if self.is_unproven(id) {
            return Ok(Known::Unproven);
        }
        if parent.is_some() {
            self.index.insert(*key, parent.copied());
        }
        self.index.touch(id);
        self.count(&self.shared().metrics.stores_known, 1);
        self.apply_policy(id, key, Class::Awaited).map(Known::Yes)
    }

    /// An error for a block that is being copied to host memory, and that no tier in service has: the copy may fail.
    fn check_arrives(&self, id: EntryId) -> Result<()> {
        match (self.served_tier(id), self.index.best_tier(id)) {
            (None, Some(out_of_service)) => self.check_service(out_of_service),
            _ => Ok(()),
        }
    }

    /// True if a store leaves no trace: there is no disk tier, and host memory refuses the block.
    fn refuses_store(&mut self, key: &BlockKey, parent: Option<&BlockKey>) -> bool {
        self.shared().config.last_tier() == Tier::Host && self.refuses(key, parent, Tier::Host)
    }

    /// True if `tier`, the last one and full, refuses a new block; counts the refusal.
    pub(crate) fn refuses(&mut self, key: &BlockKey, parent: Option<&BlockKey>, tier: Tier) -> bool {
        if self.shared().config.eviction_policy != Eviction::RbRefuse || self.free_slots(tier) > 0 {
            return false;
        }
        let parent_comes = parent.is_some_and(|parent| self.flights.contains(parent, tier));
        let refused = self.index.refuses(key, parent, parent_comes, tier);
        self.count(&self.shared().metrics.tier(tier).refused, u64::from(refused));
        refused
    }

    /// Starts or joins the write of a block to disk. Drop nothing of the result under the lock, for which a slot's drop
    /// waits.
    pub(crate) fn begin_write(
        &mut self,
        id: EntryId,
        key: &BlockKey,
        class: Class,
        waiters_max: u32,
    ) -> Result<Committed> {
        let (sender, receiver) = oneshot::channel();
        match self.write_for(id, key, class, Few::from([sender]), waiters_max) {
            Ok(Some(write)) => Ok(Committed::Write(write, receiver)),
            Ok(None) => Ok(Committed::Wait(receiver)),
            // It is in no memory from which it could be written.
            Err((NoWait::Absent, _)) => Ok(Committed::Done),
            Err((why, _)) => Err(self.refused_waiter(why, waiters_max)),
        }
    }

    /// Has waiters wait for the write of a block that is not on disk; returns the write if it begins. Gives waiters
    /// back that cannot wait.
    ///
    /// | In flight | The block | Its write |
    /// |---|---|---|
    /// | to disk: this entry | | is in flight |
    /// | to disk: a removed entry of this key | | follows, with or without waiters |
    /// | nothing to disk | in memory from which it can be written | begins |
    /// | to host memory | else, as on its way from the device | follows, with or without waiters |
    /// | nothing | else | there is none |
    pub(super) fn write_for(
        &mut self,
        id: EntryId,
        key: &BlockKey,
        class: Class,
        waiters: Waiters,
        waiters_max: u32,
    ) -> std::result::Result<Option<PendingWrite>, (NoWait, Waiters)> {
        let in_flight = match self.flights.entry(key, Tier::Disk) {
            Some(entry) => {
                if entry != id {
                    self.set_dirty(id, key);
                }
                Tier::Disk
            }
            None => match self.pin_source(id, key) {
                Some(pin) => {
                    self.flights.begin((key, Tier::Disk), id, class, waiters, true);
                    return Ok(Some(self.pending_write(key, pin, class)));
                }
                None => Tier::Host,
            },
        };
        self.flights.wait_for_write((key, in_flight), id, waiters, waiters_max)?;
        if class == Class::Awaited {
            self.raise(key, in_flight);
        }
        Ok(None)
    }

    /// Pins a block in memory from which it can be written to disk.
    fn pin_source(&mut self, id: EntryId, key: &BlockKey) -> Option<Pin> {
        let pin = self.pin(id, Tier::Host, Route::HostHit);
        // Only libcufile writes from the device; any other way goes through host memory, which may have no room.
        let from_device = self.cufile.writes() && self.device_service.reads();
        if pin.is_none() && from_device && !self.flights.contains(key, Tier::Host) {
            return self.pin(id, Tier::Device, Route::DeviceHit);
        }
        pin
    }

    /// The answer to each waiter of a movement to `tier`: the first gets the movement's pin, each other one a new one.
    fn answers(
        &mut self,
        waiters: Few<oneshot::Sender<Outcome>>,
        tier: Tier,
        outcome: Outcome,
    ) -> Few<(oneshot::Sender<Outcome>, Outcome)> {
        let pin = match outcome {
            Ok(Some(pin)) => pin,
            Ok(None) => return waiters.into_iter().map(|waiter| (waiter, Ok(None))).collect(),
            Err(error) => return waiters.into_iter().map(|waiter| (waiter, Err(error.clone()))).collect(),
        };
        let (id, route, mut first) = (pin.id(), pin.route(), Some(pin));
        // Since it arrived, it may have been removed, and others may wait for what was stored under its key after that.
        let is_there = self.index.slot(id, tier).is_some();
        let answers = waiters.into_iter().map(|waiter| {
            let pin = if is_there { first.take().or_else(|| self.pin(id, tier, route)) } else { None };
            (waiter, Ok(pin))
        });
        let answers = answers.collect();
        if let Some(unwanted) = first {
            unwanted.release(self);
        }
        answers
    }

    /// Ends a flight, and begins the write that follows it.
    pub(crate) fn end_flight(&mut self, key: &BlockKey, tier: Tier, outcome: Outcome) -> FlightEnd {
        if self.closed {
            self.shared().ended.notify_one();
        }
        let (waiters, next) = self.flights.finish(key, tier);
        // A block that was stored under this key since may be written now, and a request may wait for its slot.
        if tier == Tier::Disk && self.has_waiters(Tier::Host) && self.write_back_is_due(0, 0.0) {
            self.shared().write_back.notify_one();
        }
        let failed = outcome.as_ref().err().cloned();
        let mut answers = self.answers(waiters, tier, outcome);
        let Some(mut next) = next else { return (answers, None) };
        // The result of the waiters for that write if none begins: the block was removed, or is on disk.
        let mut missed = Ok(());
        if let Some(id) = self.index.find(key)
            && self.index.slot(id, Tier::Disk).is_none()
        {
            let class = if next.is_empty() { Class::Background } else { Class::Awaited };
            let writes_back = self.shared().config.writes_back() && class == Class::Background;
            if writes_back && self.index.slot(id, Tier::Host).is_some() {
                self.must_be_written(id, key);
                return (answers, None);
            }
            match self.write_for(id, key, class, next, u32::MAX) {
                Ok(write) => return (answers, write.map(Box::new)),
                Err((why, waiters)) => {
                    next = waiters;
                    if why == NoWait::Overdue {
                        missed = Err(self.timeout("a movement of the block that is overdue"));
                    } else if let (Tier::Host, Some(error)) = (tier, failed) {
                        // It did not arrive in host memory, from which it would be written. Nobody was promised that of
                        // a block that was selected for its uses.
                        if !next.is_empty() || self.shared().config.writes_back() {
                            self.note_refused(key, error.clone());
                        }
                        missed = Err(error);
                    }
                }
            }
        }
        answers.extend(next.into_iter().map(|waiter| (waiter, missed.clone().map(|()| None))));
        (answers, None)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::{
        config::{Config, DiskPath},
        state::DiskWrite,
    };

    /// Two callers store a block, the first from memory of its own that is taken away meanwhile.
    #[test]
    fn the_copy_of_another_caller_is_written_where_memory_is_not_there() {
        let disks = vec![DiskPath::with_blocks("nowhere", 8)];
        let shared = Shared::of_test(Config::default().block_bytes(4096).host_blocks(4).disks(disks));
        let key = BlockKey::new([7; 32]);
        let mut state = shared.lock();
        let id = state.index.insert(key, None);
        let filling = state.acquire(Tier::Disk).expect("a slot");
        assert!(state.begin_disk_write(id, &filling, None).is_some());
        state.flights.begin((&key, Tier::Disk), id, Class::Awaited, Few::default(), true);
        drop(state);
        let copy = shared.lock().acquire(Tier::Host).expect("a slot");
        let Ok(Committed::Wait(mut written)) = shared.commit(&key, None, copy, 2) else {
            panic!("expected a wait for the first caller's write")
        };
        let fault = Error::io("write", "nowhere", io::Error::from_raw_os_error(libc::EFAULT));
        let mut state = shared.lock();
        assert!(!state.end_disk_write(DiskWrite { id, filling }, Some(&fault)));
        let (answers, next) = shared.end_write(state, &key, id, None, Err(fault));
        assert!(answers.is_empty() && written.try_recv().is_err(), "nobody is told of the first caller's memory");
        let PendingWrite { pin, begun, .. } = *next.expect("the other copy is written");
        let Ok((permit, write, _)) = begun else { panic!("there is room") };
        drop(permit);
        let mut state = shared.lock();
        assert!(state.end_disk_write(write, None), "it is on disk");
        let (answers, next) = shared.end_write(state, &key, id, Some(Arc::new(pin)), Ok(None));
        assert!(answers.len() == 1 && next.is_none());
        answers.into_iter().for_each(|(waiter, answer)| drop(waiter.send(answer)));
        assert!(matches!(written.try_recv(), Ok(Ok(None))));
        assert!(shared.begin_report().report().is_ok(), "nothing was refused");
    }
}

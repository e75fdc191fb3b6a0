//! A movement's plan, made under one lock: its way, and what it needs of it.

use std::rc::Rc;

use tokio::sync::oneshot;

use super::{
    Mover,
    route::{self, Shape, View, Want, is_through_host},
};
use crate::{
    block::{BlockKey, FileId, Route, Tier},
    device::CopyEngine,
    error::Result,
    index::EntryId,
    io::Storage,
    state::{Class, Few, Locked, Need, Outcome, Pin, Promotion, Purpose, READ, READ_TO_HOST, Taken, Use, WRITE},
};

/// A movement, and what it has taken so far.
pub(super) struct Trip {
    pub(super) key: BlockKey,
    shape: Shape,
    /// The tier that its flight goes to; `None` for a call's.
    flight: Option<Tier>,
    /// How its look-up counts, once.
    usage: Use,
    pub(super) taken: Taken,
    /// The way that it has tried in vain.
    ruled_out: Option<Route>,
    /// libcufile has read wrong bytes: if a read through host memory gives the right ones, it is at fault.
    pub(super) is_suspect: bool,
    /// The last plan's.
    route: Option<Route>,
    /// The entry of its block, by the last plan's look-up.
    id: Option<EntryId>,
}

/// A block on disk, pinned to be read.
pub(super) struct OnDisk {
    pub(super) pin: Pin,
    pub(super) file: FileId,
    pub(super) offset: u64,
    /// The checksum that it must have.
    pub(super) checksum: u64,
}

impl OnDisk {
    pub(super) fn of(state: &mut Locked<'_>, pin: Pin) -> Self {
        let slots = state.disk_slots();
        let (file, offset) = slots.locate(pin.slot());
        let checksum = slots.meta(pin.slot()).expect("a resident block's slot is committed").checksum;
        OnDisk { pin, file, offset, checksum }
    }
}

/// The next step of a movement.
pub(super) enum Step {
    /// Something is not to be had at once.
    Wait(Need),
    /// No tier in service has the block, or its tier has it no longer.
    Gone,
    /// No tier of the node has the block, and the remote tier offers it. Whether it is counted as a use.
    Remote(Use),
    /// It is in memory, pinned.
    Pinned(Pin),
    /// It is on disk, pinned.
    OnDisk(OnDisk),
    /// It is on its way to a host slot.
    Flight(Flight),
}

/// A movement to a host slot that another one waits for.
pub(super) struct Flight {
    pub(super) outcome: oneshot::Receiver<Outcome>,
    /// It had begun before.
    pub(super) is_joined: bool,
    /// To be carried out by who waits.
    pub(super) begun: Option<Box<Fill>>,
}

/// A fill of a slot that a task has taken on.
pub(super) struct Fill {
    pub(super) trip: Trip,
    pub(super) step: Result<Step>,
}

impl Trip {
    /// The movement of a block to a slot of `tier`, whose flight has begun.
    pub(super) fn to_slot(key: &BlockKey, tier: Tier) -> Self {
        Trip::new(key, Some(tier), Shape::default(), Use::Counted)
    }

    /// The load of a block to a caller's memory.
    pub(super) fn load(key: &BlockKey, shape: Shape, usage: Use) -> Self {
        Trip::new(key, None, shape, usage)
    }

    fn new(key: &BlockKey, flight: Option<Tier>, shape: Shape, usage: Use) -> Self {
        let taken = Taken::default();
        Trip { key: *key, shape, flight, usage, taken, ruled_out: None, is_suspect: false, route: None, id: None }
    }

    /// Chooses the way of its block, which has this entry. `has_cufile`: libcufile is in service for reads.
    pub(super) fn choose(&mut self, state: &Locked<'_>, id: Option<EntryId>, has_cufile: bool) -> Option<Route> {
        let want = match self.flight {
            None => Want::Load,
            Some(Tier::Device) => Want::DeviceSlot,
            Some(_) => Want::HostSlot,
        };
        let view = View {
            held: id.map(|id| state.held(id)).unwrap_or_default(),
            // Of a fill of a host slot it is the movement itself.
            is_moving: want != Want::HostSlot && state.flights.contains(&self.key, Tier::Host),
            has_cufile,
            writes_through: false,
            memory: self.shape,
        };
        self.route = route::choose(want, &view, self.ruled_out);
        self.id = id;
        self.route
    }

    /// Takes what the first transfer of a way needs, pins its source, and begins to fill the slot that it goes to: of a
    /// call, or of a movement whose flight has begun. Under the lock under which the way was chosen.
    pub(super) fn begin_for(&mut self, state: &mut Locked<'_>, route: Route, purpose: Purpose<'_>) -> Step {
        let (needs, tier): (&[Need], _) = match route {
            Route::HostHit => (&[], Tier::Host),
            // Its flight is about to begin, and waits for nothing: without bytes it takes no slot.
            Route::DiskToHost if matches!(purpose, Purpose::NewMovement(_)) => {
                (&[READ, Need::Slot(Tier::Host)], Tier::Disk)
            }
            Route::DiskToHost => (&READ_TO_HOST, Tier::Disk),
            Route::DiskToDevice => (&[Need::Slot(Tier::Device), READ], Tier::Disk),
            Route::DiskToRegion => (&[READ], Tier::Disk),
            Route::DeviceToHost => (&[Need::Slot(Tier::Host)], Tier::Device),
            route => unreachable!("no read and no promotion takes {route:?}"),
        };
        if let Some(missing) = self.taken.take(state, needs, purpose) {
            return Step::Wait(missing);
        }
        let pin = self.id.and_then(|id| state.pin(id, tier, route));
        let Some(pin) = pin else { return Step::Gone };
        let filled = self.flight.filter(|_| route != Route::HostHit);
        if filled.is_some_and(|tier| !state.index.begin_fill(pin.id(), tier)) {
            assert!(filled == Some(Tier::Device), "flights are single, and stores publish in one step");
            pin.release(state);
            return Step::Gone;
        }
        match tier {
            Tier::Disk => Step::OnDisk(OnDisk::of(state, pin)),
            _ => Step::Pinned(pin),
        }
    }

    /// Whether its block has to be read to a host slot: the disk has it, and it is not there or on its way.
    fn needs_read(&self, state: &Locked<'_>) -> bool {
        let held = self.id.map(|id| state.held(id)).unwrap_or_default();
        let is_near = held[Tier::Host as usize] || state.flights.contains(&self.key, Tier::Host);
        held[Tier::Disk as usize] && !is_near
    }

    /// Has the next plan take the next way.
    pub(super) fn rule_out(&mut self) {
        assert!(!is_through_host(self.route()), "the last way is not ruled out");
        self.ruled_out = self.route;
    }

    /// Whether it fills a slot of a tier, and not a caller's memory.
    pub(super) fn fills_slot(&self) -> bool {
        self.flight.is_some()
    }

    pub(super) fn route(&self) -> Route {
        self.route.expect("it was planned")
    }
}

fn purpose(key: &BlockKey, flight: Option<Tier>) -> Purpose<'_> {
    flight.map_or(Purpose::Call, |tier| Purpose::Movement(key, tier))
}

/// Who waits for what a read to a host slot needs.
pub(super) enum Read<'a> {
    /// Its movement, which begins.
    Waits,
    /// A call, which has this much of it: the movement begins if the rest is to be had now.
    Now(&'a mut Taken),
    /// A call, which waits already: the block is only to be looked at.
    Later,
}

/// Plans the read of a block to a host slot, by what is `taken` and what else it needs; `None` if it does not come from
/// disk. What it cannot use yet stays taken.
#[inline] // each fetch from disk pays for it
pub(super) fn plan_read(
    state: &mut Locked<'_>,
    (key, id): (&BlockKey, EntryId),
    taken: &mut Taken,
    purpose: Purpose<'_>,
) -> Option<(Trip, Step)> {
    let mut trip = Trip::to_slot(key, Tier::Host);
    let route = trip.choose(state, Some(id), false).filter(|route| *route == Route::DiskToHost)?;
    trip.taken = std::mem::take(taken);
    let step = trip.begin_for(state, route, purpose);
    if matches!(step, Step::Wait(_)) {
        *taken = std::mem::take(&mut trip.taken);
    }
    Some((trip, step))
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Chooses the way of a block that is read or promoted, takes what its first transfer needs, and pins its source.
    pub(super) fn plan(self: &Rc<Self>, state: &mut Locked<'_>, trip: &mut Trip) -> Result<Step> {
        self.plan_with(state, trip, Read::Waits)
    }

    /// As [`plan`](Self::plan), with who waits for what a read to a host slot needs.
    pub(super) fn plan_with(self: &Rc<Self>, state: &mut Locked<'_>, trip: &mut Trip, read: Read<'_>) -> Result<Step> {
        let Some(route) = self.choose(state, trip) else { return Ok(Step::Gone) };
        if is_through_host(route) {
            if matches!(read, Read::Later) && trip.needs_read(state) {
                return Ok(Step::Wait(READ));
            }
            let usage = std::mem::replace(&mut trip.usage, Use::Counted);
            return self.begin_to_host(state, &trip.key, (Class::Awaited, usage), read);
        }
        let key = trip.key;
        Ok(trip.begin_for(state, route, purpose(&key, trip.flight)))
    }

    /// As [`plan`](Self::plan), after waiting for what the first transfer needs.
    pub(super) async fn ready(self: &Rc<Self>, trip: &mut Trip, step: Result<Step>) -> Result<Step> {
        let mut step = step?;
        while let Step::Wait(missing) = step {
            // Boxed: every movement would have room for it.
            let waited = Box::pin(self.wait_for(missing, &mut trip.taken, purpose(&trip.key, trip.flight))).await;
            match (missing, trip.flight) {
                // No other way of a call needs a slot of the device.
                (Need::Slot(Tier::Device), None) if waited.is_err() => trip.rule_out(),
                _ => waited?,
            }
            step = self.plan(&mut self.shared.lock(), trip)?;
        }
        if trip.route.is_none_or(|route| route == Route::HostHit || is_through_host(route)) {
            // The block has come nearer meanwhile. What another movement is to take must not be held here.
            trip.taken = Taken::default();
        }
        Ok(step)
    }

    fn choose(&self, state: &Locked<'_>, trip: &mut Trip) -> Option<Route> {
        let has_cufile = self.cufile.get().is_some() && state.cufile.reads() && state.device_service.reads();
        trip.choose(state, state.index.find(&trip.key), has_cufile)
    }

    /// Pins a block in host memory, or waits for its movement there, which begins unless it has begun.
    pub(super) fn begin_to_host(
        self: &Rc<Self>,
        state: &mut Locked<'_>,
        key: &BlockKey,
        (class, usage): (Class, Use),
        read: Read<'_>,
    ) -> Result<Step> {
        let (mut planned, mut missing) = (None, None);
        let begin = |state: &mut Locked<'_>, id, waiter| {
            if let Read::Now(taken) = read {
                match plan_read(state, (key, id), taken, Purpose::Call) {
                    Some((_, Step::Wait(need))) => {
                        missing = Some(need);
                        state.drop_after_unlock(waiter);
                        return None;
                    }
                    read => planned = read.map(|(trip, step)| Fill { trip, step: Ok(step) }),
                }
            }
            state.flights.begin((key, Tier::Host), id, class, Few::from([waiter]), planned.is_some());
            Some(())
        };
        let (promotion, source) = state.promote(key, Tier::Host, (class, usage), begin)?;
        if matches!(promotion, Promotion::Miss) && self.shared.is_offered(key) {
            return Ok(Step::Remote(usage));
        }
        if usage == Use::Now {
            state.count(self.shared.metrics.look_ups(source), 1);
        }
        let (outcome, is_joined) = match promotion {
            Promotion::Hit(pin) => return Ok(Step::Pinned(pin)),
            Promotion::Miss | Promotion::NotStarted => return Ok(missing.map_or(Step::Gone, Step::Wait)),
            Promotion::Joined(outcome) => (outcome, true),
            Promotion::Started(outcome, ()) => (outcome, false),
        };
        // Also a flight that a caller began: its command may be queued behind movements like this one. A movement in
        // flight to a block that was stored since is carried out by its command.
        let begun = planned.or_else(|| self.take_on(state, key, Tier::Host)).map(Box::new);
        Ok(Step::Flight(Flight { outcome, is_joined, begun }))
    }

    /// Takes on the promotion of a block whose flight has begun, and plans it. `None` if another task has taken it on.
    pub(super) fn take_on(self: &Rc<Self>, state: &mut Locked<'_>, key: &BlockKey, tier: Tier) -> Option<Fill> {
        if !state.flights.start(key, tier) {
            return None;
        }
        let mut trip = Trip::to_slot(key, tier);
        let step = self.plan(state, &mut trip);
        Some(Fill { trip, step })
    }

    /// Begins a write by `begin`, under the lock under which it has taken all that it needs beside what it had. `begin`
    /// drops nothing of that: permits and slots wake others.
    pub(super) async fn take_and_begin<T>(
        &self,
        taken: Taken,
        purpose: Purpose<'_>,
        begin: impl Fn(&mut Locked<'_>, Taken) -> T,
    ) -> Result<T> {
        let mut taken = taken;
        loop {
            let missing = {
                let mut state = self.shared.lock();
                match taken.take(&mut state, &WRITE, purpose) {
                    Some(missing) => missing,
                    None => return Ok(begin(&mut state, taken)),
                }
            };
            // Boxed: every write would have room for it.
            Box::pin(self.wait_for(missing, &mut taken, purpose)).await?;
        }
    }

    /// Waits for something that a transfer needs.
    pub(super) async fn wait_for(&self, missing: Need, taken: &mut Taken, purpose: Purpose<'_>) -> Result<()> {
        match missing {
            Need::Slot(tier) => taken.slot = Some(self.shared.acquire(tier, purpose).await?),
            Need::Permit(kind) => {
                // Read here: a movement that is raised later is in the queue by then.
                let urgency = self.shared.lock().holder_urgency(purpose);
                let bytes = self.shared.config.slot_bytes() as u64;
                let permit = self.shared.in_flight.take(kind, urgency, bytes, matches!(purpose, Purpose::Call)).await;
                taken.permit = Some(permit.ok_or_else(|| self.shared.timeout("a turn of the disk"))?);
            }
        }
        Ok(())
    }
}

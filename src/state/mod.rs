//! What callers and the reactor share: the index, the free slots and the flights under one short
//! lock, and the memory behind the slots.
//!
//! The types of this file refer to each other (the state holds flights, these hold pins, and a pin holds the shared
//! state). So they are defined here together, and what they do is in the files beside, which import nothing of each
//! other but pure data: `flights`, `requests`, `refusals`, `dirty`, `health`.

mod commit;
mod deadline;
mod deferred;
mod dirty;
mod disk_write;
mod flights;
mod guards;
mod health;
mod hints;
mod in_flight;
mod lenders;
mod limits;
mod lock;
mod lookup;
#[cfg(test)]
mod of_test;
mod refusals;
mod remote;
mod report;
mod requests;
mod retire;
mod rooms;
mod slots;
mod spare;
mod taken;
pub(crate) mod verify;
mod write_policy;

pub(crate) use commit::{Committed, FlightEnd, Known};
pub(crate) use deadline::LOOKS_PER_DEADLINE;
pub(crate) use deferred::DeferredWork;
pub(crate) use disk_write::{BegunWrite, DiskPlace, DiskWrite};
pub(crate) use flights::{Class, Flights, NoWait, Raised, Waiters};
pub(crate) use health::{Failures, Health, blames_disk, is_of_memory};
pub use hints::KeepWalk;
pub(crate) use in_flight::{InFlight, Permit};
pub(crate) use lenders::{Lender, Lenders};
pub(crate) use lock::Locked;
#[cfg(feature = "sim")]
pub use lock::{holds_lock, locks_taken, panic_under_lock};
pub(crate) use lookup::{LookedUp, Promotion, Removed, Use};
pub(crate) use rooms::{NoRoom, Room, Rooms};
pub(crate) use slots::Purpose;
pub(crate) use taken::{Need, READ, READ_TO_HOST, Taken, WRITE};

use std::{
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering},
    },
};

use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use self::{deferred::Deferred, dirty::DirtyBlocks, refusals::Refusals, requests::SlotRequests};
use crate::{
    block::{BlockKey, Route, Tier},
    config::Config,
    device::DevicePool,
    disk::DiskSlots,
    error::{Error, Result},
    fork::Home,
    index::{EntryId, Index},
    io::OpenFile,
    memory::Arena,
    metrics::{Metrics, Tally},
    sync::Mutex,
};

/// A list that mostly has one element, which needs no allocation.
pub(crate) type Few<T> = smallvec::SmallVec<[T; 1]>;

/// State under the lock. Nothing does I/O or awaits while it holds the lock.
pub(crate) struct State {
    pub(crate) index: Index,
    /// Free slots of the device and the host tier; the disk's are kept by [`DiskSlots`].
    pub(crate) free: [Vec<u32>; 2],
    pub(crate) disk: Option<DiskSlots>,
    pub(crate) flights: Flights,
    /// Checksums of the blocks in the slots of the device and the host tier.
    pub(crate) checksums: [Vec<u64>; 2],
    /// The health of the route of libcufile, with the result of its self-test or the reason why it is out of service.
    pub(crate) cufile: Health,
    /// Generation of the next record.
    pub(crate) generation: u64,
    /// Those that wait, by tier.
    pub(crate) slot_requests: [SlotRequests; Tier::COUNT],
    /// Movements to be raised in the budget.
    pub(crate) raised: Raised,
    pub(crate) disk_service: Health,
    pub(crate) device_service: Health,
    /// Blocks of the host tier that are written to disk before they may be evicted.
    pub(crate) dirty: DirtyBlocks,
    /// Blocks that the disk tier refused, and whose refusal no caller got.
    pub(crate) refusals: Refusals,
    follow_ups: lock::FollowUps,
    /// The files, while callers may submit reads to I/O threads; their last owners are the threads.
    pub(crate) files: Vec<OpenFile>,
    /// The task of the deadlines looks at the clock, or is about to.
    pub(crate) is_watched: bool,
    closed: bool,
}

/// The share of a tier's slots that may be kept, as a divisor.
const KEPT_PART: u64 = 4;

/// What callers and the reactor share.
pub(crate) struct Shared {
    pub(crate) config: Config,
    state: Mutex<State>,
    deferred: Deferred,
    pub(crate) arena: Arc<Arena>,
    pub(crate) device: Option<DevicePool>,
    pub(crate) metrics: Metrics,
    pub(crate) in_flight: InFlight,
    /// Commands to the reactor that are queued.
    pub(crate) commands: Rooms,
    /// Reads of device blocks that are under way.
    pub(crate) device_reads: Rooms,
    /// One for each file: operations on blocks, and flushes.
    pub(crate) failures: Vec<Failures>,
    pub(crate) lenders: Lenders,
    /// The tier beyond the node, if there is one.
    pub(crate) remote: Option<Arc<crate::remote::Remote>>,
    /// Host slots that callers have reserved and not committed.
    pub(crate) reservations: AtomicU64,
    /// Host slots that are parked.
    pub(crate) parked: AtomicU32,
    /// What addresses of direct reads and writes must be multiples of; 1 without direct I/O.
    pub(crate) memory_align_bytes: usize,
    /// Whether the kernel has the registered memory: it may refuse a later table, and then has none.
    pub(crate) registered: Arc<AtomicBool>,
    /// Leases that callers hold on blocks of the device and the host tier.
    pub(crate) leases: [Tally; 2],
    /// Wakes the task that raises movements in the budget, and so takes the lock for what is deferred.
    pub(crate) raised: Notify,
    /// Wakes the write-back task.
    pub(crate) write_back: Notify,
    /// Notified when a flight has ended after the close has begun, which waits for all of them.
    pub(crate) ended: Notify,
    /// The number of the latest movement.
    pub(crate) begun: Arc<AtomicU64>,
    /// Wakes the task of the deadlines.
    pub(crate) watch: Notify,
    /// Deadline ticks so far.
    pub(crate) looks: AtomicU64,
    /// Requests that libcufile has not returned.
    pub(crate) cufile_stuck: Arc<AtomicI64>,
    /// The origin of the times of kept blocks, and of the budget of writes.
    pub(crate) opened: Instant,
    pub(crate) home: Home,
}

impl Shared {
    /// `index` and `disk` as recovery left them.
    pub(crate) fn new(
        config: Config,
        arena: Arc<Arena>,
        device: Option<DevicePool>,
        mut index: Index,
        disk: Option<DiskSlots>,
        generation: u64,
        metrics: Metrics,
    ) -> Self {
        let begun = Arc::default();
        let remote = remote::of(&config, &mut index);
        let [read_bytes, write_bytes] = config.bytes_in_flight_max();
        let slots = [u64::from(config.device_slots()), u64::from(config.host_slots()), config.disk_slots()];
        for (tier, slots) in Tier::ALL.into_iter().zip(slots) {
            index.limit_kept(tier, usize::try_from(slots / KEPT_PART).unwrap_or(usize::MAX));
        }
        let ascending_from_the_end = |slots: u32| (0..slots).rev().collect::<Vec<_>>();
        let flights = Flights::new(Arc::clone(&begun), index.hasher().clone());
        let state = State {
            index,
            free: [ascending_from_the_end(config.device_slots()), ascending_from_the_end(config.host_slots())],
            disk,
            flights,
            checksums: [config.device_slots(), config.host_slots()].map(|slots| vec![0; slots as usize]),
            cufile: Health::Retired("there is no CUDA device".into()),
            generation,
            slot_requests: Default::default(),
            raised: Raised::default(),
            disk_service: Health::default(),
            device_service: Health::default(),
            dirty: DirtyBlocks::default(),
            refusals: Refusals::default(),
            follow_ups: lock::FollowUps::default(),
            files: Vec::new(),
            is_watched: false,
            closed: false,
        };
        Shared {
            in_flight: InFlight::new(read_bytes, write_bytes),
            commands: Rooms::new(rooms::COMMANDS_MAX.min(config.limits.movements_max)),
            device_reads: Rooms::new(config.limits.movements_max),
            failures: config.disk.paths.iter().map(|_| Failures::default()).collect(),
            config,
            state: Mutex::new(state),
            deferred: Deferred::new(),
            arena,
            device,
            metrics,
            lenders: Lenders::new(),
            remote,
            reservations: AtomicU64::new(0),
            parked: AtomicU32::new(0),
            memory_align_bytes: 1,
            registered: Arc::default(),
            leases: Default::default(),
            raised: Notify::new(),
            write_back: Notify::new(),
            ended: Notify::new(),
            begun,
            watch: Notify::new(),
            looks: AtomicU64::new(0),
            cufile_stuck: Arc::default(),
            opened: Instant::now(),
            home: Home::here(),
        }
    }

    /// `None` in a forked child, which must release nothing of its parent's: the reference is leaked.
    #[inline]
    pub(crate) fn at_home(self: Arc<Self>) -> Option<Arc<Self>> {
        if self.home.is_here() {
            return Some(self);
        }
        std::mem::forget(self);
        None
    }

    /// Requests that libcufile has not returned.
    pub(crate) fn cufile_stuck(&self) -> u64 {
        // A request that returns at the moment of its timeout may be subtracted before it is added.
        u64::try_from(self.cufile_stuck.load(Ordering::SeqCst)).unwrap_or(0)
    }

    /// First byte of a host slot.
    pub(crate) fn host_ptr(&self, slot: u32) -> NonNull<u8> {
        self.arena.slot_ptr(slot)
    }
}

impl Locked<'_> {
    /// True if too few host slots are available, and write-back could make more so. `demoting`: write-backs in flight.
    pub(crate) fn write_back_is_due(&self, demoting: u32, watermark: f64) -> bool {
        let config = &self.shared().config;
        if !config.writes_back() || self.demotable().is_none() {
            return false;
        }
        let free = self.free[Tier::Host as usize].len();
        let evictable = self.index.evictable(Tier::Host);
        let available = if self.is_short_by_sync() {
            0
        } else if config.values_writes() && free + evictable > 0 {
            // A later decision knows more. The blocks of a chain can be evicted one after the other.
            free + self.index.resident(Tier::Host).saturating_sub(self.dirty.len()) + self.dirty.queued()
        } else {
            free + evictable
        };
        // The end of one that is overdue may be far.
        let available = available + (demoting as usize).saturating_sub(self.flights.overdue(Tier::Disk));
        // At least one, so that a tiny tier is never stuck with dirty blocks only.
        let wanted = (f64::from(self.shared().host_slots()) * watermark).ceil().max(1.0);
        (available as f64) < wanted
    }
}

impl State {
    #[inline]
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed { Err(Error::Closed) } else { Ok(()) }
    }

    pub(crate) fn disk_slots(&mut self) -> &mut DiskSlots {
        self.disk.as_mut().expect("only a cache with a disk tier has disk slots")
    }

    /// Waits for the movement of `key` to `tier`, if one is in flight, which is awaited from now on if `class` is.
    pub(crate) fn join(
        &mut self,
        key: &BlockKey,
        tier: Tier,
        class: Class,
        waiters_max: u32,
    ) -> std::result::Result<oneshot::Receiver<Outcome>, NoWait> {
        let receiver = self.flights.join(key, tier, waiters_max)?;
        if class == Class::Awaited {
            self.raise(key, tier);
        }
        Ok(receiver)
    }

    /// Free slots of a tier.
    pub(crate) fn free_slots(&self, tier: Tier) -> usize {
        match tier {
            Tier::Disk => self.disk.as_ref().map_or(0, |slots| slots.free_count() as usize),
            tier => self.free[tier as usize].len(),
        }
    }

    pub(crate) fn pop_free(&mut self, tier: Tier) -> Option<u32> {
        match tier {
            Tier::Disk => self.disk.as_mut()?.alloc(),
            tier => self.free[tier as usize].pop(),
        }
    }

    /// An error if `tier` takes no blocks.
    pub(crate) fn check_service(&self, tier: Tier) -> Result<()> {
        match tier {
            Tier::Disk => self.disk_service.check_writes("disk"),
            Tier::Device | Tier::Host | Tier::Remote => self.check_device(tier),
        }
    }

    /// An error if `tier` is the device's and the device is out of service.
    #[inline]
    fn check_device(&self, tier: Tier) -> Result<()> {
        if tier == Tier::Device { self.device_service.check_writes("device") } else { Ok(()) }
    }

    pub(crate) fn push_free(&mut self, tier: Tier, slot: u32) {
        match tier {
            Tier::Disk => self.disk_slots().release(slot),
            tier => self.free[tier as usize].push(slot),
        }
    }
}

/// The owner of a slot that is being filled, until it is published or dropped.
pub(crate) struct Filling {
    /// `None` once published.
    shared: Option<Arc<Shared>>,
    tier: Tier,
    slot: u32,
}

/// A reader of a full slot, which is neither evicted nor reused until this is dropped.
///
/// Never dropped under the lock: a holder of the lock [releases](Pin::release) it.
pub(crate) struct Pin {
    /// `None` once released.
    shared: Option<Arc<Shared>>,
    id: EntryId,
    tier: Tier,
    slot: u32,
    route: Route,
    /// It is counted as a lease.
    is_leased: bool,
}

/// A write to disk whose flight has begun, to be sent to the reactor.
pub(crate) struct PendingWrite {
    pub(crate) key: BlockKey,
    /// The block in memory.
    pub(crate) pin: Pin,
    /// It has begun, from host memory; or what it has taken so far.
    pub(crate) begun: std::result::Result<BegunWrite, Taken>,
}

/// A block that was read from disk into a host slot, and is not verified yet.
pub(crate) struct Unverified {
    /// Pins the disk slot that it was read from.
    pub(crate) source: Pin,
    pub(crate) filling: Filling,
    /// The checksum that it was stored with.
    pub(crate) checksum: u64,
    /// The checksum that a worker computed, if one did.
    pub(crate) sum: Option<u64>,
    pub(crate) started: Instant,
}

/// The outcome of a movement for each of its waiters: a pin in the destination, or `None` for a miss. Movements to disk
/// give `None`, because blocks are not read there.
pub(crate) type Outcome = Result<Option<Pin>>;

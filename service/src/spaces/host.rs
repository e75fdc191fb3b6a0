//! The host memory of one space.

use std::{
    cell::Cell,
    sync::{Arc, Mutex},
};

use kvhoist::{Cache, internals::service::Parked};

use crate::system::{System, on_thread};

/// What a byte served out of host memory counts for, in evicted bytes.
const HIT_WEIGHT: f64 = 16.0;

/// The host memory of a space.
pub(super) struct HostShare {
    pub(super) slot_bytes: u64,
    /// Reserved by the first client: it keeps this much.
    floor: u64,
    /// What it has now.
    bytes: Cell<u64>,
    /// Of its cache: not the slots of `bytes`.
    parked: Arc<Mutex<Parked>>,
    /// Slots that are not parked.
    slots: Cell<u64>,
    /// Evictions when it was last given memory, or gave some.
    pub(super) asked: Cell<u64>,
    /// Hits and evictions at the last move of any space.
    pub(super) seen: Cell<(u64, u64)>,
    /// The average of the bytes of its hits and evictions between moves.
    served: Cell<f64>,
}

impl HostShare {
    /// Of a cache whose slots are all in use, for a space that has `bytes`, of which `floor` are reserved.
    /// [`resize`](Self::resize) parks the others.
    pub(super) fn new(cache: &Cache, floor: u64, bytes: u64) -> Self {
        let config = cache.config();
        let most = u64::from(config.host_slots()) * config.slot_bytes() as u64;
        HostShare {
            slot_bytes: config.slot_bytes() as u64,
            floor,
            bytes: Cell::new(most.max(bytes)),
            parked: Arc::new(Mutex::new(cache.parked())),
            slots: Cell::new(u64::from(config.host_slots())),
            asked: Cell::new(0),
            seen: Cell::new((0, 0)),
            served: Cell::new(0.0),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// What others may have of it.
    pub(super) fn spare(&self) -> u64 {
        self.bytes.get().saturating_sub(self.floor)
    }

    /// Parks slots, or puts them back into use, until the slots of `wanted` bytes are in use; as far as they can be
    /// parked at once. Returns the bytes that it has then.
    pub(super) async fn resize(&self, cache: &Cache, wanted: u64, system: &dyn System) -> u64 {
        let (slots, before) = (wanted / self.slot_bytes, self.slots.get());
        let parked = Arc::clone(&self.parked);
        let change = move || {
            let mut parked = parked.lock().expect("nothing panics under it");
            match slots.checked_sub(before) {
                Some(more) => before + parked.unpark(more as usize) as u64,
                None => before - parked.park((before - slots) as usize) as u64,
            }
        };
        // Of many slots it takes milliseconds.
        let now = on_thread(system, change).await.unwrap_or(before);
        self.slots.set(now);
        self.bytes.set(if now == slots { wanted } else { now * self.slot_bytes });
        // Parked blocks count as evicted.
        let (hits, evictions) = cache.host_use();
        self.asked.set(evictions);
        self.seen.set((hits, evictions));
        self.bytes.get()
    }

    /// Bytes that were evicted since it was last given memory.
    pub(super) fn evicted(&self, cache: &Cache) -> u64 {
        (cache.host_use().1 - self.asked.get()) * self.slot_bytes
    }

    /// Takes what was served since the last move into the average.
    pub(super) fn note(&self, cache: &Cache) {
        let (hits, evictions) = cache.host_use();
        let (hits_seen, evictions_seen) = self.seen.replace((hits, evictions));
        let blocks = (hits - hits_seen) as f64 * HIT_WEIGHT + (evictions - evictions_seen) as f64;
        self.served.set((self.served.get() + blocks * self.slot_bytes as f64) / 2.0);
    }

    pub(super) fn used(&self) -> f64 {
        self.served.get() / self.bytes.get().max(1) as f64
    }
}

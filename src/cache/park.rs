//! Host slots that a cache does without for now, so that their memory can be another's.

use std::sync::Arc;

use super::Cache;
use crate::{
    block::Tier,
    fork::HomeBound,
    state::{Filling, Shared},
};

/// The parked slots of a cache. Dropping it puts them back into use.
pub struct Parked {
    shared: HomeBound<Arc<Shared>>,
    slots: Vec<Filling>,
}

impl Parked {
    /// Parks up to `slots` slots, as far as they are available at once: free ones, and those of the coldest blocks.
    /// Returns how many it parked. Some 100 ns a slot, and the time in which the system takes the memory back.
    pub fn park(&mut self, slots: usize) -> usize {
        let mut parked = self.shared.park(slots);
        let count = parked.len();
        self.slots.append(&mut parked);
        count
    }

    /// Puts up to `slots` slots back into use. Returns how many they were.
    pub fn unpark(&mut self, slots: usize) -> usize {
        let slots = slots.min(self.slots.len());
        let left = self.slots.len() - slots;
        self.shared.unpark(self.slots.split_off(left));
        slots
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.unpark(usize::MAX);
    }
}

impl Cache {
    /// None of its slots, to be parked.
    #[doc(hidden)]
    pub fn parked(&self) -> Parked {
        Parked { shared: HomeBound::new(Arc::clone(self.shared())), slots: Vec::new() }
    }

    /// Hits and evictions of the host tier so far.
    #[doc(hidden)]
    pub fn host_use(&self) -> (u64, u64) {
        let metrics = self.shared().metrics.tier(Tier::Host);
        (metrics.hits.get(), metrics.evictions.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockKey, Config, block_on, fork::Home};

    const BLOCK_BYTES: usize = 4096;

    fn key(number: u8) -> BlockKey {
        BlockKey::new([number; 32])
    }

    fn open(slots: u32) -> Cache {
        let mut config = Config::default().block_bytes(BLOCK_BYTES).host_blocks(slots);
        config.host.parks = true;
        let cache = block_on(Cache::open(config)).expect("a cache");
        (0..slots as u8).for_each(|n| block_on(cache.store(&key(n), None, &[n; BLOCK_BYTES])).expect("stored"));
        cache
    }

    fn bytes(cache: &Cache, number: u8) -> Option<Vec<u8>> {
        block_on(cache.fetch(&key(number))).expect("served").map(|lease| lease.to_vec())
    }

    #[test]
    fn the_coldest_blocks_give_their_slots_and_the_others_stay() {
        let cache = open(8);
        assert!(bytes(&cache, 0).is_some(), "the hottest now");
        let mut parked = cache.parked();
        assert_eq!(parked.park(5), 5);
        let stats = cache.stats();
        let host = stats.tier(Tier::Host);
        assert_eq!((host.slots, host.resident, host.free), (3, 3, 0));
        let fetched = block_on(cache.fetch_many(&[0, 6, 7, 1].map(key)));
        assert!(fetched.iter().all(Result::is_err), "a lease of each would take four slots");
        for number in [0, 6, 7] {
            assert_eq!(bytes(&cache, number), Some(vec![number; BLOCK_BYTES]));
        }
        assert!((1..6).all(|number| bytes(&cache, number).is_none()));

        assert_eq!(parked.unpark(100), 5);
        assert_eq!(cache.stats().tier(Tier::Host).slots, 8);
        (1..6).for_each(|n| block_on(cache.store(&key(n), None, &[n; BLOCK_BYTES])).expect("stored"));
        assert!((0..8).all(|number| bytes(&cache, number) == Some(vec![number; BLOCK_BYTES])));
    }

    #[test]
    fn the_eviction_policy_knows_of_parked_slots() {
        let (cache, mut parked) = (open(8), None);
        let head = |cache: &Cache| cache.shared().lock().index.head(Tier::Host).expect("it is RB");
        let all = head(&cache);
        assert_eq!(parked.insert(cache.parked()).park(6), 6);
        assert_eq!(head(&cache), all / 4.0);
        drop(parked);
        assert_eq!(head(&cache), all);
    }

    #[test]
    fn slots_in_use_are_not_parked() {
        let cache = open(4);
        let lease = block_on(cache.fetch(&key(1))).expect("served").expect("stored");
        let reservation = block_on(cache.reserve()).expect("a slot");
        let mut parked = cache.parked();
        assert_eq!(parked.park(4), 2, "one is leased, one reserved");
        assert_eq!(lease[..], [1; BLOCK_BYTES]);
        drop((lease, reservation));
        assert_eq!(parked.park(4), 2);
        assert_eq!(cache.stats().tier(Tier::Host).slots, 0);
        drop(parked);
        assert_eq!(cache.stats().tier(Tier::Host).slots, 4);
        block_on(cache.store(&key(9), None, &[9; BLOCK_BYTES])).expect("stored");
        assert_eq!(bytes(&cache, 9), Some(vec![9; BLOCK_BYTES]));
    }

    /// A drop neither waits for a lock that the parent had during the fork, nor counts.
    #[test]
    fn a_forked_child_leaves_what_is_parked() {
        let mut config = Config::default().block_bytes(BLOCK_BYTES).host_blocks(2);
        config.host.parks = true;
        let mut shared = Shared::of_test(config);
        Arc::get_mut(&mut shared).expect("the only owner").home = Home::elsewhere();
        let mut parked = Parked { shared: HomeBound::new(Arc::clone(&shared)), slots: Vec::new() };
        assert_eq!(parked.park(1), 1);
        let state = shared.lock();
        drop(parked);
        drop(state);
        assert_eq!(shared.host_slots(), 1, "it is still parked");
    }

    #[cfg(feature = "sim")]
    #[test]
    fn what_is_parked_is_dropped_where_an_invariant_is_broken() {
        use std::panic::{AssertUnwindSafe, catch_unwind};

        let cache = open(2);
        let mut parked = cache.parked();
        assert_eq!(parked.park(1), 1);
        crate::state::panic_under_lock(1);
        let broken = catch_unwind(AssertUnwindSafe(|| cache.contains(&key(0))));
        assert!(broken.is_err(), "it panics on purpose");
        assert!(catch_unwind(AssertUnwindSafe(|| drop(parked))).is_ok());
    }
}

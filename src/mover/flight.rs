//! Single flight: one movement per key and destination, however many wait for it.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, DefaultHasher},
};

use tokio::sync::oneshot;

use super::shared::Pin;
use crate::{
    block::{BlockKey, Tier},
    error::Result,
};

/// What a movement gives each of its waiters: a pin on the destination, or `None` for a miss.
/// Movements to disk give `None`: nobody reads there.
pub(crate) type Outcome = Result<Option<Pin>>;

/// Movements under way, by what they will make resident where.
///
/// A read that has ended waits here, unverified, for the first of its waiters to be polled: the
/// checksum is computed on the thread that wants the block, and the reactor goes on.
///
/// The hasher has fixed keys, for the simulation's sake. That is safe: the map never holds more
/// than the movements that [`Config::movements_max`](crate::Config::movements_max) allows.
#[derive(Default)]
pub(crate) struct Flights {
    by_target: HashMap<(BlockKey, Tier), Vec<oneshot::Sender<Outcome>>, BuildHasherDefault<DefaultHasher>>,
}

/// What joining a flight came to.
pub(crate) enum Joined {
    /// A movement is under way; its outcome comes here.
    Waiting(oneshot::Receiver<Outcome>),
    /// No movement is under way.
    None,
    /// As many wait for it as may.
    Full,
}

impl Flights {
    /// True while a movement of `key` to `tier` is under way.
    pub(crate) fn contains(&self, key: &BlockKey, tier: Tier) -> bool {
        self.by_target.contains_key(&(*key, tier))
    }

    /// Waits for the movement under way, if there is one.
    pub(crate) fn join(&mut self, key: &BlockKey, tier: Tier, waiters_max: u32) -> Joined {
        let Some(waiters) = self.by_target.get_mut(&(*key, tier)) else { return Joined::None };
        if waiters.len() >= waiters_max as usize {
            return Joined::Full;
        }
        let (sender, receiver) = oneshot::channel();
        waiters.push(sender);
        Joined::Waiting(receiver)
    }

    /// Starts a movement, with its first waiter.
    pub(crate) fn begin(&mut self, key: &BlockKey, tier: Tier) -> oneshot::Receiver<Outcome> {
        let (sender, receiver) = oneshot::channel();
        let earlier = self.by_target.insert((*key, tier), vec![sender]);
        assert!(earlier.is_none(), "one movement per key and tier");
        receiver
    }

    /// Ends a movement; its waiters are the caller's to answer, after the lock is released.
    pub(crate) fn finish(&mut self, key: &BlockKey, tier: Tier) -> Vec<oneshot::Sender<Outcome>> {
        self.by_target.remove(&(*key, tier)).unwrap_or_default()
    }

    /// Ends all movements.
    pub(crate) fn finish_all(&mut self) -> Vec<oneshot::Sender<Outcome>> {
        self.by_target.drain().flat_map(|(_, waiters)| waiters).collect()
    }

    /// Movements under way.
    pub(crate) fn len(&self) -> usize {
        self.by_target.len()
    }
}

//! One caller at a time computes a block.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;

use crate::block::BlockKey;

/// The turn to compute one block. Its lock is the right to compute, given first come, first served; the value is there
/// once somebody has computed it.
pub(super) type Turn = tokio::sync::Mutex<Option<Bytes>>;

/// Blocks that callers compute now, or wait for.
#[derive(Default)]
pub(super) struct Turns(Mutex<HashMap<BlockKey, Arc<Turn>>>);

/// A caller that computes a block or waits for its turn.
pub(super) struct Participant<'a> {
    turns: &'a Turns,
    key: BlockKey,
    /// `None` once dropped.
    turn: Option<Arc<Turn>>,
    /// It has computed the block: when it goes, the block is in the cache, and whoever asks then is answered there.
    has_computed: AtomicBool,
}

impl Turns {
    fn map(&self) -> MutexGuard<'_, HashMap<BlockKey, Arc<Turn>>> {
        // The map is whole between any two of its methods.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins those who want a block, where fewer than `participants_max` do.
    pub(super) fn join(&self, key: &BlockKey, participants_max: usize) -> Option<Participant<'_>> {
        let mut map = self.map();
        let turn = map.entry(*key).or_default();
        if Arc::strong_count(turn) > participants_max {
            return None;
        }
        let turn = Some(Arc::clone(turn));
        drop(map);
        Some(Participant { turns: self, key: *key, turn, has_computed: AtomicBool::new(false) })
    }
}

impl Participant<'_> {
    pub(super) fn turn(&self) -> &Turn {
        self.turn.as_ref().expect("it is there until the participant is dropped")
    }

    /// From now on nobody need wait for it: when it goes, the block is in the cache.
    pub(super) fn note_computed(&self) {
        self.has_computed.store(true, Ordering::Relaxed);
    }
}

impl Drop for Participant<'_> {
    fn drop(&mut self) {
        let Some(own) = self.turn.take() else { return };
        let mut map = self.turns.map();
        let is_current = map.get(&self.key).is_some_and(|turn| Arc::ptr_eq(turn, &own));
        // The map's, and this one's: nobody else is left.
        if is_current && (self.has_computed.load(Ordering::Relaxed) || Arc::strong_count(&own) == 2) {
            map.remove(&self.key);
        }
        // Under the lock: of two participants that go at once the second is to see that it is the last.
        drop(own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: BlockKey = BlockKey::new([1; 32]);

    #[test]
    fn a_turn_lives_as_long_as_somebody_wants_the_block() {
        let turns = Turns::default();
        let (first, second) = (turns.join(&KEY, 2).expect("room"), turns.join(&KEY, 2).expect("room"));
        assert!(turns.join(&KEY, 2).is_none(), "two at most");
        assert!(std::ptr::eq(first.turn(), second.turn()));
        drop(first);
        assert_eq!(turns.map().len(), 1);
        drop(second);
        assert!(turns.map().is_empty());
    }

    #[test]
    fn a_computed_block_is_asked_for_anew_when_its_caller_is_gone() {
        let turns = Turns::default();
        let (computes, waits) = (turns.join(&KEY, 9).expect("room"), turns.join(&KEY, 9).expect("room"));
        computes.note_computed();
        drop(computes);
        let later = turns.join(&KEY, 9).expect("room");
        assert!(!std::ptr::eq(waits.turn(), later.turn()), "it is to find the block in the cache");
        drop(waits);
        assert_eq!(turns.map().len(), 1, "the later one's");
        drop(later);
        assert!(turns.map().is_empty());
    }
}

//! What was evicted of late: by the hash of its key, in a ring.

use hashbrown::HashTable;

/// One eviction that is remembered. 16 bytes.
#[derive(Clone, Copy)]
struct Ghost {
    hash: u64,
    /// The low half of the clock at the eviction.
    at: u32,
    again: bool,
    /// Asked for again since, or pushed anew: no longer in the table.
    taken: bool,
}

/// The last evictions, as many as there is room for. 16 bytes each, and 5 bytes of table, which is 7/16 to 7/8 full.
///
/// Two keys of one hash are taken for one: that costs a wrong count, once in 2^64 pairs.
pub(super) struct Ghosts {
    ring: Vec<Ghost>,
    /// Places in the ring.
    table: HashTable<u32>,
    /// The oldest, once the ring is full.
    oldest: usize,
    room: usize,
}

impl Ghosts {
    pub fn new(room: u32) -> Self {
        Ghosts { ring: Vec::new(), table: HashTable::new(), oldest: 0, room: room as usize }
    }

    /// Takes the memory for all of them, so that nothing moves later; the error is how many bytes were refused.
    pub fn try_reserve(&mut self) -> Result<(), usize> {
        let bytes = self.room * (size_of::<Ghost>() + size_of::<u32>());
        let Ghosts { ring, table, room, .. } = self;
        ring.try_reserve_exact(room.saturating_sub(ring.len())).map_err(|_| bytes)?;
        table.try_reserve(*room, |&place| ring[place as usize].hash).map_err(|_| bytes)
    }

    /// Remembers an eviction, and forgets the oldest where there is no room.
    pub fn push(&mut self, hash: u64, at: u32, again: bool) {
        if self.room == 0 {
            return;
        }
        // One eviction a key: of two the later counts.
        self.take(hash);
        let ghost = Ghost { hash, at, again, taken: false };
        let place = if self.ring.len() < self.room {
            self.ring.push(ghost);
            self.ring.len() - 1
        } else {
            let place = self.oldest;
            let forgotten = std::mem::replace(&mut self.ring[place], ghost);
            if !forgotten.taken {
                self.unlist(forgotten.hash, place);
            }
            self.oldest = (place + 1) % self.room;
            place
        };
        let ring = &self.ring;
        self.table.insert_unique(hash, place as u32, |&place| ring[place as usize].hash);
    }

    /// Forgets the eviction of `hash`; gives its clock, and whether the block had been used again.
    pub fn take(&mut self, hash: u64) -> Option<(u32, bool)> {
        let ring = &mut self.ring;
        let found = self.table.find_entry(hash, |&place| ring[place as usize].hash == hash).ok()?;
        let (place, _) = found.remove();
        let ghost = &mut ring[place as usize];
        ghost.taken = true;
        Some((ghost.at, ghost.again))
    }

    fn unlist(&mut self, hash: u64, place: usize) {
        let found = self.table.find_entry(hash, |&other| other as usize == place);
        found.expect("a ghost that was not taken is in the table").remove();
    }

    pub fn validate(&self) -> Result<(), String> {
        let live = self.ring.iter().filter(|ghost| !ghost.taken).count();
        if live != self.table.len() || self.ring.len() > self.room {
            return Err(format!("{live} of {} ghosts, {} in the table", self.ring.len(), self.table.len()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// As a list that is searched from its end.
        #[test]
        fn the_last_evictions_are_remembered_once(
            room in 0u32..8,
            ops in prop::collection::vec((any::<bool>(), 0u64..12, any::<bool>()), 0..200),
        ) {
            let (mut ghosts, mut model) = (Ghosts::new(room), Vec::<(u64, Option<(u32, bool)>)>::new());
            for (at, (push, hash, again)) in (0..).zip(ops) {
                let known = model.iter_mut().find(|(known, ghost)| *known == hash && ghost.is_some());
                let taken = known.and_then(|(_, ghost)| ghost.take());
                if push {
                    ghosts.push(hash, at, again);
                    model.push((hash, Some((at, again))));
                    let forgotten = model.len().saturating_sub(room as usize);
                    model.drain(..forgotten);
                } else {
                    prop_assert_eq!(ghosts.take(hash), taken);
                }
                ghosts.validate().expect("valid");
            }
        }
    }
}

//! Recent evictions, by the hashes of their keys, in a ring.

use super::entry::USES_MAX;

/// Bits of a hash that are kept; other bits choose the chain. The rest of the word has the uses and marks.
const HASH_BITS: u32 = 28;
const USES_SHIFT: u32 = HASH_BITS;
/// It was refused, not evicted.
const REFUSED: u32 = 1 << 30;
/// Used since, or pushed again: no longer in a chain.
const TAKEN: u32 = 1 << 31;

/// The end of a chain; the other bits are the number of the chain.
const END: u32 = 1 << 31;

/// One eviction that is remembered. 12 bytes.
#[derive(Clone, Copy)]
pub(super) struct Ghost {
    /// Hash and marks.
    word: u32,
    /// The low half of the clock at the eviction.
    pub at: u32,
    /// The next one of its chain, or its end.
    next: u32,
}

impl Ghost {
    fn is_taken(self) -> bool {
        self.word & TAKEN != 0
    }

    /// Uses before it was evicted.
    pub fn uses(self) -> u8 {
        (self.word >> USES_SHIFT) as u8 & USES_MAX
    }

    /// It was refused, not evicted.
    pub fn refused(self) -> bool {
        self.word & REFUSED != 0
    }
}

fn kept(hash: u64) -> u32 {
    hash as u32 & ((1 << HASH_BITS) - 1)
}

/// The last evictions, as many as there is room for. 14 bytes each: a ring, and the heads of chains through it, one for
/// every two ghosts. Nothing grows or moves once it is reserved.
///
/// Two keys with one hash count as one key: that costs a wrong count, once in 2^27 look-ups.
pub(super) struct Ghosts {
    ring: Vec<Ghost>,
    /// The first of each chain, by the hash.
    heads: Vec<u32>,
    /// The oldest, once the ring is full.
    oldest: usize,
    room: usize,
}

impl Ghosts {
    pub fn new(room: u32) -> Self {
        Ghosts { ring: Vec::new(), heads: Vec::new(), oldest: 0, room: room.min(END - 1) as usize }
    }

    fn heads_wanted(&self) -> usize {
        self.room.div_ceil(2)
    }

    /// Allocates memory for all of them, so that nothing moves later; the error is the number of bytes that were
    /// refused.
    pub fn try_reserve(&mut self) -> Result<(), usize> {
        let heads = self.heads_wanted();
        let bytes = self.room * size_of::<Ghost>() + heads * size_of::<u32>();
        let Ghosts { ring, heads: chains, room, .. } = self;
        ring.try_reserve_exact(room.saturating_sub(ring.len())).map_err(|_| bytes)?;
        chains.try_reserve_exact(heads.saturating_sub(chains.len())).map_err(|_| bytes)
    }

    /// The chain of a hash: by its high bits, which are not kept with a ghost.
    fn chain(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.heads.len() as u128) >> 64) as usize
    }

    /// Remembers an eviction, and forgets the oldest if there is no room.
    pub fn push(&mut self, hash: u64, at: u32, uses: u8, refused: bool) {
        if self.room == 0 {
            return;
        }
        if self.heads.is_empty() {
            let ends = (0..self.heads_wanted() as u32).map(|chain| END | chain);
            self.heads.extend(ends);
        }
        // One eviction per key: the later one counts.
        self.take(hash);
        let chain = self.chain(hash);
        let place = if self.ring.len() < self.room {
            self.ring.push(Ghost { word: TAKEN, at: 0, next: 0 });
            self.ring.len() - 1
        } else {
            let place = self.oldest;
            if !self.ring[place].is_taken() {
                self.unlink(place as u32);
            }
            self.oldest = (place + 1) % self.room;
            place
        };
        let marks = u32::from(uses.min(USES_MAX)) << USES_SHIFT | if refused { REFUSED } else { 0 };
        let next = std::mem::replace(&mut self.heads[chain], place as u32);
        self.ring[place] = Ghost { word: kept(hash) | marks, at, next };
    }

    fn find(&self, hash: u64) -> Option<u32> {
        let mut place = *self.heads.get(self.chain(hash))?;
        while place & END == 0 {
            let ghost = &self.ring[place as usize];
            if kept(ghost.word.into()) == kept(hash) {
                return Some(place);
            }
            place = ghost.next;
        }
        None
    }

    /// True if the eviction of `hash` is remembered.
    pub fn contains(&self, hash: u64) -> bool {
        self.find(hash).is_some()
    }

    /// Forgets the eviction of `hash`, and returns it.
    pub fn take(&mut self, hash: u64) -> Option<Ghost> {
        self.take_placed(hash).map(|(_, ghost)| ghost)
    }

    /// As [`take`](Self::take), with its place in the ring.
    pub fn take_placed(&mut self, hash: u64) -> Option<(usize, Ghost)> {
        let place = self.find(hash)?;
        self.unlink(place);
        let ghost = &mut self.ring[place as usize];
        let found = *ghost;
        ghost.word |= TAKEN;
        Some((place as usize, found))
    }

    /// The eviction at a place in the ring, unless it was taken.
    pub fn at(&self, place: usize) -> Option<Ghost> {
        self.ring.get(place).copied().filter(|ghost| !ghost.is_taken())
    }

    /// How many there may be.
    pub fn room(&self) -> usize {
        self.room
    }

    /// Takes a ghost out of its chain, whose end has its number.
    fn unlink(&mut self, place: u32) {
        let next = self.ring[place as usize].next;
        let mut end = next;
        while end & END == 0 {
            end = self.ring[end as usize].next;
        }
        let head = &mut self.heads[(end & !END) as usize];
        if *head == place {
            *head = next;
            return;
        }
        let mut before = *head as usize;
        while self.ring[before].next != place {
            before = self.ring[before].next as usize;
        }
        self.ring[before].next = next;
    }

    pub fn validate(&self) -> Result<(), String> {
        let live = self.ring.iter().filter(|ghost| !ghost.is_taken()).count();
        let mut found = 0;
        for (chain, &head) in self.heads.iter().enumerate() {
            let mut place = head;
            while place & END == 0 {
                if self.ring[place as usize].is_taken() || found == live {
                    return Err(format!("chain {chain} of ghosts is wrong at {place}"));
                }
                found += 1;
                place = self.ring[place as usize].next;
            }
            if place != END | chain as u32 {
                return Err(format!("chain {chain} of ghosts ends in {}", place & !END));
            }
        }
        if found != live || self.ring.len() > self.room {
            return Err(format!("{live} ghosts of {} in a ring for {}, {found} found", self.ring.len(), self.room));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_ghost_is_small() {
        assert_eq!(size_of::<Ghost>(), 12);
    }

    proptest! {
        /// As a list that is searched from its end.
        #[test]
        fn the_last_evictions_are_remembered_once(
            room in 0u32..8,
            ops in prop::collection::vec((any::<bool>(), 0u64..12, 0u8..4, any::<bool>()), 0..200),
        ) {
            let (mut ghosts, mut model) = (Ghosts::new(room), Vec::<(u64, Option<(u32, u8, bool)>)>::new());
            for (at, (push, hash, uses, refused)) in (0..).zip(ops) {
                // The high bits choose the chain.
                let hash = (hash % 4) << 62 | hash;
                let known = model.iter_mut().find(|(known, ghost)| *known == hash && ghost.is_some());
                prop_assert_eq!(ghosts.contains(hash), known.is_some());
                let taken = known.and_then(|(_, ghost)| ghost.take());
                if push {
                    ghosts.push(hash, at, uses, refused);
                    model.push((hash, Some((at, uses, refused))));
                    let forgotten = model.len().saturating_sub(room as usize);
                    model.drain(..forgotten);
                } else {
                    let found = ghosts.take(hash).map(|ghost| (ghost.at, ghost.uses(), ghost.refused()));
                    prop_assert_eq!(found, taken);
                }
                ghosts.validate().expect("valid");
            }
        }
    }
}

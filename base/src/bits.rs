//! A set of small integers with a fast search for the next member.

const BITS: u32 = u64::BITS;

/// A set of integers below a limit: one bit each, and above them levels in which a bit means that a word of the level
/// below is not empty. Finding the next member reads two words per level; six levels cover two billion slots. Takes 1/8
/// byte per integer, and 1/63 of that for the levels.
#[derive(Debug, Clone)]
pub struct BitSet {
    limit: u32,
    len: u32,
    /// Lowest level first; the top level has one word.
    levels: Vec<Vec<u64>>,
}

impl BitSet {
    /// An empty set for integers below `limit`.
    pub fn new(limit: u32) -> Self {
        let mut levels = Vec::new();
        let mut words = limit.div_ceil(BITS).max(1);
        loop {
            levels.push(vec![0; words as usize]);
            if words == 1 {
                return BitSet { limit, len: 0, levels };
            }
            words = words.div_ceil(BITS);
        }
    }

    /// The set of all integers below `limit`.
    pub fn full(limit: u32) -> Self {
        let mut set = BitSet { len: limit, ..BitSet::new(limit) };
        let mut bits = limit;
        for level in &mut set.levels {
            let (whole, rest) = ((bits / BITS) as usize, bits % BITS);
            level[..whole].fill(u64::MAX);
            if rest > 0 {
                level[whole] = bit(rest) - 1;
            }
            bits = bits.div_ceil(BITS);
        }
        set
    }

    /// Raises the limit; a lower limit has no effect.
    pub fn grow(&mut self, limit: u32) {
        if limit <= self.limit {
            return;
        }
        self.limit = limit;
        let mut words = limit.div_ceil(BITS).max(1);
        for level in 0.. {
            if level == self.levels.len() {
                // The former top word gets a level above it.
                let below = &self.levels[level - 1];
                let marked = u64::from(below[0] != 0);
                self.levels.push(vec![marked]);
            }
            self.levels[level].resize(words as usize, 0);
            if words == 1 {
                return;
            }
            words = words.div_ceil(BITS);
        }
    }

    /// Number of members.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether the number is a member.
    pub fn contains(&self, number: u32) -> bool {
        assert!(number < self.limit, "{number} of {}", self.limit);
        self.levels[0][(number / BITS) as usize] & bit(number) != 0
    }

    /// Adds a number; false if it was a member.
    pub fn insert(&mut self, number: u32) -> bool {
        if self.contains(number) {
            return false;
        }
        let mut at = number;
        for level in &mut self.levels {
            level[(at / BITS) as usize] |= bit(at);
            at /= BITS;
        }
        self.len += 1;
        true
    }

    /// Removes a number; false if it was not a member.
    pub fn remove(&mut self, number: u32) -> bool {
        if !self.contains(number) {
            return false;
        }
        let mut at = number;
        for level in &mut self.levels {
            let word = &mut level[(at / BITS) as usize];
            *word &= !bit(at);
            if *word != 0 {
                break;
            }
            at /= BITS;
        }
        self.len -= 1;
        true
    }

    /// The smallest member that is at least `from`.
    pub fn next(&self, from: u32) -> Option<u32> {
        // Go up until a word has a bit at or after the position, then down along the lowest bits.
        let mut at = from;
        for (height, level) in self.levels.iter().enumerate() {
            let word = level.get((at / BITS) as usize)? & (u64::MAX << (at % BITS));
            if word != 0 {
                at = at / BITS * BITS + word.trailing_zeros();
                return Some(self.descend(height, at));
            }
            at = at / BITS + 1;
        }
        None
    }

    fn descend(&self, height: usize, mut at: u32) -> u32 {
        for level in self.levels[..height].iter().rev() {
            at = at * BITS + level[at as usize].trailing_zeros();
        }
        at
    }

    /// All members, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let mut from = Some(0);
        std::iter::from_fn(move || {
            let member = self.next(from?)?;
            from = member.checked_add(1);
            Some(member)
        })
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        self.levels.iter().map(|level| level.len() * 8).sum()
    }

    /// Checks that the levels agree.
    pub fn validate(&self) -> Result<(), String> {
        let count: u32 = self.levels[0].iter().map(|word| word.count_ones()).sum();
        if count != self.len {
            return Err(format!("{count} members, expected {}", self.len));
        }
        for pair in self.levels.windows(2) {
            for (at, &word) in pair[0].iter().enumerate() {
                let marked = pair[1][at / BITS as usize] & bit(at as u32) != 0;
                if marked != (word != 0) {
                    return Err(format!("word {at} is {word:#x}, and its mark {marked}"));
                }
            }
        }
        match self.next(self.limit) {
            Some(member) => Err(format!("member {member}, expected none from {} on", self.limit)),
            None => Ok(()),
        }
    }
}

fn bit(number: u32) -> u64 {
    1 << (number % BITS)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_btree_set(
            limit in prop_oneof![1u32..70, 4000u32..4200, 270_000u32..270_100],
            first_limit in 0u32..300_000,
            ops in prop::collection::vec(any::<(bool, prop::sample::Index, prop::sample::Index)>(), 0..200),
        ) {
            let first_limit = first_limit.min(limit);
            let (mut set, mut model) = (BitSet::new(first_limit), BTreeSet::new());
            for (at, (insert, number, from)) in ops.iter().enumerate() {
                let limit = if at < 100 { first_limit.max(1) } else { limit };
                set.grow(limit);
                let insert = *insert;
                let (number, from) = (number.index(limit as usize) as u32, from.index(limit as usize + 1) as u32);
                if insert {
                    prop_assert_eq!(set.insert(number), model.insert(number));
                } else {
                    prop_assert_eq!(set.remove(number), model.remove(&number));
                }
                prop_assert_eq!(set.contains(number), model.contains(&number));
                prop_assert_eq!(set.next(from), model.range(from..).next().copied());
                prop_assert_eq!(set.len() as usize, model.len());
            }
            set.grow(limit);
            set.validate().expect("valid");
            prop_assert!(set.iter().eq(model.iter().copied()));
        }
    }

    #[test]
    fn a_full_set_lists_every_number() {
        for limit in [0, 1, 63, 64, 65, 4095, 4096, 4097, 262_144, 262_145] {
            let set = BitSet::full(limit);
            set.validate().expect("valid");
            assert!(set.iter().eq(0..limit), "below {limit}");
        }
        let set = BitSet::full(4097);
        assert!(set.heap_bytes() * 8 < 4097 + 64 * 5, "about a bit a number");
    }
}

//! The one source of chance in a simulation.

use std::{cell::RefCell, rc::Rc};

/// SplitMix64: tiny, fast, and the same on every machine for the same seed.
///
/// Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014).
///
/// A generator can have a tape: bytes that decide its choices before the seed does. A fuzzer that changes one byte of a
/// tape changes one choice of the run.
#[derive(Debug, Clone)]
pub struct Rng {
    state: u64,
    /// The rest of the tape, shared by all generators that come from one.
    tape: Option<Rc<RefCell<std::vec::IntoIter<u8>>>>,
}

impl Rng {
    /// A generator whose whole sequence follows from `seed`.
    pub fn new(seed: u64) -> Self {
        Rng { state: seed, tape: None }
    }

    /// A generator whose choices ([`below`](Self::below), [`between`](Self::between), [`chance`](Self::chance)) follow
    /// from `tape`, and from `seed` once the tape has ended.
    pub fn with_tape(seed: u64, tape: Vec<u8>) -> Self {
        Rng { state: seed, tape: Some(Rc::new(RefCell::new(tape.into_iter()))) }
    }

    /// A generator with another seed and the same tape.
    pub fn reseeded(&self, seed: u64) -> Self {
        Rng { state: seed, tape: self.tape.clone() }
    }

    /// 64 random bits. They follow from the seed alone.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, or 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if let Some(number) = self.draw_tape(bound.saturating_sub(1)) {
            return number % bound;
        }
        // The high half of the product is below `bound`; its bias is below bound / 2^64.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number from `min` to `max`, both included.
    pub fn between(&mut self, min: u64, max: u64) -> u64 {
        min + self.below((max.saturating_sub(min)).saturating_add(1))
    }

    /// True with this probability. Always takes one draw, so that the rest of the sequence does not depend on the rate.
    pub fn chance(&mut self, rate: f64) -> bool {
        if let Some(number) = self.draw_tape(255) {
            return (number as f64) < rate * 256.0;
        }
        let unit = (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        unit < rate
    }

    /// Draws by the seed alone, for choices that are not worth bytes of the tape.
    pub fn seeded<T>(&mut self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        let tape = self.tape.take();
        let drawn = draw(self);
        self.tape = tape;
        drawn
    }

    /// Another generator that is independent of what this one is asked later, but for the tape.
    pub fn fork(&mut self) -> Rng {
        let seed = self.next_u64();
        self.reseeded(seed)
    }

    /// A number from as many bytes of the tape as the largest choice takes. `None` without a tape, at its end, and if
    /// there is no choice.
    fn draw_tape(&self, largest: u64) -> Option<u64> {
        let mut tape = self.tape.as_ref()?.borrow_mut();
        let bytes = (u64::BITS - largest.leading_zeros()).div_ceil(8) as usize;
        if bytes == 0 || tape.len() < bytes {
            return None;
        }
        Some(tape.by_ref().take(bytes).fold(0, |number, byte| number << 8 | u64::from(byte)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_the_published_one() {
        // The reference implementation's first outputs for seed 1234567.
        let mut rng = Rng::new(1_234_567);
        assert_eq!(rng.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(rng.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn draws_keep_to_their_bounds() {
        let mut rng = Rng::new(7);
        let mut seen = [false; 5];
        for _ in 0..1000 {
            seen[rng.below(5) as usize] = true;
            assert!((3..=4).contains(&rng.between(3, 4)));
            assert!(!rng.chance(0.0));
            assert!(rng.chance(1.0));
        }
        assert_eq!(seen, [true; 5]);
        assert_eq!((rng.below(0), rng.between(9, 9)), (0, 9));
    }

    #[test]
    fn a_tape_decides_choices_until_it_ends() {
        let mut rng = Rng::with_tape(7, vec![3, 1, 2, 255, 0, 9]);
        assert_eq!((rng.below(4), rng.below(1), rng.below(1 << 16)), (3, 0, 258), "a choice of one takes no byte");
        let mut fork = rng.fork();
        assert_eq!((fork.chance(0.9), rng.chance(0.01), fork.between(10, 29)), (false, true, 19), "one tape for both");
        let (mut seeded, mut ended) = (Rng::new(7), rng);
        // The choice of one and the fork.
        seeded.below(1);
        seeded.fork();
        assert_eq!(ended.below(1000), seeded.below(1000), "the seed decides after the end");
    }
}

//! The one source of chance in a simulation.

/// SplitMix64: tiny, fast, and the same on every machine for the same seed.
///
/// Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014).
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator whose whole sequence follows from `seed`.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, or 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The high half of the product is below `bound`; its bias is below bound / 2^64.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number from `min` to `max`, both included.
    pub fn between(&mut self, min: u64, max: u64) -> u64 {
        min + self.below((max.saturating_sub(min)).saturating_add(1))
    }

    /// True with this probability. Always takes one draw, so that the rest of the sequence does not
    /// depend on the rate.
    pub fn chance(&mut self, rate: f64) -> bool {
        let unit = (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        unit < rate
    }

    /// Another generator that is independent of what this one is asked later.
    pub fn fork(&mut self) -> Rng {
        Rng(self.next_u64())
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
}

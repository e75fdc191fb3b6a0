//! A seeded hash of keys, and the spread of entry ids.

use std::hash::{BuildHasherDefault, Hasher};

use kvhoist_base::block::BlockKey;

/// Hashes keys with secret multipliers: two folded 64x64-bit multiplications over the four words of
/// a key and one over their results (the scheme of wyhash).
///
/// An attacker who chooses keys without knowing the seed cannot aim them at one bucket. It is no keyed MAC: hash values
/// must not leave the process.
#[derive(Clone)]
pub struct KeyHasher {
    secrets: [u64; 6],
}

impl KeyHasher {
    /// A hasher that gives other numbers for each seed.
    pub fn new(seed: u64) -> Self {
        let mut state = seed;
        KeyHasher { secrets: std::array::from_fn(|_| splitmix64(&mut state)) }
    }

    /// The number of a key.
    #[inline]
    pub fn hash(&self, key: &BlockKey) -> u64 {
        let (words, _) = key.as_bytes().as_chunks::<8>();
        let [s0, s1, s2, s3, s4, s5] = self.secrets;
        let low = fold(u64::from_le_bytes(words[0]) ^ s0, u64::from_le_bytes(words[1]) ^ s1);
        let high = fold(u64::from_le_bytes(words[2]) ^ s2, u64::from_le_bytes(words[3]) ^ s3);
        fold(low ^ s4, high ^ s5)
    }
}

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

/// The step of SplitMix64 (Steele, Lea, Flood 2014).
fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Spreads entry ids over a table. No caller chooses ids, so one multiplication is enough; the shift moves the
/// well-mixed high half to where the table takes the bucket from.
#[derive(Default)]
pub(super) struct IdHasher(u64);

/// Builds [`IdHasher`]s; it has no state, so every run is alike.
pub(super) type BuildIdHasher = BuildHasherDefault<IdHasher>;

impl Hasher for IdHasher {
    #[inline]
    fn write_u32(&mut self, id: u32) {
        let product = u64::from(id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u32((self.0 as u32).rotate_left(8) ^ u32::from(byte));
        }
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys that differ in one bit only share chains no more often than chance.
    #[test]
    fn single_bit_keys_spread_by_the_low_and_the_high_bits() {
        for seed in 0..8 {
            let hasher = KeyHasher::new(seed);
            let mut low = [0u32; 64];
            let mut high = [0u32; 64];
            for bit in 0..256 {
                let mut bytes = [0u8; 32];
                bytes[bit / 8] = 1 << (bit % 8);
                let hash = hasher.hash(&BlockKey::new(bytes));
                low[(hash % 64) as usize] += 1;
                high[(hash >> 58) as usize] += 1;
            }
            // 4 expected in each; 16 or more has a chance below one in a hundred thousand.
            assert!(low.iter().all(|&n| n < 16), "seed {seed}: {low:?}");
            assert!(high.iter().all(|&n| n < 16), "seed {seed}: {high:?}");
        }
    }

    #[test]
    fn the_seed_changes_the_hash() {
        let key = BlockKey::new([7; 32]);
        assert_ne!(KeyHasher::new(1).hash(&key), KeyHasher::new(2).hash(&key));
    }
}

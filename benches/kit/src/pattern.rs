//! Which blocks are touched, and what is in them.

use std::io;

/// Bytes between two stamps: a block written or read in the wrong place, or in part, is found page by page.
pub const STAMP_STRIDE: usize = 4096;

/// SplitMix64: small, seeded, and the same on every machine.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `limit`, by multiplication; its bias is far below what a bench can see.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(limit)) >> 64) as u64
    }
}

/// `count` random numbers below `limit`; the same for the same seed.
pub fn random(seed: u64, limit: u64, count: u64) -> impl Iterator<Item = u64> {
    let mut rng = Rng::new(seed);
    (0..count).map(move |_| rng.below(limit))
}

/// `0..count` in random order, each number once.
pub fn shuffled(seed: u64, count: u64) -> impl Iterator<Item = u64> {
    let mut rng = Rng::new(seed);
    let mut numbers: Vec<u64> = (0..count).collect();
    for last in (1..numbers.len()).rev() {
        numbers.swap(last, rng.below(last as u64 + 1) as usize);
    }
    numbers.into_iter()
}

/// What stands at the start of page `page` of the block of `key`.
fn word(key: u64, page: usize) -> u64 {
    Rng::new(key ^ (page as u64).rotate_left(40)).next_u64()
}

/// Marks every page of a block with its key and place. The rest of the page is left as it is.
pub fn stamp(block: &mut [u8], key: u64) {
    for (page, bytes) in block.chunks_mut(STAMP_STRIDE).enumerate() {
        let word = word(key, page).to_le_bytes();
        let len = word.len().min(bytes.len());
        bytes[..len].copy_from_slice(&word[..len]);
    }
}

/// Checks that the block is whole and is the one of `key`. Touches one cache line a page, so that the check does not
/// drown what is measured.
pub fn verify(block: &[u8], key: u64) -> io::Result<()> {
    for (page, bytes) in block.chunks(STAMP_STRIDE).enumerate() {
        let word = word(key, page).to_le_bytes();
        let len = word.len().min(bytes.len());
        if bytes[..len] != word[..len] {
            let what =
                format!("block {key}, page {page}: found {:02x?}, expected {:02x?}", &bytes[..len], &word[..len]);
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
    }
    Ok(())
}

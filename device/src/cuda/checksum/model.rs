//! The algebra and constants of `kernels/checksum.cu`; the tests contain the same algorithm step by step.
//!
//! A CRC is linear: the CRC of a whole is the sum (XOR) of the CRCs of its parts, each carried over the bytes that
//! follow it. Carrying over n bytes is a multiplication by x^(8n) modulo the polynomial. All values are reflected, as
//! in CRC-64/NVME: the highest bit of a word is x^0, the lowest x^63.

/// The polynomial without its x^64 term.
const POLYNOMIAL: u64 = 0x9A6C_9329_AC4B_C9B5;

/// x^0.
const ONE: u64 = 1 << 63;

/// Bytes that a warp reads at once; lengths of pieces are multiples of it.
pub(crate) const PIECE_MULTIPLE: usize = 512;

/// Bytes of a piece: long enough that the final step, some 900 instructions, costs little; short enough for many warps.
const PIECE_BYTES: usize = 16 << 10;

/// Lanes of a warp.
const LANES: usize = 32;

/// Multiplies by x.
const fn times_x(a: u64) -> u64 {
    (a >> 1) ^ (POLYNOMIAL & 0_u64.wrapping_sub(a & 1))
}

/// Multiplies modulo the polynomial.
const fn times(a: u64, mut b: u64) -> u64 {
    let mut product = 0;
    let mut bit = 64;
    while bit > 0 {
        bit -= 1;
        product ^= b & 0_u64.wrapping_sub((a >> bit) & 1);
        b = times_x(b);
    }
    product
}

/// x^(8 * bytes).
const fn shift(mut bytes: u64) -> u64 {
    let (mut power, mut square) = (ONE, ONE >> 8);
    while bytes > 0 {
        if bytes & 1 == 1 {
            power = times(power, square);
        }
        square = times(square, square);
        bytes >>= 1;
    }
    power
}

/// Kernel arguments passed by value. `Constants` in `kernels/checksum.cu` has the same layout.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Constants {
    /// Bit `i`, carried over a row of zeros.
    carried: [u64; 64],
    /// Factor from the second word of each lane to the end of the row.
    lane: [u64; LANES],
}

pub(super) const CONSTANTS: Constants = {
    let mut constants = Constants { carried: [0; 64], lane: [0; LANES] };
    let row = shift(PIECE_MULTIPLE as u64);
    let mut at = 0;
    while at < 64 {
        constants.carried[at] = times(1 << at, row);
        at += 1;
    }
    let mut lane = 0;
    while lane < LANES {
        constants.lane[lane] = shift((PIECE_MULTIPLE - 16 * lane - 8) as u64);
        lane += 1;
    }
    constants
};

/// A range that one warp sums. `Piece` in `kernels/checksum.cu` has the same layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Piece {
    address: u64,
    bytes: u64,
    after: u64,
}

/// How a block with these segment lengths is cut into pieces. Made once per layout.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    lengths: Box<[usize]>,
    /// Segment, offset in it, bytes, and x^(8 * bytes that follow).
    pieces: Box<[(usize, usize, usize, u64)]>,
    /// Contribution of the initial value and the final inversion.
    around: u64,
}

impl Plan {
    /// `None` if a length is not a multiple of [`PIECE_MULTIPLE`], or if there would be more than `pieces_max` pieces.
    pub(crate) fn new(lengths: impl Iterator<Item = usize>, pieces_max: usize) -> Option<Self> {
        let lengths: Box<[usize]> = lengths.collect();
        let bytes: usize = lengths.iter().sum();
        if lengths.iter().any(|len| len % PIECE_MULTIPLE != 0) {
            return None;
        }
        // Blocks too long for pieces of the usual length get longer pieces.
        let spare = pieces_max.checked_sub(lengths.len()).filter(|&spare| spare > 0)?;
        let piece_bytes = bytes.div_ceil(spare).next_multiple_of(PIECE_MULTIPLE).max(PIECE_BYTES);
        let mut pieces = Vec::new();
        for (segment, &len) in lengths.iter().enumerate() {
            let offsets = (0..len).step_by(piece_bytes);
            pieces.extend(offsets.map(|at| (segment, at, piece_bytes.min(len - at), 0)));
        }
        let mut after = ONE;
        for (_, _, bytes, follows) in pieces.iter_mut().rev() {
            *follows = after;
            after = times(after, shift(*bytes as u64));
        }
        // `after` now spans the whole block: the initial value, all ones, is carried over it.
        Some(Plan { lengths, pieces: pieces.into(), around: !times(u64::MAX, after) })
    }

    /// True if the plan is for segments of these lengths.
    pub(crate) fn is_for(&self, lengths: impl Iterator<Item = usize>) -> bool {
        self.lengths.iter().copied().eq(lengths)
    }

    /// Number of pieces in a block.
    pub(crate) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// The pieces of a block whose segments start at these addresses.
    pub(crate) fn pieces(&self, addresses: &[u64]) -> impl Iterator<Item = Piece> {
        assert_eq!(addresses.len(), self.lengths.len(), "one address for each segment");
        self.pieces.iter().map(|&(segment, at, bytes, after)| {
            let address = addresses[segment] + at as u64;
            Piece { address, bytes: bytes as u64, after }
        })
    }

    /// The checksum of a block, from the sums of its pieces.
    pub(crate) fn checksum(&self, sums: impl Iterator<Item = u64>) -> u64 {
        sums.fold(self.around, |sum, piece| sum ^ piece)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use kvhoist_base::checksum::checksum;

    /// The tables of a thread block as the kernel makes them, and one of their 16 copies.
    fn tables() -> Vec<u64> {
        let value = |thread: usize| {
            let bits = (0..4).filter(|bit| thread >> bit & 1 == 1);
            bits.fold(0, |value, bit| value ^ CONSTANTS.carried[thread / 16 * 4 + bit])
        };
        (0..256).map(value).collect()
    }

    /// `carry` of the kernel.
    fn carry(tables: &[u64], a: u64) -> u64 {
        (0..16).fold(0, |sum, p| sum ^ tables[p * 16 + (a >> (4 * p) & 15) as usize])
    }

    /// The kernel's result for a piece with these bytes.
    fn sum_of(tables: &[u64], bytes: &[u8], after: u64) -> u64 {
        let word = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().expect("8 bytes"));
        let mut sum = 0;
        for lane in 0..LANES {
            let (mut first, mut second) = (0, 0);
            for row in (0..bytes.len()).step_by(PIECE_MULTIPLE) {
                first = carry(tables, first) ^ word(row + 16 * lane);
                second = carry(tables, second) ^ word(row + 16 * lane + 8);
            }
            for _ in 0..64 {
                first = times_x(first);
            }
            sum ^= times(first ^ second, CONSTANTS.lane[lane]);
        }
        times(sum, after)
    }

    fn modelled(segments: &[Vec<u8>], pieces_max: usize) -> u64 {
        let plan = Plan::new(segments.iter().map(Vec::len), pieces_max).expect("multiples of 512");
        assert!(plan.len() <= pieces_max);
        let tables = tables();
        let sums = plan
            .pieces
            .iter()
            .map(|&(segment, at, bytes, after)| sum_of(&tables, &segments[segment][at..at + bytes], after));
        plan.checksum(sums)
    }

    #[test]
    fn multiplication_is_that_of_the_field() {
        assert_eq!(times(ONE, 0x1234_5678_9ABC_DEF0), 0x1234_5678_9ABC_DEF0);
        assert_eq!(times(ONE >> 1, ONE >> 63), times_x(ONE >> 63));
        assert_eq!(times(shift(3), shift(5)), shift(8));
        let mut carried = 0xDEAD_BEEF_u64;
        for _ in 0..800 {
            carried = times_x(carried);
        }
        assert_eq!(times(0xDEAD_BEEF, shift(100)), carried);
    }

    #[test]
    fn known_answers() {
        assert_eq!(modelled(&[vec![0; 4096]], 64), 0x6482_D367_EB22_B64E);
        assert_eq!(modelled(&[vec![0xFF; 2048], vec![0xFF; 2048]], 64), 0xC0DD_BA73_02EC_A3AC);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// However a block is cut, the kernel's algorithm gives the checksum of its bytes.
        #[test]
        fn the_algorithm_gives_the_checksum(lengths in vec(1..80_usize, 1..5), seed: u64, spare in 1..12_usize) {
            let mut state = seed | 1;
            let segments: Vec<Vec<u8>> = lengths.iter().map(|rows| {
                (0..rows * PIECE_MULTIPLE).map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 56) as u8
                }).collect()
            }).collect();
            prop_assert_eq!(modelled(&segments, lengths.len() + spare), checksum(&segments.concat()));
        }
    }

    #[test]
    fn a_block_that_the_kernel_cannot_sum_has_no_plan() {
        assert_eq!(Plan::new([512, 100].into_iter(), 64), None);
        assert_eq!(Plan::new([512; 64].into_iter(), 64), None);
        let plan = Plan::new([1 << 30].into_iter(), 4096).expect("longer pieces");
        assert!(plan.len() <= 4096 && plan.is_for([1 << 30].into_iter()) && !plan.is_for([512].into_iter()));
    }

    #[test]
    fn structures_are_those_of_the_kernel() {
        assert_eq!((size_of::<Piece>(), size_of::<Constants>()), (24, 768));
    }
}

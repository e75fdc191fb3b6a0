//! The checksum of everything on disk: CRC-64/NVME.
//!
//! Carry-less multiplication runs it at memory speed on current CPUs, and it is linear, so that parts can be computed
//! separately (on a GPU, for example) and combined. Parameters by the NVM Express NVM Command Set Specification, "64b
//! CRC": polynomial 0xAD93D23594C93659, reflected, initial value and final XOR all ones.

use crc_fast::CrcAlgorithm;

/// The CRC-64/NVME of `bytes`.
///
/// ```
/// assert_eq!(kvhoist::internals::checksum::checksum(b"123456789"), 0xAE8B_1486_0A79_9888);
/// ```
pub fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::crc64_nvme(bytes)
}

/// The checksum of bytes that arrive in chunks.
#[derive(Debug)]
pub struct Digest(crc_fast::Digest);

impl Digest {
    /// A digest of no bytes.
    pub fn new() -> Self {
        Digest(crc_fast::Digest::new(CrcAlgorithm::Crc64Nvme))
    }

    /// Adds the next chunk.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all chunks so far.
    pub fn finish(&self) -> u64 {
        self.0.finalize()
    }
}

impl Default for Digest {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The checksum bit by bit, from the parameters of the specification.
    fn reference(bytes: &[u8]) -> u64 {
        let mut crc = u64::MAX;
        for &byte in bytes {
            crc ^= u64::from(byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ (0x9A6C_9329_AC4B_C9B5 * (crc & 1));
            }
        }
        !crc
    }

    #[test]
    fn known_answers() {
        assert_eq!(checksum(b"123456789"), 0xAE8B_1486_0A79_9888);
        assert_eq!(checksum(b""), 0);
        // NVM Command Set Specification, figure "64b CRC test cases".
        assert_eq!(checksum(&[0; 4096]), 0x6482_D367_EB22_B64E);
        assert_eq!(checksum(&[0xFF; 4096]), 0xC0DD_BA73_02EC_A3AC);
    }

    #[test]
    fn every_length_agrees_with_the_bitwise_reference() {
        let bytes: Vec<u8> = (0..1500u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for len in 0..bytes.len() {
            assert_eq!(checksum(&bytes[..len]), reference(&bytes[..len]), "{len} bytes");
        }
    }

    #[test]
    fn chunks_do_not_matter() {
        let bytes: Vec<u8> = (0..10_000u32).map(|i| (i.wrapping_mul(40_503) >> 8) as u8).collect();
        for chunk in [1, 7, 120, 4096, 9_999] {
            let mut digest = Digest::new();
            bytes.chunks(chunk).for_each(|part| digest.update(part));
            assert_eq!(digest.finish(), checksum(&bytes), "chunks of {chunk}");
        }
    }
}

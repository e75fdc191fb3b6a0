//! Keys and payloads of trace ids: each payload is derived from its key, so that every byte that
//! comes back can be checked.

use kvhoist::BlockKey;
use sha2::{Digest, Sha256};

/// The key of a trace id. Ids name whole prefixes already.
pub fn key_of(id: u64) -> BlockKey {
    let mut hash = Sha256::new();
    hash.update(b"kvhoist replay v1\0");
    hash.update(id.to_le_bytes());
    BlockKey::new(hash.finalize().into())
}

/// Fills `block` with the payload of `key`: every 8 bytes depend on the key and on their place.
pub fn fill(key: &BlockKey, block: &mut [u8]) {
    let mut words = Words::new(key);
    let mut chunks = block.chunks_exact_mut(8);
    for chunk in &mut chunks {
        chunk.copy_from_slice(&words.next().to_le_bytes());
    }
    let rest = chunks.into_remainder();
    let last = words.next().to_le_bytes();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// True if `block` is the payload of `key`, every byte of it.
pub fn is_payload(key: &BlockKey, block: &[u8]) -> bool {
    let mut words = Words::new(key);
    let chunks = block.chunks_exact(8);
    let rest = chunks.remainder();
    let mut differing = 0;
    for chunk in chunks {
        differing |= words.next() ^ u64::from_le_bytes(chunk.try_into().expect("a chunk of 8 bytes"));
    }
    differing == 0 && words.next().to_le_bytes()[..rest.len()] == *rest
}

/// A Weyl sequence from the key, each word mixed by one multiplication: fast, and no two places of
/// any two blocks are likely to agree.
struct Words {
    state: u64,
    step: u64,
}

impl Words {
    fn new(key: &BlockKey) -> Self {
        let (words, _) = key.as_bytes().as_chunks::<8>();
        Words { state: u64::from_le_bytes(words[0]), step: u64::from_le_bytes(words[1]) | 1 }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(self.step);
        let mixed = (self.state ^ (self.state >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 29)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_changed_byte_is_noticed() {
        for len in [1, 8, 13, 4096] {
            let key = key_of(7);
            let mut block = vec![0; len];
            fill(&key, &mut block);
            assert!(is_payload(&key, &block));
            assert!(!is_payload(&key_of(8), &block));
            for at in 0..len {
                block[at] ^= 1;
                assert!(!is_payload(&key, &block), "byte {at} of {len}");
                block[at] ^= 1;
            }
        }
    }
}

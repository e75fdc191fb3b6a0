//! The built-in workload: chat sessions whose prefixes grow, many of them behind a shared system
//! prompt. The same seed gives the same trace.

use crate::trace::Request;

const REQUESTS: usize = 3_000;
const SYSTEM_PROMPTS: u64 = 16;
const SYSTEM_BLOCKS: u64 = 8;
const SESSIONS_AT_ONCE: usize = 256;

/// A trace of about 60,000 block references.
pub fn generate(seed: u64) -> Vec<Request> {
    let mut random = Random(seed);
    let mut next_id = SYSTEM_PROMPTS * SYSTEM_BLOCKS;
    let mut sessions: Vec<Vec<u64>> = (0..SESSIONS_AT_ONCE).map(|_| new_session(&mut random)).collect();
    let mut requests = Vec::with_capacity(REQUESTS);
    while requests.len() < REQUESTS {
        // Two draws, the smaller wins: some sessions are much busier than others.
        let at = random.below(SESSIONS_AT_ONCE as u64).min(random.below(SESSIONS_AT_ONCE as u64)) as usize;
        let session = &mut sessions[at];
        for _ in 0..1 + random.below(6) {
            session.push(next_id);
            next_id += 1;
        }
        requests.push(Request { timestamp: 0.0, hash_ids: session.clone() });
        if session.len() > 48 || random.below(12) == 0 {
            *session = new_session(&mut random);
        }
    }
    requests
}

fn new_session(random: &mut Random) -> Vec<u64> {
    let prompt = random.below(SYSTEM_PROMPTS).min(random.below(SYSTEM_PROMPTS));
    (prompt * SYSTEM_BLOCKS..(prompt + 1) * SYSTEM_BLOCKS).collect()
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_seed_decides_and_ids_name_prefixes() {
        let requests = generate(1);
        assert_eq!(requests, generate(1));
        assert_ne!(requests, generate(2));
        let mut parents = BTreeMap::new();
        for request in &requests {
            for (i, id) in request.hash_ids.iter().enumerate() {
                let parent = i.checked_sub(1).map(|i| request.hash_ids[i]);
                assert_eq!(*parents.entry(*id).or_insert(parent), parent, "an id has one prefix");
            }
        }
    }
}

//! The bound that no policy can pass: what a cache would hit that knew all that is to come.

use std::collections::{BTreeSet, HashMap};

use crate::trace::Request;

/// Hits of a cache of `slots` blocks that gives up what is asked for again last, or does not take it in at all
/// (Belady's MIN with bypass). It knows nothing of prefixes, and so is a bound for caches that do.
pub fn hits(requests: &[Request], slots: usize) -> u64 {
    let references: Vec<u64> = requests.iter().flat_map(|request| request.chain.ids()).collect();
    let next = next_uses(&references);
    // What is held, by the next use, and where that is.
    let mut by_next = BTreeSet::new();
    let mut held = HashMap::new();
    let mut hits = 0;
    for (&block, &next) in references.iter().zip(&next) {
        if let Some(known) = held.insert(block, next) {
            hits += 1;
            by_next.remove(&(known, block));
        }
        by_next.insert((next, block));
        if by_next.len() > slots {
            let (_, last) = by_next.pop_last().expect("it holds one more than it may");
            held.remove(&last);
        }
    }
    hits
}

/// Where each reference's block is asked for again; past the end and different for each where it never is.
fn next_uses(references: &[u64]) -> Vec<usize> {
    let mut next = vec![0; references.len()];
    let mut seen = HashMap::new();
    for (at, &block) in references.iter().enumerate().rev() {
        next[at] = seen.insert(block, at).unwrap_or(references.len() + at);
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Chain;

    fn trace(ids: &[u64]) -> Vec<Request> {
        ids.iter().map(|&id| Request { timestamp: 0.0, chain: Chain::Listed(vec![id]) }).collect()
    }

    #[test]
    fn the_bound_is_what_foresight_gets() {
        assert_eq!(hits(&trace(&[1, 2, 3, 1, 2, 3]), 3), 3, "all fit");
        assert_eq!(hits(&trace(&[1, 2, 3, 1, 2, 3]), 2), 2, "one is left out");
        assert_eq!(hits(&trace(&[1, 2, 3, 1, 2, 3]), 1), 1);
        assert_eq!(hits(&trace(&[1, 2, 1, 3, 1, 4, 1]), 1), 3, "what never comes again is not taken in");
        assert_eq!(hits(&trace(&[]), 1), 0);
    }
}

//! The built-in workload: chat, agents and scans together. The same seed gives the same trace.

use crate::{
    trace::{Chain, Request},
    workload::{AGENTS, Asked, CHAT, SCANS, mix},
};

const REQUESTS: usize = 1_000;

/// A trace of a quarter of an hour, about 50,000 block references: a third of the chat, and all of the agents.
pub fn generate(seed: u64) -> Vec<Request> {
    let asked = mix(seed, &[(&CHAT, 0.3), (&AGENTS, 1.0), (&SCANS, 0.2)], REQUESTS);
    let request = |asked: Asked| Request { timestamp: asked.at_ms, chain: Chain::Listed(asked.blocks) };
    asked.into_iter().map(request).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::workload::Kind;

    #[test]
    fn the_seed_decides_and_ids_name_prefixes() {
        let requests = generate(1);
        assert_eq!(requests, generate(1));
        assert_ne!(requests, generate(2));
        assert_eq!(requests.len(), REQUESTS);
        assert!(requests.is_sorted_by(|a, b| a.timestamp <= b.timestamp), "in the order of time");
        let mut parents = BTreeMap::new();
        for request in &requests {
            let mut parent = None;
            for id in request.chain.ids() {
                assert_eq!(*parents.entry(id).or_insert(parent), parent, "an id has one prefix");
                parent = Some(id);
            }
        }
        let references: usize = requests.iter().map(|request| request.chain.ids().count()).sum();
        assert!((30_000..80_000).contains(&references), "{references} references");
    }

    /// Blocks a request, requests for each conversation that has ended, and the share of references to blocks that were
    /// asked for before.
    fn figures(asked: &[Asked]) -> [f64; 3] {
        let references: usize = asked.iter().map(|asked| asked.blocks.len()).sum();
        let distinct: BTreeSet<u64> = asked.iter().flat_map(|asked| asked.blocks.iter().copied()).collect();
        let ended = asked.iter().filter(|asked| asked.is_last).count();
        let requests = asked.len() as f64;
        [references as f64 / requests, requests / ended as f64, 1.0 - distinct.len() as f64 / references as f64]
    }

    /// What was recorded, within what a table of quantiles can say of it: a mean is within 30 %, the share within
    /// 0.03.
    #[test]
    fn the_figures_are_those_that_were_recorded() {
        let cases: [(&str, &Kind, usize, [f64; 3]); 2] =
            [("chat", &CHAT, 12_031, [24.0, 1.49, 0.366]), ("agents", &AGENTS, 11_780, [216.0, 25.8, 0.961])];
        for (name, kind, requests, recorded) in cases {
            let made = figures(&mix(1, &[(kind, 1.0)], requests));
            println!("{name}: {made:?}, recorded {recorded:?}");
            for at in [0, 1] {
                assert!((made[at] / recorded[at] - 1.0).abs() < 0.3, "{name}: {made:?}, recorded {recorded:?}");
            }
            assert!((made[2] - recorded[2]).abs() < 0.03, "{name}: {made:?}, recorded {recorded:?}");
        }
    }
}

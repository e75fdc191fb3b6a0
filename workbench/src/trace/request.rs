//! What a trace asks of a cache.

use std::{io::BufRead, ops::Range};

use super::lines::Lines;

/// A request of more blocks is refused.
pub const BLOCKS_MAX: usize = 1 << 20;

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// When it came, milliseconds.
    pub timestamp: f64,
    /// What it asks for.
    pub chain: Chain,
}

/// A prefix chain, by numbers: equal ones stand for equal prefixes up to there.
#[derive(Debug, Clone, PartialEq)]
pub enum Chain {
    /// First block first.
    Listed(Vec<u64>),
    /// The blocks of an object.
    Object(Range<u64>),
}

impl Chain {
    /// The chain that the current line lists, if it is not too long.
    pub fn listed(ids: Vec<u64>, lines: &Lines<impl BufRead>) -> Result<Self, String> {
        if ids.len() > BLOCKS_MAX {
            return Err(lines.wrong(&format!("found {} hash_ids, expected at most {BLOCKS_MAX}", ids.len())));
        }
        Ok(Chain::Listed(ids))
    }

    /// The numbers, first block first.
    pub fn ids(&self) -> impl Iterator<Item = u64> + '_ {
        let (listed, object) = match self {
            Chain::Listed(ids) => (&ids[..], 0..0),
            Chain::Object(ids) => (&[][..], ids.clone()),
        };
        listed.iter().copied().chain(object)
    }
}

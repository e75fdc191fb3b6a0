//! The index against plain models: maps, naive scans, every answer compared, with every policy.

#[path = "../common/mod.rs"]
mod common;

mod chains;
mod drawn;
mod hints;
mod model;
mod policy_ratios;
mod rb;
mod restart;
mod uses;

use common::key;
use kvhoist::{
    BlockKey, Tier,
    internals::index::{EntryId, Index},
};

/// How many of the leading blocks of a chain are resident.
fn matched(index: &Index, chain: &[BlockKey]) -> usize {
    chain.iter().map_while(|key| index.best_tier(index.find(key)?)).count()
}

/// Makes `n` resident in `tier`, in the slot of its number.
fn full(index: &mut Index, n: u64, parent: Option<u64>, tier: Tier) -> EntryId {
    let id = index.insert(key(n), parent.map(key));
    assert!(index.begin_fill(id, tier) && index.complete_fill(id, tier, n as u32));
    id
}

//! Hints of clients: what one client releases or keeps is released or kept for all clients of its space.

use std::time::Duration;

use kvhoist::{BlockKey, Tier, block_on};

use crate::{
    common::key,
    node::Node,
    pool_client::{POOL_BLOCKS, PoolClient},
};

/// Keys in one request, as the protocol's limit says.
const KEYS_MAX: usize = 4096;

fn keys(numbers: std::ops::Range<u64>) -> Vec<BlockKey> {
    numbers.map(key).collect()
}

/// Stores a chain of its own.
fn store(pool_client: &PoolClient, first: u64) {
    let places: Vec<_> = (0..POOL_BLOCKS).map(|at| pool_client.place(at)).collect();
    let stored = block_on(pool_client.client.store_from(&keys(first..first + POOL_BLOCKS), None, &places));
    stored.expect("a service").into_iter().for_each(|result| assert!(result.expect("stored")));
}

#[test]
fn released_blocks_are_evicted_first_and_kept_ones_last() {
    let node = Node::new();
    let [pool_client, other] = [PoolClient::new(&node.socket()), PoolClient::new(&node.socket())];
    // As many chains as there is room for, and a few slots.
    let slots = block_on(pool_client.client.stats()).expect("a service").tier(Tier::Disk).slots;
    let (all, spare) = (slots / POOL_BLOCKS * POOL_BLOCKS, (slots % POOL_BLOCKS) as usize);
    (0..all).step_by(POOL_BLOCKS as usize).for_each(|first| store(&pool_client, first));
    let (kept, cold, released) = (0..POOL_BLOCKS, POOL_BLOCKS..2 * POOL_BLOCKS, all - POOL_BLOCKS..all);
    let chain = POOL_BLOCKS as usize;
    let hour = Duration::from_secs(3600);
    assert_eq!(block_on(pool_client.client.keep(&keys(kept.clone()), hour)).expect("a service"), chain);
    assert_eq!(block_on(pool_client.client.release(&keys(released.clone()))).expect("a service"), chain);
    let resident = |numbers: std::ops::Range<u64>| {
        block_on(other.client.contains(&keys(numbers))).expect("a service").into_iter().filter(|there| *there).count()
    };
    store(&other, all);
    assert_eq!([released, cold.clone()].map(resident), [spare, chain], "the newest went before the coldest");
    store(&other, all + POOL_BLOCKS);
    assert_eq!([kept, cold].map(resident), [chain, spare], "the coldest went before the kept");
}

/// The second request releases the beginning of a chain whose end the first one released.
#[test]
fn a_chain_of_more_keys_than_a_request_has_is_released_whole() {
    let node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    store(&pool_client, 0);
    let mut chain = keys(0..POOL_BLOCKS);
    let missing = KEYS_MAX as u64 - POOL_BLOCKS / 2;
    chain.extend(keys(1_000_000..1_000_000 + missing));
    assert_eq!(block_on(pool_client.client.release(&chain)).expect("a service"), POOL_BLOCKS as usize);
}

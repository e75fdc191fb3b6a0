//! Services that end while clients are attached: what callers are told, and what they find afterwards.

use std::{thread, time::Instant};

use kvhoist::block_on;

use crate::{
    common::key,
    neighbor::{Neighbor, filled},
    node::HANG,
    pool_client::{PoolClient, is_away},
};

#[test]
fn while_the_service_is_away_calls_fail_at_once_and_say_what_to_do() {
    let mut node = filled();
    let pool_client = PoolClient::new(&node.socket());
    node.process.kill();
    let hang = Instant::now() + HANG;
    let error = loop {
        match pool_client.load(0, 1) {
            Err(error) => break error,
            // Sent before the kernel told of the death.
            Ok(_) => assert!(Instant::now() < hang),
        }
    };
    assert!(is_away(&error) && error.is_transient(), "{error}");
    assert!(error.to_string().contains("start `kvhoist serve`"), "{error}");
    assert!(!pool_client.client.is_connected());
    // Nothing has the memory any more.
    block_on(pool_client.client.unregister(&pool_client.region)).expect("at once");
    node.restart();
    let hang = Instant::now() + HANG;
    while !pool_client.client.is_connected() {
        assert!(Instant::now() < hang, "it connects again");
        thread::yield_now();
    }
    assert_eq!(block_on(pool_client.client.match_len(&[key(0)])).expect("a service"), 1);
    assert_eq!(node.held().mappings, 0, "a region that was given back is not registered again");
}

#[test]
fn a_service_that_drains_answers_what_it_has_begun() {
    let mut node = filled();
    let neighbors = [0, 1].map(|n| Neighbor::start(node.socket(), n, true));
    neighbors.iter().for_each(Neighbor::wait_for_a_load);
    assert!(node.process.end().success());
    node.restart();
    neighbors.iter().for_each(Neighbor::wait_for_a_load);
    neighbors.into_iter().for_each(Neighbor::end);
}

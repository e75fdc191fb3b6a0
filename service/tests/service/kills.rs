//! Clients and services that are killed at drawn moments, while other clients work. Every byte is compared, and in the
//! end the service holds what it held before: slots, regions, mappings, descriptors, memory.
//!
//! `KVHOIST_KILLS=1000/300` kills so many clients and services; `KVHOIST_TEST_SEED` repeats a run's draws.

use std::time::{Duration, Instant};

use kvhoist::{Tier, block_on};

use crate::{
    common::{Rng, key, seed},
    neighbor::{Neighbor, filled},
    node::{DISK_BLOCKS, HANG, Held, Node, Process},
    pool_client::{BLOCKS, POOL_BLOCKS, PoolClient},
};

/// Clients that are drawn from at a time.
const VICTIMS: usize = 3;
/// What the allocator and the threads of a service may keep beside what it held: less than a KiB for each of 1,000
/// clients, and than one block of each.
const OWN_BYTES_MORE_MAX: u64 = 4 << 20;

/// How many clients and how many services are killed.
fn kills() -> (u64, u64) {
    let Ok(text) = std::env::var("KVHOIST_KILLS") else { return (20, 6) };
    let numbers =
        text.split_once('/').and_then(|(clients, services)| Some((clients.parse().ok()?, services.parse().ok()?)));
    numbers.unwrap_or_else(|| panic!("KVHOIST_KILLS: found {text:?}, expected CLIENTS/SERVICES, such as 1000/300"))
}

/// Lets a drawn time pass: what it ends in the middle of is drawn with it.
fn a_moment(rng: &mut Rng) {
    let until = Instant::now() + Duration::from_micros(rng.below(4000));
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

/// Processes of clients, of which one after another is killed.
struct Victims {
    role: String,
    alive: Vec<Process>,
}

impl Victims {
    fn start(role: &str, node: &Node, rng: &mut Rng) -> Self {
        let role = format!("{role} {}", node.socket().display());
        let alive = (0..VICTIMS).map(|_| Process::start(&format!("{role} {}", rng.next()))).collect();
        Victims { role, alive }
    }

    /// Kills one of them some calls later, and starts another in its place.
    fn kill_one(&mut self, rng: &mut Rng) {
        let victim = &mut self.alive[rng.below(VICTIMS as u64) as usize];
        for _ in 0..=rng.below(20) {
            if victim.word().is_none() {
                break;
            }
        }
        a_moment(rng);
        victim.kill();
        *victim = Process::start(&format!("{} {}", self.role, rng.next()));
    }

    /// Waits until each has made calls.
    fn wait_for_calls(&mut self) {
        for victim in &mut self.alive {
            for _ in 0..4 {
                assert_eq!(victim.word().as_deref(), Some("next"));
            }
        }
    }

    fn kill_all(mut self) {
        self.alive.iter_mut().for_each(Process::kill);
    }
}

fn start_neighbors(node: &Node, rng: &mut Rng, may_be_away: bool) -> [Neighbor; 2] {
    [0, 1].map(|_| Neighbor::start(node.socket(), rng.next(), may_be_away))
}

/// All slots of a service can be used: as many new blocks fit into each tier as it has slots.
fn check_slots(node: &Node) {
    let pool_client = PoolClient::new(&node.socket());
    for first in (0..DISK_BLOCKS).step_by(POOL_BLOCKS as usize) {
        let stored = pool_client.store((1 << 32) + first, POOL_BLOCKS).expect("a service");
        assert!(stored.iter().all(|result| matches!(result, Ok(true))), "{stored:?}");
    }
    let stats = || block_on(pool_client.client.stats()).expect("a service");
    let is_full = |tier| stats().tier(tier).slots > 0 && stats().tier(tier).resident == stats().tier(tier).slots;
    for first in (0..DISK_BLOCKS).step_by(POOL_BLOCKS as usize) {
        let first = (1 << 32) + first;
        let keys: Vec<_> = (first..first + POOL_BLOCKS).map(key).collect();
        let begun = Instant::now();
        let are_in_host = || {
            block_on(pool_client.client.match_prefix(&keys)).expect("a service") == [Tier::Host; POOL_BLOCKS as usize]
        };
        while !is_full(Tier::Host) && !are_in_host() {
            assert!(begun.elapsed() < HANG, "prefetched blocks do not come: {:?}", stats());
            block_on(pool_client.client.prefetch(&keys)).expect("a service");
        }
    }
    for tier in [Tier::Disk, Tier::Host] {
        assert!(is_full(tier), "slots of {tier:?} are lost: {:?}", stats());
    }
    block_on(pool_client.client.close()).expect("closed");
}

/// All that the clients share is there, with its bytes, and no block was damaged.
fn check_blocks(node: &Node) {
    let pool_client = PoolClient::new(&node.socket());
    for first in (0..BLOCKS).step_by(POOL_BLOCKS as usize) {
        assert_eq!(pool_client.load(first, POOL_BLOCKS).expect("a service"), [true; POOL_BLOCKS as usize]);
    }
    assert_eq!(block_on(pool_client.client.stats()).expect("a service").quarantined, 0);
    block_on(pool_client.client.close()).expect("closed");
}

/// A service without clients holds no more than `before`.
fn check_held(node: &Node, before: &Held) {
    node.wait_for_clients(0);
    node.wait_for_held(before);
    let (status, held) = (node.status(), node.held());
    // The blocks in host memory may have come since.
    let own_bytes_max = before.own_bytes + status.host_bytes + OWN_BYTES_MORE_MAX;
    assert!(held.own_bytes <= own_bytes_max, "{held:?}, expected {before:?}");
    let own = &status.clients[0];
    assert_eq!((own.regions, own.bytes_in_flight, status.spaces[0].clients), (0, 0, 0), "{status:?}");
}

#[test]
fn killed_clients_leave_nothing_behind_and_nobody_notices() {
    let mut rng = Rng(seed());
    let node = filled();
    let mut neighbors = start_neighbors(&node, &mut rng, false);
    let mut victims = Victims::start("busy", &node, &mut rng);
    // What the first clients make the service take for good is not theirs.
    victims.wait_for_calls();
    victims.kill_all();
    neighbors.into_iter().for_each(Neighbor::end);
    node.wait_for_clients(0);
    let before = node.held();
    assert_eq!(before.mappings, 0);
    neighbors = start_neighbors(&node, &mut rng, false);
    victims = Victims::start("busy", &node, &mut rng);
    for _ in 0..kills().0 {
        victims.kill_one(&mut rng);
        neighbors.iter().for_each(Neighbor::wait_for_a_load);
    }
    victims.kill_all();
    neighbors.into_iter().for_each(Neighbor::end);
    check_held(&node, &before);
    assert_eq!(node.status().cut_off, 0);
    check_blocks(&node);
    check_slots(&node);
    check_held(&node, &before);
}

#[test]
fn killed_services_cost_misses_until_they_are_back() {
    let mut rng = Rng(seed());
    let mut node = filled();
    let before = node.held();
    let neighbors = start_neighbors(&node, &mut rng, true);
    let mut victims = Victims::start("busy-or-away", &node, &mut rng);
    for _ in 0..kills().1 {
        neighbors.iter().for_each(Neighbor::wait_for_a_load);
        a_moment(&mut rng);
        node.process.kill();
        if rng.below(2) == 0 {
            victims.kill_one(&mut rng);
        }
        node.restart();
        // All blocks are found: each load of a neighbor says so.
        neighbors.iter().for_each(Neighbor::wait_for_a_load);
    }
    victims.kill_all();
    neighbors.into_iter().for_each(Neighbor::end);
    check_held(&node, &before);
    check_blocks(&node);
    check_slots(&node);
    check_held(&node, &before);
}

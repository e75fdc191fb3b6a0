//! Clients and services that are killed, while others work.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kvhoist::block_on;

use crate::{
    common::{Rng, key, seed},
    guest::{BLOCKS, Guest, POOL_BLOCKS, is_away},
    node::{HANG, Node, Process},
};

/// How many are killed; `KVHOIST_KILLS` asks for more.
fn kills(default: u64) -> u64 {
    std::env::var("KVHOIST_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// A moment between two of another process's words.
fn a_moment(rng: &mut Rng) {
    let until = Instant::now() + Duration::from_micros(rng.below(4000));
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

/// A client in a thread of this process that loads and stores until it is told to end.
struct Neighbor {
    stop: Arc<AtomicBool>,
    loads: Arc<AtomicU64>,
    thread: thread::JoinHandle<()>,
}

impl Neighbor {
    /// `lonely`: the service may go away.
    fn start(socket: PathBuf, seed: u64, lonely: bool) -> Self {
        let (stop, loads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (told, counted) = (Arc::clone(&stop), Arc::clone(&loads));
        let thread = thread::spawn(move || {
            let guest = Guest::new(&socket);
            let mut rng = Rng(seed);
            while !told.load(Ordering::Relaxed) {
                let count = 1 + rng.below(POOL_BLOCKS);
                let first = rng.below(BLOCKS - count);
                let result = match rng.below(4) {
                    0 => guest.store(first, count).map(drop),
                    _ => guest.load(first, count).map(|there| {
                        assert!(there.into_iter().all(|there| there), "a block that was stored is gone");
                        counted.fetch_add(1, Ordering::Relaxed);
                    }),
                };
                if let Err(error) = result {
                    assert!(lonely && is_away(&error), "{error}");
                }
            }
            block_on(guest.client.unregister(&guest.region)).expect("unregistered");
        });
        Neighbor { stop, loads, thread }
    }

    /// Waits for a load that ends after now.
    fn wait_for_a_load(&self) {
        let (before, hang) = (self.loads.load(Ordering::Relaxed), Instant::now() + HANG);
        // One may be under way that began earlier.
        while self.loads.load(Ordering::Relaxed) < before + 2 {
            assert!(!self.thread.is_finished() && Instant::now() < hang, "the neighbor loads nothing");
            thread::yield_now();
        }
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("right bytes, and no error");
    }
}

/// A service whose space has all blocks.
fn filled() -> Node {
    let node = Node::new();
    let guest = Guest::new(&node.socket());
    for first in (0..BLOCKS).step_by(POOL_BLOCKS as usize) {
        guest.store(first, POOL_BLOCKS).expect("a service").into_iter().for_each(|result| {
            assert!(result.expect("stored"));
        });
    }
    block_on(guest.client.close()).expect("closed");
    node.wait_for_clients(0);
    node
}

#[test]
fn a_killed_client_leaves_nothing_behind_and_nobody_notices() {
    let mut rng = Rng(seed());
    let node = filled();
    let neighbor = Neighbor::start(node.socket(), rng.next(), false);
    neighbor.wait_for_a_load();
    node.wait_for_clients(1);
    let before = node.held();
    for _ in 0..kills(10) {
        let mut victim = Process::start(&format!("busy {} {}", node.socket().display(), rng.next()));
        for _ in 0..=rng.below(20) {
            assert_eq!(victim.word().as_deref(), Some("next"));
        }
        a_moment(&mut rng);
        victim.kill();
        node.wait_for_clients(1);
        node.wait_for_held(&before);
        neighbor.wait_for_a_load();
    }
    let status = node.status();
    assert_eq!(status.cut_off, 0);
    assert_eq!(status.spaces[0].stats.as_ref().expect("open").checksum_failures, 0);
    neighbor.end();
}

#[test]
fn a_killed_service_costs_misses_until_it_is_back() {
    let mut rng = Rng(seed());
    let mut node = filled();
    let neighbors = [0, 1].map(|_| Neighbor::start(node.socket(), rng.next(), true));
    for _ in 0..kills(5) {
        neighbors.iter().for_each(Neighbor::wait_for_a_load);
        a_moment(&mut rng);
        node.process.kill();
        node.restart();
        // All blocks are found: each load of a neighbor says so.
        neighbors.iter().for_each(Neighbor::wait_for_a_load);
    }
    neighbors.into_iter().for_each(Neighbor::end);
}

#[test]
fn while_the_service_is_away_calls_fail_at_once_and_say_what_to_do() {
    let mut node = filled();
    let guest = Guest::new(&node.socket());
    node.process.kill();
    let hang = Instant::now() + HANG;
    let error = loop {
        match guest.load(0, 1) {
            Err(error) => break error,
            // Sent before the kernel told of the death.
            Ok(_) => assert!(Instant::now() < hang),
        }
    };
    assert!(is_away(&error) && error.is_transient(), "{error}");
    assert!(error.to_string().contains("start `kvhoist serve`"), "{error}");
    assert!(!guest.client.is_connected());
    // Nothing has the memory any more.
    block_on(guest.client.unregister(&guest.region)).expect("at once");
    node.restart();
    let hang = Instant::now() + HANG;
    while !guest.client.is_connected() {
        assert!(Instant::now() < hang, "it connects again");
        thread::yield_now();
    }
    assert_eq!(block_on(guest.client.match_len(&[key(0)])).expect("a service"), 1);
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

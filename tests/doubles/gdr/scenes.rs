//! What is copied, whatever the device: over the double, and over a device of software in a guest.

use std::rc::Rc;

use kvhoist::{Error, internals::device::gdr::GdrOptions};

use super::{
    common::Rng,
    rig::{Place, Rig, SIDE_BYTES, Way, is_of_engine, scattered},
};

/// How much of everything: an emulated machine does little in a second.
#[derive(Clone, Copy)]
pub struct Scale {
    /// Bytes of the longest copy.
    pub longest: usize,
    /// Batches that are in flight at a time.
    pub batches: usize,
    /// Rounds of random batches.
    pub rounds: usize,
}

impl Scale {
    pub const FULL: Scale = Scale { longest: 16 << 20, batches: 2000, rounds: 2 };
    pub const EMULATED: Scale = Scale { longest: 16 << 20, batches: 2000, rounds: 2 };
}

/// One byte to the longest, at every alignment that means something, both ways.
pub async fn sizes(rig: &Rig, scale: Scale) {
    let lens =
        [1, 2, 3, 7, 8, 63, 64, 65, 511, 4095, 4096, 4097, 16_384, 65_537, 1 << 20, (1 << 20) + 1, scale.longest];
    for (n, len) in lens.into_iter().enumerate().filter(|(_, len)| *len <= scale.longest) {
        let small = len <= 65_537;
        for (host, device) in [(0, 0), (1, 0), (0, 1), (4095, 2), (63, 4097)].into_iter().take(if small {
            5
        } else if len == scale.longest {
            1
        } else {
            2
        }) {
            for way in [Way::ToDevice, Way::ToHost] {
                // Its neighbours must be as they were.
                let place = Place { host: host + 64, device: device + 64, len };
                let before = Place { host, device, len: 64 };
                let behind = Place { host: host + 64 + len, device: device + 64 + len, len: 64 };
                [before, behind].iter().for_each(|guard| rig.clear(way, *guard));
                rig.copy(way, &[place], n as u64).await.unwrap_or_else(|error| panic!("{way:?} {place:?}: {error}"));
                assert!(
                    [before, behind].iter().all(|guard| rig.is_clear(way, *guard)),
                    "{way:?} {place:?}: bytes beside it"
                );
            }
        }
    }
}

/// Batches of 512 pieces that lie anywhere on both sides.
pub async fn scattered_pieces(rig: &Rig, seed: u64, scale: Scale) {
    let mut rng = Rng(seed);
    for len_max in [64, 5000].into_iter().take(scale.rounds) {
        for way in [Way::ToDevice, Way::ToHost] {
            let places = scattered(&mut rng, 512, len_max, 0..8 << 20);
            rig.copy(way, &places, rng.next()).await.expect("copied");
        }
    }
}

/// Thousands of batches in flight at once, both ways at a time.
pub async fn many_in_flight(rig: Rc<Rig>, seed: u64, scale: Scale) {
    let mut rng = Rng(seed);
    let places = scattered(&mut rng, scale.batches * 2, 600, 0..SIDE_BYTES);
    volley(&rig, &places, 2).await.into_iter().for_each(|result| result.expect("copied"));
}

/// Batches of so many places, both ways in turns and all at once; what became of each. Those that did not fail are
/// right.
pub async fn volley(rig: &Rc<Rig>, places: &[Place], each: usize) -> Vec<Result<(), Error>> {
    let start = |(n, places): (usize, &[Place])| {
        let (rig, places) = (Rc::clone(rig), places.to_vec());
        let way = if n % 2 == 0 { Way::ToDevice } else { Way::ToHost };
        tokio::task::spawn_local(async move { rig.copy(way, &places, n as u64).await })
    };
    let tasks: Vec<_> = places.chunks(each).enumerate().map(start).collect();
    let mut results = Vec::with_capacity(tasks.len());
    for task in tasks {
        results.push(task.await.expect("no panic"));
    }
    results
}

/// The same with batches of three places, drawn from `rng`, where the engine may fail and nothing else: how many it
/// did.
pub async fn failures(rig: &Rc<Rig>, rng: &mut Rng, batches: usize) -> usize {
    let places = scattered(rng, batches * 3, 3000, 0..SIDE_BYTES);
    let results = volley(rig, &places, 3).await;
    let errors = results.into_iter().filter_map(Result::err);
    errors.inspect(|error| assert!(is_of_engine(error), "{error}")).count()
}

/// Batches of all shapes, a few at a time.
pub async fn random_batches(rig: Rc<Rig>, seed: u64, scale: Scale) {
    let mut rng = Rng(seed);
    for round in 0..scale.rounds {
        let lanes = 1 + rng.below(8) as usize;
        let room = SIDE_BYTES / lanes;
        let tasks: Vec<_> = (0..lanes)
            .map(|lane| {
                let count = 1 + rng.below(200) as usize;
                let len_max = 1 + rng.below((room / count) as u64 / 2).min(50_000) as usize;
                let places = scattered(&mut rng, count, len_max, lane * room..(lane + 1) * room);
                let way = if rng.below(2) == 0 { Way::ToDevice } else { Way::ToHost };
                let (rig, number) = (Rc::clone(&rig), rng.next());
                tokio::task::spawn_local(async move { rig.copy(way, &places, number).await })
            })
            .collect();
        for task in tasks {
            task.await.expect("no panic").unwrap_or_else(|error| panic!("round {round}: {error}"));
        }
    }
}

/// Two engines on one device, each with memory of its own, at the same time.
pub async fn two_engines(cuda: bool, seed: u64, scale: Scale) {
    let options = GdrOptions::default();
    let first = Rc::new(Rig::with(cuda, options.clone()).await.expect("one"));
    let second = Rc::new(Rig::with(cuda, options).await.expect("another"));
    let scale = Scale { batches: scale.batches / 4, ..scale };
    let one = tokio::task::spawn_local(many_in_flight(Rc::clone(&first), seed, scale));
    let other = tokio::task::spawn_local(many_in_flight(Rc::clone(&second), seed + 1, scale));
    one.await.expect("no panic");
    // The first goes, the second stays.
    drop(first);
    other.await.expect("no panic");
    scattered_pieces(&second, seed + 2, scale).await;
}

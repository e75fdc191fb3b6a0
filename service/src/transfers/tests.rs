//! Loads of clients that share a space.

use std::{cell::RefCell, os::fd::OwnedFd, rc::Rc, time::Duration};

use futures_util::FutureExt;
use kvhoist::{BlockKey, Config, DirectIo, SharedMemory};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use tokio::task::{JoinSet, LocalSet};

use super::{Cancel, ClientTransfers, PLACES_PER_TURN, Way};
use crate::{
    budget::Budget,
    config::ServerConfig,
    error::ServiceFault,
    protocol::{BlockPlaces, Blocks, PLACES_MAX, Place, RegionKind, Reply},
    spaces::{Space, Spaces, Wanted},
    system::Machine,
};

const BLOCK_BYTES: usize = 4096;
const BLOCKS: u8 = 8;

fn key(block: u8) -> BlockKey {
    BlockKey::new([block; 32])
}

/// A client with room for all blocks.
fn client(space: &Space) -> Rc<ClientTransfers> {
    client_with(space, 1 << 20)
}

/// The same with so many bytes in flight.
fn client_with(space: &Space, in_flight_max: usize) -> Rc<ClientTransfers> {
    client_of(space, in_flight_max, &SharedMemory::new(usize::from(BLOCKS) * BLOCK_BYTES).expect("memory"))
}

/// The same of a client that lends this memory.
fn client_of(space: &Space, in_flight_max: usize, pool: &SharedMemory) -> Rc<ClientTransfers> {
    let budget = Rc::new(Budget::new(&ServerConfig::new("unused")));
    let transfers = ClientTransfers::new(space, in_flight_max as u64, "a client".into(), budget.account(1), None);
    let fd = pool.as_fd().try_clone_to_owned().expect("a descriptor");
    transfers.regions.add(1, RegionKind::Host, &fd, 0, pool.len() as u64).expect("registered");
    Rc::new(transfers)
}

fn blocks() -> Blocks {
    let offset = |block| u64::from(block) * BLOCK_BYTES as u64;
    let place = |block| [Place { region: 1, len: BLOCK_BYTES as u32, offset: offset(block) }];
    Blocks { keys: (0..BLOCKS).map(key).collect(), places: (0..BLOCKS).map(place).collect() }
}

#[tokio::test]
async fn a_block_that_too_many_want_costs_no_other_block() {
    let folder = tempfile::tempdir().expect("a directory");
    let mut config = ServerConfig::new(folder.path().join("socket"));
    config.paths = vec![folder.path().to_owned()];
    (config.capacity_bytes, config.host_bytes) = (16 << 20, 2 * BLOCK_BYTES as u64);
    config.cache = Config::default().bypass_host(true).direct_io(DirectIo::Prefer).waiters_max(8);
    config.move_host = false;
    let run = async {
        let spaces = Rc::new(Spaces::load(config, Rc::new(Machine)).expect("loaded"));
        let space = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("attached");
        let (one, other) = (client(&space), client(&space));
        let stored = Rc::clone(&one).run(Way::Store(None), blocks(), Cancel::default()).await.expect("its places");
        assert!(stored.iter().all(|result| matches!(result, Ok(true))), "{stored:?}");
        // Its movement cannot end: no slot is free. It has as many waiters as it may have.
        let leases = space.cache.fetch_many(&[key(6), key(7)]).await;
        let first = key(0);
        let mut waits = std::array::from_fn::<_, 8, _>(|_| Box::pin(space.cache.fetch(&first)));
        // One that finds the cache's lock taken joins the movement at a later poll. A look waits for the lock.
        for _ in 0..100 {
            assert!(space.cache.contains(&first));
            assert!(waits.iter_mut().all(|waits| waits.now_or_never().is_none()), "all slots are pinned");
            tokio::task::yield_now().await;
        }
        assert_eq!(space.cache.prefetch(&[first]).expect("open"), 0, "too many waiters");
        let load = Rc::clone(&one).run(Way::Load, blocks(), Cancel::default());
        let release = async {
            // Until the load has passed the block over, and has begun.
            while space.cache.stats().busy < 2 {
                tokio::task::yield_now().await;
            }
            drop(leases);
        };
        let (loaded, ()) = tokio::join!(load, release);
        let loaded = loaded.expect("its places");
        assert!(loaded[0].is_err(), "too many waiters");
        assert!(loaded[1..].iter().all(|result| matches!(result, Ok(true))), "{loaded:?}");
        for waits in waits {
            assert!(waits.await.expect("served").is_some());
        }
        one.regions.release_all().await;
        other.regions.release_all().await;
        drop((one, other, space));
        spaces.close().await.expect("closed");
    };
    LocalSet::new().run_until(run).await;
}

/// Every slot of host memory is leased: stores wait, and loads need no slot.
#[tokio::test]
async fn a_load_does_not_wait_for_stores_of_its_client() {
    let config = ServerConfig { host_bytes: 2 * BLOCK_BYTES as u64, ..ServerConfig::new("unused") };
    let run = async {
        let spaces = Rc::new(Spaces::load(config, Rc::new(Machine)).expect("loaded"));
        let space = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("attached");
        let transfers = client_with(&space, 4 * BLOCK_BYTES);
        let [first, second] = [100, 101].map(key);
        let mut leases = Vec::new();
        for wanted in [first, second] {
            space.cache.store(&wanted, None, &[7; BLOCK_BYTES]).await.expect("stored");
            leases.push(space.cache.fetch(&wanted).await.expect("served"));
        }
        let store = Rc::clone(&transfers).run(Way::Store(None), blocks(), Cancel::default());
        let mut store = Box::pin(store);
        for _ in 0..100 {
            assert!((&mut store).now_or_never().is_none(), "all slots are leased");
            tokio::task::yield_now().await;
        }
        let place = [Place { region: 1, len: BLOCK_BYTES as u32, offset: 0 }];
        let wanted = Blocks { keys: vec![first], places: [place].iter().collect() };
        let load = Rc::clone(&transfers).run(Way::Load, wanted, Cancel::default());
        let loaded = tokio::time::timeout(Duration::from_secs(60), load).await.expect("it waits for no store");
        assert!(matches!(loaded.expect("its places")[..], [Ok(true)]));
        drop(leases);
        store.await.expect("its places").into_iter().for_each(|stored| assert!(stored.is_ok()));
        transfers.regions.release_all().await;
        drop((transfers, space));
        spaces.close().await.expect("closed");
    };
    LocalSet::new().run_until(run).await;
}

/// Lists as long as a request may have: wrong at their ends, so that nothing moves.
fn long_lists() -> Blocks {
    let place = |offset| Place { region: 1, len: 1, offset };
    let mut places: Vec<Vec<Place>> = (0..16).map(|_| (0..BLOCK_BYTES as u64).map(place).collect()).collect();
    places[15][4095].region = 77;
    Blocks { keys: (0..16).map(key).collect(), places: places.iter().collect() }
}

#[tokio::test]
async fn others_have_their_turns_while_a_clients_long_lists_are_worked_through() {
    let config = ServerConfig { host_bytes: 1 << 20, ..ServerConfig::new("unused") };
    let run = async {
        let spaces = Rc::new(Spaces::load(config, Rc::new(Machine)).expect("loaded"));
        let space = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("attached");
        let transfers = client(&space);
        let mut requests = JoinSet::new();
        for _ in 0..4 {
            let run = Rc::clone(&transfers).run(Way::Load, long_lists(), Cancel::default());
            requests.spawn_local(async move { run.await.expect_err("a region that is not there") });
        }
        let (mut turns, mut ended) = (0, 0);
        while ended < 4 {
            tokio::task::yield_now().await;
            turns += 1;
            while requests.try_join_next().is_some() {
                ended += 1;
            }
        }
        // Each turn is one connection's, whatever it has in flight.
        let least = 4 * 16 * BLOCK_BYTES / PLACES_PER_TURN;
        assert!(turns >= least, "{turns} turns of another, expected {least} or more");
        transfers.regions.release_all().await;
        drop((transfers, space));
        spaces.close().await.expect("closed");
    };
    LocalSet::new().run_until(run).await;
}

/// Bytes of each place of a block of many.
const PIECE: usize = 16;

/// A block as the page of a pool whose layers lie between its tokens: every second piece, from the `at`th on.
fn pieces(count: usize, at: u64) -> Vec<Place> {
    let offset = |piece| (2 * piece + at) * PIECE as u64;
    (0..count as u64).map(|piece| Place { region: 1, len: PIECE as u32, offset: offset(piece) }).collect()
}

/// Every byte of the pieces from the `at`th on, in the order of the block.
fn bytes_of(pool: &SharedMemory, count: usize, at: usize) -> Vec<u8> {
    let mut bytes = vec![0; count * PIECE];
    bytes.chunks_mut(PIECE).enumerate().for_each(|(piece, to)| pool.read((2 * piece + at) * PIECE, to));
    bytes
}

/// Waits for a request; how often others had their turns.
async fn turns_during<T: 'static>(request: impl Future<Output = T> + 'static) -> (T, usize) {
    let (mut running, mut turns) = (JoinSet::new(), 0);
    running.spawn_local(request);
    loop {
        tokio::task::yield_now().await;
        turns += 1;
        if let Some(ended) = running.try_join_next() {
            return (ended.expect("no panic"), turns);
        }
    }
}

/// Pages of 64 tokens of 36 layers and of 64, K and V of each; and as many places as a request may have.
#[tokio::test]
async fn a_block_of_many_places_is_moved_while_others_have_their_turns() {
    for count in [36 * 2 * 64, 64 * 2 * 64, PLACES_MAX] {
        let config = ServerConfig { host_bytes: 8 << 20, ..ServerConfig::new("unused") };
        let run = async {
            let spaces = Rc::new(Spaces::load(config, Rc::new(Machine)).expect("loaded"));
            let space = spaces.attach(Wanted::of_tests(count * PIECE)).await.expect("attached");
            let pool = SharedMemory::new(2 * count * PIECE).expect("memory");
            let transfers = client_of(&space, 1 << 20, &pool);
            (0..2 * count).for_each(|at| pool.write(at * PIECE, &[(at % 251) as u8; PIECE]));
            let stored = bytes_of(&pool, count, 0);
            let listed = |at| Blocks { keys: vec![key(0)], places: [pieces(count, at)].iter().collect() };
            let alike = || Blocks { places: BlockPlaces::shifted(&pieces(count, 1), vec![0]), ..listed(1) };
            let move_whole = |way, blocks| Rc::clone(&transfers).run(way, blocks, Cancel::default());
            // Once to check its places, and once to find them.
            let least = 2 * (count / PLACES_PER_TURN);
            for (way, blocks) in [(Way::Store(None), listed(0)), (Way::Load, listed(1)), (Way::Load, alike())] {
                let is_load = matches!(way, Way::Load);
                let (moved, turns) = turns_during(move_whole(way, blocks)).await;
                assert!(matches!(moved.expect("its places")[..], [Ok(true)]) && turns >= least, "{turns}, {least}");
                assert!(!is_load || bytes_of(&pool, count, 1) == stored, "{count} places");
                pool.write(0, &vec![0; pool.len()]);
            }
            for blocks in [listed(1), alike()] {
                pool.write(0, &vec![0; pool.len()]);
                let load = Rc::clone(&transfers).load_layers(vec![0; count], blocks, Cancel::default(), |_| {});
                let (loaded, turns) = turns_during(load).await;
                assert!(matches!(loaded.expect("its places")[..], [Ok(true)]) && turns >= least / 2, "{turns}");
                assert!(bytes_of(&pool, count, 1) == stored, "{count} places");
            }
            transfers.regions.release_all().await;
            drop((transfers, space));
            spaces.close().await.expect("closed");
        };
        LocalSet::new().run_until(run).await;
    }
}

/// A memfd that takes no seal.
fn unsealed(len: u64) -> OwnedFd {
    let fd = memfd_create(c"test", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&fd, len).expect("a size");
    fd
}

#[tokio::test]
async fn memory_that_was_taken_away_costs_no_other_that_has_its_number_since() {
    let config = ServerConfig { host_bytes: 1 << 20, ..ServerConfig::new("unused") };
    let budget = Rc::new(Budget::new(&config));
    let run = async {
        let spaces = Rc::new(Spaces::load(config, Rc::new(Machine)).expect("loaded"));
        let space = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("attached");
        let transfers = Rc::new(ClientTransfers::new(&space, 1 << 20, "a client".into(), budget.account(1), None));
        let len = u64::from(BLOCKS) * BLOCK_BYTES as u64;
        let fd = unsealed(len);
        transfers.regions.add(1, RegionKind::Host, &fd, 0, len).expect("registered");
        // What a call has that ends after the one below.
        let late = transfers.regions.guarded(blocks().places.of(0..1));
        assert_eq!(late.len(), 1);
        ftruncate(&fd, 0).expect("it takes no seal");
        let stored =
            Rc::clone(&transfers).run(Way::Store(None), blocks(), Cancel::default()).await.expect("its places");
        assert!(stored.iter().all(Result::is_err) && !transfers.regions.has(1), "{stored:?}");
        transfers.regions.add(1, RegionKind::Host, &unsealed(len), 0, len).expect("its number is free");
        let failure = transfers.settle(late).await.expect("its memory was taken away");
        assert!(failure.text.contains("shrunk") && transfers.regions.has(1), "{}", failure.text);
        let stored =
            Rc::clone(&transfers).run(Way::Store(None), blocks(), Cancel::default()).await.expect("its places");
        assert!(stored.iter().all(|result| matches!(result, Ok(true))), "{stored:?}");
        transfers.regions.release_all().await;
        drop((transfers, space));
        spaces.close().await.expect("closed");
    };
    LocalSet::new().run_until(run).await;
}

#[tokio::test]
async fn memory_that_cannot_be_mapped_takes_nothing_of_the_limits() {
    let mut config = ServerConfig { host_bytes: 1 << 20, ..ServerConfig::new("unused") };
    (config.region_bytes_total_max, config.regions_total_max) = (Some(1 << 20), Some(16));
    let budget = Rc::new(Budget::new(&config));
    let run = async {
        let spaces = Rc::new(Spaces::load(config, Rc::new(Machine)).expect("loaded"));
        let space = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("attached");
        let transfers = ClientTransfers::new(&space, 1 << 20, "a client".into(), budget.account(1), None);
        let pool = SharedMemory::new(16 << 10).expect("memory");
        let fd = pool.as_fd().try_clone_to_owned().expect("a descriptor");
        for _ in 0..100 {
            let refused = transfers.regions.add(1, RegionKind::Host, &fd, 8 << 10, 16 << 10).expect_err("past its end");
            assert_eq!(refused.fault, ServiceFault::Memory, "{}", refused.text);
        }
        for number in [1, 2] {
            transfers.regions.add(number, RegionKind::Host, &fd, 0, 16 << 10).expect("there is room");
        }
        transfers.regions.release_all().await;
        drop((transfers, space));
        spaces.close().await.expect("closed");
    };
    LocalSet::new().run_until(run).await;
}

#[tokio::test]
async fn shifted_blocks_lie_in_their_clients_memory_alone() {
    let config = ServerConfig { host_bytes: 1 << 20, ..ServerConfig::new("unused") };
    let run = async {
        let spaces = Rc::new(Spaces::load(config, Rc::new(Machine)).expect("loaded"));
        let space = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("attached");
        let (one, other) = (client(&space), client(&space));
        let first = [Place { region: 1, len: BLOCK_BYTES as u32, offset: 0 }];
        let start = |of: &ClientTransfers| of.regions.segments(first.into_iter()).expect("its own")[0].ptr as usize;
        // Below the one lies the other, or above it.
        for (own, others) in [(&one, &other), (&other, &one)] {
            let away = start(others).wrapping_sub(start(own)) as u64;
            // Both ends lie in its own memory, by way of the end of all numbers.
            let (half, wrap) = (1 << 63, (1 << 63) + BLOCK_BYTES as u64);
            let wrapped = vec![half, half - 1, away.wrapping_sub(wrap)];
            for (offset, shifts) in [(0, vec![0, away]), (0, vec![away, 0]), (wrap, wrapped)] {
                let keys: Vec<BlockKey> = (0..shifts.len() as u8).map(key).collect();
                let places = BlockPlaces::shifted(&[Place { offset, ..first[0] }], shifts.clone());
                let load = Rc::clone(own).load_layers(vec![0], Blocks { keys, places }, Cancel::default(), |_| {});
                let refused = load.await.expect_err("in the memory of another");
                let of_place = refused.text.starts_with("place: ") || refused.text.starts_with("shifts: ");
                assert!(refused.fault == ServiceFault::Argument && of_place, "{shifts:?}: {}", refused.text);
            }
        }
        one.regions.release_all().await;
        other.regions.release_all().await;
        drop((one, other, space));
        spaces.close().await.expect("closed");
    };
    LocalSet::new().run_until(run).await;
}

/// More blocks than the cache takes in one call: each layer is told once, in order, when all of its blocks are there.
#[tokio::test]
async fn a_load_by_layers_of_more_blocks_than_a_call_has_is_moved_in_parts() {
    let mut config = ServerConfig { host_bytes: 1 << 20, ..ServerConfig::new("unused") };
    config.cache = Config::default().movements_max(3);
    let run = async {
        let spaces = Rc::new(Spaces::load(config, Rc::new(Machine)).expect("loaded"));
        let space = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("attached");
        let transfers = client(&space);
        let half = BLOCK_BYTES as u32 / 2;
        let halves =
            |block: u64| [0, 1].map(|at| Place { region: 1, len: half, offset: (2 * block + at) * u64::from(half) });
        let stored =
            Rc::clone(&transfers).run(Way::Store(None), blocks(), Cancel::default()).await.expect("its places");
        assert!(stored.iter().all(|result| matches!(result, Ok(true))), "{stored:?}");
        let listed = || (0..u64::from(BLOCKS)).map(halves).collect();
        let alike =
            || BlockPlaces::shifted(&halves(0), (0..u64::from(BLOCKS)).map(|at| at * BLOCK_BYTES as u64).collect());
        let keys: Vec<_> = (0..BLOCKS).map(key).collect();
        let told = |leading| [0, 1].map(|layer| Reply::Layer { layer, leading, failed: false });
        // All blocks are there; then one of the second part is not.
        for missing in [None, Some(4)] {
            if let Some(block) = missing {
                space.cache.remove(&key(block)).await.expect("removed");
            }
            for places in [listed(), alike()] {
                let layers = RefCell::new(Vec::new());
                let (blocks, tell) = (Blocks { keys: keys.clone(), places }, |layer| layers.borrow_mut().push(layer));
                let loaded = Rc::clone(&transfers).load_layers(vec![0, 1], blocks, Cancel::default(), tell).await;
                let there: Vec<_> =
                    loaded.expect("its places").into_iter().map(|loaded| loaded.expect("loaded")).collect();
                assert_eq!(there, (0..BLOCKS).map(|block| missing != Some(block)).collect::<Vec<_>>());
                assert_eq!(*layers.borrow(), told(u32::from(missing.unwrap_or(BLOCKS))));
            }
        }
        // A cancellation leaves what is not begun.
        let cancel = Cancel::default();
        let blocks = Blocks { keys, places: alike() };
        let mut load = Box::pin(Rc::clone(&transfers).load_layers(vec![0, 1], blocks, cancel.clone(), |_| ()));
        assert!((&mut load).now_or_never().is_none(), "it is under way");
        cancel.cancel();
        let loaded = load.await.expect("its places");
        let canceled =
            loaded.iter().filter(|loaded| matches!(loaded, Err(failure) if failure.fault == ServiceFault::Canceled));
        assert_eq!((loaded.len(), canceled.count()), (usize::from(BLOCKS), usize::from(BLOCKS) - 3), "{loaded:?}");
        transfers.regions.release_all().await;
        drop((transfers, space));
        spaces.close().await.expect("closed");
    };
    LocalSet::new().run_until(run).await;
}

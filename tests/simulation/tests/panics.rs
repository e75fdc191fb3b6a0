//! A log or a recorder of metrics that panics changes no result. A panic of a movement is a defect, and ends the cache:
//! its waiters are answered. After a panic under the lock later calls panic, too.

#[path = "../../common/on_event.rs"]
mod on_event;
mod scene;

use std::{
    fmt::Debug,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kvhoist::{Error, Memory, Tier, WritePolicy, internals::io::OpKind};
use kvhoist_simulation::{
    run,
    sim::{self, Fault, FaultRates},
};
use metrics::{Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Recorder, SharedString, Unit};
use on_event::OnEvent;
use scene::*;
use tokio::time::timeout;
use tracing::{Event, Subscriber};

const PATIENCE: Duration = Duration::from_secs(600);

/// A log that counts its events. One that `panics` cannot write them, as where standard error is a pipe that nobody
/// reads.
fn log(panics: bool, events: &Arc<AtomicU64>) -> impl Subscriber + Send + Sync {
    let events = Arc::clone(events);
    OnEvent(move |event: &Event<'_>| {
        events.fetch_add(1, Ordering::Relaxed);
        assert!(!panics, "an event cannot be written, on purpose: {}", event.metadata().name());
    })
}

/// What calls come to whose movements write to the log.
type Results = Vec<String>;

/// A case, by name.
type Scene = (&'static str, Pin<Box<dyn Future<Output = Results>>>);

fn note<T: Debug>(results: &mut Results, result: &T) {
    results.push(format!("{result:?}"));
}

/// A store, a fetch and a sync, where the disk fails an operation of `kind`.
async fn of_an_error(write_policy: WritePolicy, kind: OpKind) -> Results {
    let mut results = Results::new();
    let (cache, reactor, disk) = open(config().write_policy(write_policy)).await;
    fill(&cache).await;
    disk.script_next(kind, Fault::Error(5));
    let (stored, stored_after) = elapsed(store(&cache, 30)).await;
    let (fetched, fetched_after) = elapsed(fetch(&cache, 5)).await;
    assert!(stored_after < DEADLINE && fetched_after < DEADLINE, "told after {stored_after:?}, {fetched_after:?}");
    let synced = timeout(PATIENCE, cache.sync()).await.expect("a sync ends");
    note(&mut results, &(stored, fetched, synced));
    // What the movement was at is whole.
    assert!(fetch(&cache, 30).await.expect("host memory serves it"), "stored and visible");
    note(&mut results, &fetch(&cache, 5).await.expect("served, or a miss"));
    timeout(PATIENCE, store(&cache, 30)).await.expect("a store ends").expect("the disk is sound again");
    timeout(PATIENCE, cache.sync()).await.expect("a sync ends").expect("the disk is sound again");
    finish(cache, reactor).await;
    results
}

/// Two fetches, of which the first finds wrong bytes.
async fn of_a_wrong_block() -> Results {
    let mut results = Results::new();
    let (cache, reactor, disk) = open(config()).await;
    fill(&cache).await;
    disk.script_next(OpKind::Read, Fault::BitFlip);
    let fetching = [0; 2].map(|n| spawn(&cache, async move |cache| timeout(PATIENCE, fetch(&cache, n)).await));
    for fetched in fetching {
        note(&mut results, &fetched.await.expect("no panic").expect("answered"));
    }
    assert!(!fetch(&cache, 0).await.expect("served"), "it was given up");
    finish(cache, reactor).await;
    results
}

/// Fetches from a disk that does not answer.
async fn of_stalls() -> Results {
    let mut results = Results::new();
    let (cache, reactor, disk) = open(config()).await;
    fill(&cache).await;
    for n in 0..2 {
        disk.script_next(OpKind::Read, Fault::Stall);
        let fetched = timeout(PATIENCE, fetch(&cache, n)).await.expect("answered");
        assert!(matches!(&fetched, Err(Error::Timeout { .. })), "{fetched:?}");
        note(&mut results, &fetched);
    }
    disk.release();
    finish(cache, reactor).await;
    results
}

/// Memory that the kernel does not pin.
async fn of_a_registration() -> Results {
    let (cache, reactor, disk) = open(config()).await;
    let mut memory = vec![0; BLOCK_BYTES];
    let start = memory.as_mut_ptr();
    disk.unmap(start.addr()..start.addr() + BLOCK_BYTES);
    // SAFETY: the memory outlives the cache, and no block is moved there.
    let lent = unsafe { Memory::host(start, BLOCK_BYTES) };
    let region = timeout(PATIENCE, cache.register(lent.pinned(true))).await.expect("answered").expect("registered");
    assert!(!region.is_pinned(), "the kernel refuses");
    store(&cache, 0).await.expect("the reactor continues");
    cache.unregister(&region).await.expect("its own region");
    finish(cache, reactor).await;
    Results::new()
}

/// A flush that fails, and fails for good.
async fn of_a_failed_flush() -> Results {
    let mut results = Results::new();
    let (cache, reactor, disk) = open(config().disk_failures_max(1)).await;
    store(&cache, 0).await.expect("a sound disk");
    disk.script_next(OpKind::Sync, Fault::Error(5));
    for _ in 0..2 {
        let synced = timeout(PATIENCE, cache.sync()).await.expect("a sync ends");
        assert!(matches!(&synced, Err(Error::Io { op: "sync", .. })), "{synced:?}");
        note(&mut results, &synced);
    }
    let removed = timeout(PATIENCE, cache.remove_durably(&key(0))).await.expect("a removal ends");
    assert!(matches!(&removed, Err(Error::Io { op: "sync", .. })), "{removed:?}");
    note(&mut results, &removed);
    timeout(PATIENCE, cache.close()).await.expect("a close ends").expect_err("nobody can tell what survives");
    reactor.ended().await;
    results
}

/// Stores from a caller's memory, in place and by a copy, and a removal, whose writes fail.
async fn of_failed_writes() -> Results {
    let mut results = Results::new();
    for bypass in [false, true] {
        let (cache, reactor, disk) = open(config().bypass_host(bypass)).await;
        let pool = pool(&cache, 1).await;
        disk.script_next(OpKind::Write, Fault::Error(5));
        let stored = timeout(PATIENCE, cache.store_from(&[key(1)], None, &pool.places)).await.expect("answered");
        let stored = stored.expect("submitted");
        assert!(matches!(&stored[..], [Err(Error::Io { op: "write", .. })]), "{stored:?}");
        note(&mut results, &stored);
        cache.unregister(&pool.region).await.expect("its own region");
        finish(cache, reactor).await;
    }
    let (cache, reactor, disk) = open(config().disk_failures_max(1)).await;
    store(&cache, 0).await.expect("a sound disk");
    disk.script_next(OpKind::Write, Fault::Error(5));
    let removed = timeout(PATIENCE, cache.remove(&key(0))).await.expect("a removal ends");
    assert!(matches!(&removed, Err(Error::Io { op: "write", .. })), "{removed:?}");
    note(&mut results, &removed);
    finish(cache, reactor).await;
    results
}

/// The page of a removed block, whose writes fail until the disk is read-only.
async fn of_a_page() -> Results {
    let mut results = Results::new();
    // The failure of the removal is logged; the repetitions by syncs do not count.
    let (cache, reactor, disk) = open(config().disk_failures_max(1)).await;
    store(&cache, 0).await.expect("stored");
    disk.set_rates(FaultRates { write_error: 1.0, ..FaultRates::default() });
    note(&mut results, &timeout(PATIENCE, cache.remove(&key(0))).await.expect("answered"));
    for _ in 0..2 {
        let synced = timeout(PATIENCE, cache.sync()).await.expect("answered");
        assert!(matches!(&synced, Err(Error::Io { op: "write", .. })), "{synced:?}");
        note(&mut results, &synced);
    }
    disk.set_rates(FaultRates::default());
    let writes = || disk.counts().started[OpKind::Write as usize];
    let before = writes();
    cache.sync().await.expect("the disk is sound again");
    assert_eq!(writes() - before, 1, "the page is written");
    let (later, end, _) = open_killed(config(), &disk).await;
    assert!(!fetch(&later, 0).await.expect("served"), "it was removed before the sync");
    finish(later, end).await;
    finish(cache, reactor).await;
    results
}

#[test]
fn what_a_log_throws_changes_no_result() {
    use {OpKind::*, WritePolicy::*};
    let scenes = || -> [Scene; 9] {
        [
            ("a store's write fails", Box::pin(of_an_error(WriteThrough, Write))),
            ("a fetch's read fails", Box::pin(of_an_error(WriteThrough, Read))),
            ("a write-back fails", Box::pin(of_an_error(WriteBack, Write))),
            ("a block is wrong", Box::pin(of_a_wrong_block())),
            ("reads stall", Box::pin(of_stalls())),
            ("memory is not pinned", Box::pin(of_a_registration())),
            ("a flush fails", Box::pin(of_a_failed_flush())),
            ("stores and a removal fail", Box::pin(of_failed_writes())),
            ("a page is not written", Box::pin(of_a_page())),
        ]
    };
    let results_with = |panics: bool| {
        scenes().map(|(name, scene)| {
            let events = Arc::new(AtomicU64::new(0));
            let _log = tracing::subscriber::set_default(log(panics, &events));
            let results = sim::block_on(scene);
            assert!(events.load(Ordering::Relaxed) > 0, "{name}: nothing is logged");
            (name, results)
        })
    };
    assert_eq!(results_with(true), results_with(false));
}

/// A panic that no user's code has thrown.
#[test]
fn a_defect_ends_the_cache_and_answers_all_who_wait() {
    // Without I/O threads for a read, which are not the reactor's.
    for (kind, seed) in [(OpKind::Read, 1), (OpKind::Write, 1), (OpKind::Sync, 1)] {
        let world = sim::block_on(async {
            let (cache, reactor, world) = open_seeded(config(), 1, 1, seed).await;
            let disk = &world.storage;
            fill(&cache).await;
            let pool = pool(&cache, 0).await;
            disk.script_next(OpKind::Read, Fault::Stall);
            let in_flight = spawn(&cache, async move |cache| timeout(PATIENCE, fetch(&cache, 3)).await);
            a_while().await;
            assert_eq!(disk.stalled(), 1, "block 3 is being read");
            disk.panic_next(kind);
            let call = async {
                match kind {
                    OpKind::Read => fetch(&cache, 5).await.map(drop),
                    OpKind::Write => store(&cache, 30).await,
                    OpKind::Sync => cache.sync().await,
                }
            };
            let (called, after) = elapsed(timeout(PATIENCE, call)).await;
            assert!(matches!(called.expect("answered"), Err(Error::Closed)) && after < DEADLINE, "after {after:?}");
            let fetched = in_flight.await.expect("no panic").expect("answered");
            assert!(matches!(fetched, Err(Error::Closed)), "{fetched:?}");
            let reason = cache.stats().disk_retired.expect("operators see it");
            assert!(reason.contains("panicked"), "{reason}");
            let loaded = cache.load_into(&[key(9)], &pool.places).await;
            let later =
                [store(&cache, 31).await, fetch(&cache, 15).await.map(drop), loaded.map(drop), cache.sync().await];
            assert!(later.iter().all(|result| matches!(result, Err(Error::Closed))), "{later:?}");
            let closing = spawn(&cache, async move |cache| timeout(PATIENCE, cache.close()).await);
            a_while().await;
            assert!(!closing.is_finished(), "the disk has memory of the cache");
            assert_eq!(disk.release(), 1);
            let closed = closing.await.expect("no panic").expect("a close ends");
            assert!(matches!(closed, Err(Error::Closed)), "{closed:?}");
            timeout(PATIENCE, cache.unregister(&pool.region)).await.expect("answered").expect("its own region");
            reactor.ended().await;
            drop((cache, reactor));
            world
        });
        world.check_freed().expect("nothing is left");
    }
}

#[test]
fn a_defect_of_the_last_sync_fails_the_close() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 0).await.expect("stored");
        disk.panic_next(OpKind::Sync);
        let closed = timeout(PATIENCE, cache.close()).await.expect("a close ends");
        assert!(matches!(closed, Err(Error::Closed)), "{closed:?}");
        reactor.ended().await;
        let (later, end, _) = open_killed(config(), &disk).await;
        assert!(fetch(&later, 0).await.expect("served"), "it was stored");
        finish(later, end).await;
    });
}

/// A recorder whose every counter, gauge and histogram panics, whenever it is used.
struct Broken;

impl CounterFn for Broken {
    fn increment(&self, _: u64) {
        panic!("a counter, on purpose");
    }

    fn absolute(&self, _: u64) {
        panic!("a counter, on purpose");
    }
}

impl GaugeFn for Broken {
    fn increment(&self, _: f64) {
        panic!("a gauge, on purpose");
    }

    fn decrement(&self, _: f64) {
        panic!("a gauge, on purpose");
    }

    fn set(&self, _: f64) {
        panic!("a gauge, on purpose");
    }
}

impl HistogramFn for Broken {
    fn record(&self, _: f64) {
        panic!("a histogram, on purpose");
    }
}

impl Recorder for Broken {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {
        panic!("a description, on purpose");
    }

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &metrics::Metadata<'_>) -> Counter {
        assert_ne!(key.name(), "kvhoist_misses_total", "a registration, on purpose");
        Counter::from_arc(Arc::new(Broken))
    }

    fn register_gauge(&self, _: &Key, _: &metrics::Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(Broken))
    }

    fn register_histogram(&self, _: &Key, _: &metrics::Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(Broken))
    }
}

#[test]
fn a_recorder_that_panics_costs_its_figures_and_nothing_else() {
    let _recorder = metrics::set_default_local_recorder(&Broken);
    sim::block_on(async {
        let (cache, reactor, _disk) = open(config()).await;
        // More blocks than host memory has slots: evictions are counted under the lock.
        fill(&cache).await;
        for n in 0..6 {
            assert!(fetch(&cache, n).await.expect("served"), "block {n}");
        }
        assert!(!fetch(&cache, 200).await.expect("a miss"), "never stored");
        cache.export_gauges();
        let stats = cache.stats();
        assert!(stats.tier(Tier::Host).evictions > 0 && stats.tier(Tier::Disk).hits > 0, "counted here: {stats:?}");
        reactor.settle(PATIENCE).await.expect("balanced");
        timeout(PATIENCE, cache.close()).await.expect("a close ends").expect("whole");
        reactor.ended().await;
    });
}

#[test]
fn a_panic_under_the_lock_answers_the_waiters_and_the_close() {
    sim::block_on(async {
        let (filled, _reactor, disk) = open(config()).await;
        fill(&filled).await;
        let (cache, _reactor, disk) = open_killed(config(), &disk).await;
        for n in 0..3 {
            assert!(fetch(&cache, n).await.expect("served"), "block {n}, in a free slot");
        }
        let spawn_fetch = |n| {
            let cache = cache.clone();
            tokio::task::spawn_local(async move { timeout(PATIENCE, fetch(&cache, n)).await.expect("answered") })
        };
        disk.script_next(OpKind::Read, Fault::Stall);
        let in_flight = spawn_fetch(3);
        tokio::time::sleep(DEADLINE / 4).await;
        assert_eq!(disk.stalled(), 1, "block 3 is being read");
        // The first lock of this fetch is its caller's, the second the reactor's.
        kvhoist::internals::seams::panic_under_lock(2);
        let begun = spawn_fetch(4);
        for waiter in [in_flight, begun] {
            let answer = waiter.await.expect("no panic");
            assert!(matches!(answer, Err(Error::Closed)), "{answer:?}");
        }
        let later = spawn_fetch(0).await;
        assert!(later.is_err_and(|error| error.is_panic()), "the state may be wrong: nothing is served from it");
        assert_eq!(disk.release(), 1, "a close waits for the disk, which has memory of the cache");
        let closed = timeout(PATIENCE, cache.close()).await.expect("a close ends");
        assert!(matches!(closed, Err(Error::Closed)), "{closed:?}");
    });
}

#[test]
fn a_run_whose_reactor_panics_under_the_lock_fails_with_its_seed() {
    kvhoist::internals::seams::panic_under_lock(500);
    let failed = (0..100).find_map(|seed| run(seed, false).err().map(|failure| (seed, failure)));
    let (seed, failure) = failed.expect("these runs take more locks");
    assert_eq!(failure.seed, seed);
    assert!(failure.what.contains("a panic under the index lock, on purpose"), "{failure}");
}

//! A movement that panics: its waiters are answered, and the cache continues and closes. A recorder of metrics that
//! panics affects nothing. A panic under the lock ends the cache: its waiters are answered, and later calls panic.

#[path = "../../common/on_event.rs"]
mod on_event;
mod scene;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kvhoist::{Error, Memory, Segment, Tier, WritePolicy, internals::io::OpKind};
use kvhoist_simulation::{
    run,
    sim::{self, Fault, FaultRates},
};
use metrics::{Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Recorder, SharedString, Unit};
use on_event::OnEvent;
use scene::*;
use tokio::time::timeout;
use tracing::{Event, Level, Subscriber};

const PATIENCE: Duration = Duration::from_secs(600);

/// A log whose first event of a level cannot be written, as where standard error is a pipe that nobody reads.
fn closed_pipe(level: Level) -> impl Subscriber + Send + Sync {
    let is_written = AtomicBool::new(false);
    OnEvent(move |event: &Event<'_>| {
        let is_other = *event.metadata().level() != level;
        assert!(is_other || is_written.swap(true, Ordering::Relaxed), "an event cannot be written");
    })
}

/// What a store, a fetch and a sync come to where the first warning panics, and the disk fails an operation of `kind`.
fn with_a_panic(write_policy: WritePolicy, kind: OpKind) -> [Result<(), Error>; 3] {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().write_policy(write_policy)).await;
        fill(&cache).await;
        let _log = tracing::subscriber::set_default(closed_pipe(Level::WARN));
        disk.script_next(kind, Fault::Error(5));
        let (stored, stored_after) = elapsed(store(&cache, 30)).await;
        let (fetched, fetched_after) = elapsed(fetch(&cache, 5)).await;
        assert!(stored_after < DEADLINE && fetched_after < DEADLINE, "told after {stored_after:?}, {fetched_after:?}");
        let synced = timeout(PATIENCE, cache.sync()).await.expect("a sync ends");
        // What the movement was at is whole.
        assert!(fetch(&cache, 30).await.expect("host memory serves it"), "stored and visible");
        let served = fetch(&cache, 5).await;
        assert!(served.is_ok(), "served, or a miss: {served:?}");
        timeout(PATIENCE, store(&cache, 30)).await.expect("a store ends").expect("the disk is sound again");
        timeout(PATIENCE, cache.sync()).await.expect("a sync ends").expect("the disk is sound again");
        reactor.settle(PATIENCE).await.expect("balanced");
        timeout(PATIENCE, cache.close()).await.expect("a close ends").expect("the disk is sound again");
        reactor.ended().await;
        [stored, fetched.map(|_| ()), synced]
    })
}

#[test]
fn who_waits_for_a_movement_that_panics_is_told() {
    let [stored, fetched, synced] = with_a_panic(WritePolicy::WriteThrough, OpKind::Write);
    assert!(matches!(&stored, Err(Error::Io { op: "move", .. })), "{stored:?}");
    assert!(fetched.is_ok() && synced.is_ok(), "only one movement panicked: {fetched:?}, {synced:?}");

    let [stored, fetched, synced] = with_a_panic(WritePolicy::WriteThrough, OpKind::Read);
    assert!(matches!(&fetched, Err(Error::Io { op: "move", .. })), "{fetched:?}");
    assert!(stored.is_ok() && synced.is_ok(), "only one movement panicked: {stored:?}, {synced:?}");
}

#[test]
fn a_warning_that_panics_as_a_block_is_given_up_fails_its_movement_alone() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        let _log = tracing::subscriber::set_default(closed_pipe(Level::WARN));
        disk.script_next(OpKind::Read, Fault::BitFlip);
        let fetching = [0; 2].map(|n| spawn(&cache, async move |cache| timeout(PATIENCE, fetch(&cache, n)).await));
        for fetched in fetching {
            let fetched = fetched.await.expect("no panic").expect("answered");
            assert!(matches!(&fetched, Err(Error::Io { op: "move", .. })), "{fetched:?}");
        }
        assert!(!fetch(&cache, 0).await.expect("served"), "it was given up");
        reactor.settle(PATIENCE).await.expect("balanced");
        timeout(PATIENCE, cache.close()).await.expect("a close ends").expect("the disk is sound");
        reactor.ended().await;
    });
}

#[test]
fn deadlines_outlive_a_warning_that_panics() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        let _log = tracing::subscriber::set_default(closed_pipe(Level::WARN));
        for n in 0..2 {
            disk.script_next(OpKind::Read, Fault::Stall);
            let fetched = timeout(PATIENCE, fetch(&cache, n)).await.expect("answered");
            assert!(matches!(&fetched, Err(Error::Timeout { .. })), "{fetched:?}");
        }
        disk.release();
        finish(cache, reactor).await;
    });
}

#[test]
fn a_warning_that_panics_ends_neither_the_reactor_nor_a_registration() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        let mut memory = vec![0; BLOCK_BYTES];
        let start = memory.as_mut_ptr();
        disk.unmap(start.addr()..start.addr() + BLOCK_BYTES);
        let _log = tracing::subscriber::set_default(closed_pipe(Level::WARN));
        // SAFETY: the memory outlives the cache, and no block is moved there.
        let lent = unsafe { Memory::host(start, BLOCK_BYTES) };
        let region = timeout(PATIENCE, cache.register(lent.pinned(true))).await.expect("answered").expect("registered");
        assert!(!region.is_pinned(), "the kernel refuses");
        store(&cache, 0).await.expect("the reactor continues");
        cache.unregister(&region).await.expect("its own region");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_flush_that_failed_stays_failed_although_its_error_cannot_be_logged() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().disk_failures_max(1)).await;
        store(&cache, 0).await.expect("a sound disk");
        let _log = tracing::subscriber::set_default(closed_pipe(Level::ERROR));
        disk.script_next(OpKind::Sync, Fault::Error(5));
        for _ in 0..2 {
            let synced = timeout(PATIENCE, cache.sync()).await.expect("a sync ends");
            assert!(matches!(&synced, Err(Error::Io { op: "sync", .. })), "{synced:?}");
        }
        let removed = timeout(PATIENCE, cache.remove_durably(&key(0))).await.expect("a removal ends");
        assert!(matches!(&removed, Err(Error::Io { op: "sync", .. })), "{removed:?}");
        timeout(PATIENCE, cache.close()).await.expect("a close ends").expect_err("nobody can tell what survives");
        reactor.ended().await;
    });
}

/// An open cache says what happened, and not that it is closed.
#[test]
fn who_waits_for_a_task_that_panics_is_not_told_that_the_cache_is_closed() {
    sim::block_on(async {
        for bypass in [false, true] {
            let (cache, reactor, disk) = open(config().bypass_host(bypass)).await;
            let mut memory = vec![1u8; 2 * BLOCK_BYTES];
            let start = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(BLOCK_BYTES));
            // SAFETY: the memory outlives the cache, and nobody writes to it.
            let lent = unsafe { Memory::host(start, BLOCK_BYTES) };
            let region = cache.register(lent).await.expect("registered");
            let _log = tracing::subscriber::set_default(closed_pipe(Level::WARN));
            disk.script_next(OpKind::Write, Fault::Error(5));
            let place = vec![vec![Segment { ptr: start, len: BLOCK_BYTES }]];
            let stored = timeout(PATIENCE, cache.store_from(&[key(1)], None, &place)).await.expect("answered");
            let stored = stored.expect("submitted");
            assert!(matches!(&stored[..], [Err(Error::Io { op: "move", .. })]), "{stored:?}");
            cache.unregister(&region).await.expect("its own region");
            finish(cache, reactor).await;
        }
        let (cache, reactor, disk) = open(config().disk_failures_max(1)).await;
        store(&cache, 0).await.expect("a sound disk");
        let _log = tracing::subscriber::set_default(closed_pipe(Level::ERROR));
        disk.script_next(OpKind::Write, Fault::Error(5));
        let removed = timeout(PATIENCE, cache.remove(&key(0))).await.expect("a removal ends");
        assert!(matches!(&removed, Err(Error::Io { op: "move", .. })), "{removed:?}");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_sync_writes_the_record_page_whose_write_panicked() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 0).await.expect("stored");
        let log = tracing::subscriber::set_default(closed_pipe(Level::ERROR));
        disk.set_rates(FaultRates { write_error: 1.0, ..FaultRates::default() });
        let removed = timeout(PATIENCE, cache.remove(&key(0))).await.expect("answered");
        assert!(matches!(&removed, Err(Error::Io { op: "write", .. })), "its record was not cleared: {removed:?}");
        // The third failure in a row is logged.
        let mut synced = Ok(());
        for _ in 0..2 {
            synced = timeout(PATIENCE, cache.sync()).await.expect("answered");
        }
        assert!(matches!(&synced, Err(Error::Io { op: "move", .. })), "{synced:?}");
        drop(log);
        disk.set_rates(FaultRates::default());
        let writes = || disk.counts().started[OpKind::Write as usize];
        let before = writes();
        cache.sync().await.expect("the disk is sound again");
        assert_eq!(writes() - before, 1, "the page is written");
        let (later, end, _) = open_killed(config(), &disk).await;
        assert!(!fetch(&later, 0).await.expect("served"), "it was removed before the sync");
        finish(later, end).await;
        finish(cache, reactor).await;
    });
}

#[test]
fn a_write_back_that_panics_is_a_refusal() {
    let [stored, fetched, synced] = with_a_panic(WritePolicy::WriteBack, OpKind::Write);
    assert!(stored.is_ok() && fetched.is_ok(), "nobody waits for it: {stored:?}, {fetched:?}");
    assert!(matches!(&synced, Err(Error::Refused { .. })), "it is on no disk: {synced:?}");
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

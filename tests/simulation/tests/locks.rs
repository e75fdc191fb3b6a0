//! How often a call takes the lock that all callers share, from its start until nothing of it is under way.

mod scene;

use std::{
    cell::Cell,
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, RawWaker, RawWakerVTable, Waker},
    time::Duration,
};

use kvhoist::{Cache, Error, Route};
use kvhoist_simulation::sim::{self, FaultRates};
use scene::*;

/// Locks that `call` takes, on its own thread and on the reactor's, which are one here.
async fn locks_of<T>(call: impl Future<Output = T>) -> (T, u64) {
    // What earlier calls began has ended by then, the look at the clock as well.
    tokio::time::sleep(10 * DEADLINE).await;
    let before = kvhoist::internals::seams::locks_taken();
    let result = call.await;
    // Less than the time to the next look at the clock, and more than the disk takes.
    tokio::time::sleep(DEADLINE / 10).await;
    (result, kvhoist::internals::seams::locks_taken() - before)
}

/// Locks of a store, a hit, the end of a lease, and a fetch from disk; and whether an I/O thread has made its read.
fn locks_of_calls(seed: u64) -> ([u64; 4], bool) {
    sim::block_on(async {
        let (cache, reactor, _world) = open_seeded(config(), 1, 1, seed).await;
        fill(&cache).await;
        cache.remove(&key(15)).await.expect("removed");
        let (stored, store_locks) = locks_of(store(&cache, 15)).await;
        stored.expect("stored");
        let (hit, hit_locks) = locks_of(cache.fetch(&key(15))).await;
        let ((), lease_locks) = locks_of(async { drop(hit) }).await;
        let before = cache.stats().work_done;
        let (read, fetch_locks) = locks_of(cache.fetch(&key(0))).await;
        let is_by_thread = cache.stats().work_done > before;
        assert_eq!(read.expect("no error").expect("it is on disk").route(), Route::DiskToHost);
        finish(cache, reactor).await;
        ([store_locks, hit_locks, lease_locks, fetch_locks], is_by_thread)
    })
}

#[test]
fn a_call_takes_the_lock_this_often() {
    let mut seen = [false; 2];
    for seed in 0..16 {
        let (locks, is_by_thread) = locks_of_calls(seed);
        println!(
            "locks of a store, a hit, the end of a lease, a fetch from disk: {locks:?}, by a thread: {is_by_thread}"
        );
        let fetch = if is_by_thread { 2 } else { 3 };
        assert_eq!(locks, [4, 1, 1, fetch], "seed {seed}, by a thread: {is_by_thread}");
        seen[usize::from(is_by_thread)] = true;
    }
    assert_eq!(seen, [true; 2], "seeds with I/O threads, and without");
}

/// A block that is read from disk for a device's memory, through a host slot.
#[test]
fn a_load_to_a_device_takes_the_lock_this_often() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open(config().device_blocks(2).device(kvhoist::DeviceKind::Simulated)).await;
        fill(&cache).await;
        let mut pool = vec![0; BLOCK_BYTES];
        // SAFETY: the pool lives until the region is unregistered, and is not looked at while a block is on its way.
        let memory = unsafe { kvhoist::Memory::device(pool.as_mut_ptr(), BLOCK_BYTES) };
        let region = cache.register(memory).await.expect("free");
        let place = kvhoist::Segment { ptr: pool.as_mut_ptr(), len: BLOCK_BYTES };
        let (loaded, locks) = locks_of(cache.load_into(&[key(0)], &[vec![place]])).await;
        assert!(matches!(loaded.expect("asked")[..], [Ok(true)]));
        println!("locks of a load to a device's memory: {locks}");
        assert_eq!(locks, 3, "the plan, the end of the read, and the end of the pin");
        cache.unregister(&region).await.expect("its own");
        assert_eq!(pool, payload(0));
        finish(cache, reactor).await;
    });
}

/// Locks that a call takes while so many removed blocks are being written, until the disk holds it up.
fn locks_beside_removed<F: Future<Output = Result<(), Error>> + 'static>(
    writes: u8,
    call: impl FnOnce(Cache) -> F + 'static,
) -> u64 {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().host_blocks(16)).await;
        disk.set_rates(FaultRates { stall: 1.0, ..FaultRates::default() });
        let stores: Vec<_> = (0..writes).map(|n| spawn(&cache, async move |cache| store(&cache, n).await)).collect();
        a_while().await;
        let removals: Vec<_> = (0..writes).map(|n| spawn_remove(&cache, n)).collect();
        a_while().await;
        assert!(cache.is_empty());
        let before = kvhoist::internals::seams::locks_taken();
        let called = spawn(&cache, call);
        a_while().await;
        let locks = kvhoist::internals::seams::locks_taken() - before;
        disk.set_rates(FaultRates::default());
        disk.release();
        for store in stores {
            drop(store.await.expect("no panic"));
        }
        for removal in removals {
            assert!(removal.await.expect("no panic").expect("a sound disk"));
        }
        called.await.expect("no panic").expect("a sound disk");
        finish(cache, reactor).await;
        locks
    })
}

#[test]
fn a_sync_and_a_clear_look_each_write_in_flight_up_under_a_lock_of_its_own() {
    let sync = |writes| locks_beside_removed(writes, async |cache: Cache| cache.sync().await.map(drop));
    let clear = |writes| locks_beside_removed(writes, async |cache: Cache| cache.clear().await.map(drop));
    let (syncs, clears) = ([1, 8].map(sync), [1, 8].map(clear));
    println!("locks of a sync and of a clear beside 1 and 8 writes: {syncs:?}, {clears:?}");
    assert_eq!((syncs[1] - syncs[0], clears[1] - clears[0]), (7, 7));
}

/// A user's code, called where the cache calls it: it calls the cache in turn, and counts how often it was called.
struct Theirs {
    cache: Cache,
    calls: Arc<AtomicU64>,
}

std::thread_local! {
    /// How often a waker was touched under the index lock.
    static UNDER_LOCK: Cell<u64> = const { Cell::new(0) };
}

impl Theirs {
    fn waker(cache: &Cache, calls: &Arc<AtomicU64>) -> Waker {
        let theirs = Arc::new(Theirs { cache: cache.clone(), calls: Arc::clone(calls) });
        // SAFETY: the table below takes the pointer for what it is, a share of `theirs`.
        unsafe { Waker::from_raw(RawWaker::new(Arc::into_raw(theirs).cast(), &TABLE)) }
    }

    fn call(&self) {
        if kvhoist::internals::seams::holds_lock() {
            // The call would wait for ever, and the cache catches panics of wakers.
            return UNDER_LOCK.set(UNDER_LOCK.get() + 1);
        }
        self.cache.contains(&key(3));
        self.calls.fetch_add(1, Relaxed);
    }
}

static TABLE: RawWakerVTable = RawWakerVTable::new(
    |theirs| {
        // SAFETY: made by `Theirs::waker`, or here, and not dropped yet.
        let theirs = unsafe {
            Arc::increment_strong_count(theirs.cast::<Theirs>());
            &*theirs.cast::<Theirs>()
        };
        theirs.call();
        RawWaker::new(std::ptr::from_ref(theirs).cast(), &TABLE)
    },
    // SAFETY: as above; it takes the share with it.
    |theirs| unsafe { Arc::from_raw(theirs.cast::<Theirs>()) }.call(),
    // SAFETY: as above.
    |theirs| unsafe { &*theirs.cast::<Theirs>() }.call(),
    // SAFETY: as above; it takes the share with it.
    |theirs| unsafe { Arc::from_raw(theirs.cast::<Theirs>()) }.call(),
);

/// Polls a call once with a waker that calls the cache, and drops it after some time, or never.
async fn poll_with<T>(cache: &Cache, calls: &Arc<AtomicU64>, call: impl Future<Output = T>, after: Option<Duration>) {
    let waker = Theirs::waker(cache, calls);
    let mut call = pin!(call);
    if call.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
        return;
    }
    drop(waker);
    match after {
        Some(after) => tokio::time::sleep(after).await,
        None => drop(call.await),
    }
}

#[test]
fn wakers_and_the_recorder_of_metrics_may_call_the_cache() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open(config().waiters_max(3)).await;
        fill(&cache).await;
        let calls = Arc::new(AtomicU64::new(0));
        for after in [Some(Duration::ZERO), Some(Duration::from_millis(5)), None] {
            // Blocks on disk, joined by more callers than may wait: those that have left make room.
            let keys = [key(0), key(1)];
            for key in keys.iter().cycle().take(8) {
                poll_with(&cache, &calls, cache.fetch(key), after).await;
            }
            // A slot that is granted to a caller who has left.
            let mut held = Vec::new();
            for _ in 0..4 {
                held.push(cache.reserve().await.expect("a slot"));
            }
            for _ in 0..2 {
                poll_with(&cache, &calls, async { cache.reserve().await.map(drop) }, Some(Duration::ZERO)).await;
            }
            let mut waiting = Box::pin(cache.reserve());
            let waker = Theirs::waker(&cache, &calls);
            assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending(), "every slot is held");
            drop(held);
            drop(waiting);
            for n in 0..2 {
                poll_with(&cache, &calls, store(&cache, 100 + n), after).await;
                poll_with(&cache, &calls, cache.remove(&key(100 + n)), after).await;
            }
        }
        assert!(calls.load(Relaxed) > 100, "{calls:?}");
        finish(cache, reactor).await;
        assert_eq!(kvhoist_simulation::log::under_lock(), 0, "the recorder of metrics is called after the unlock");
        assert_eq!(UNDER_LOCK.get(), 0, "and so are wakers");
    });
}

/// Callers that wait for room for a command, and do not use it once they have it: they join the first one's movement.
#[test]
fn room_that_is_not_used_wakes_the_next_caller_after_the_unlock() {
    for seed in 0..16 {
        sim::block_on(async {
            let (cache, reactor, _world) = open_seeded(config().movements_max(1), 1, 1, seed).await;
            fill(&cache).await;
            let calls = Arc::new(AtomicU64::new(0));
            let mut held = Vec::new();
            for _ in 0..4 {
                held.push(cache.reserve().await.expect("a slot"));
            }
            let keys = [0, 1, 2, 2, 2, 2].map(key);
            let mut fetches: Vec<_> = keys.iter().map(|key| Box::pin(cache.fetch(key))).collect();
            let waker = Theirs::waker(&cache, &calls);
            for fetch in &mut fetches {
                assert!(fetch.as_mut().poll(&mut Context::from_waker(&waker)).is_pending(), "every slot is held");
                // The reactor takes one command, and another one waits in its channel.
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            drop(held);
            for fetch in fetches {
                assert!(fetch.await.expect("served").is_some());
            }
            assert!(calls.load(Relaxed) > 0, "a waker of ours was called");
            finish(cache, reactor).await;
            assert_eq!(UNDER_LOCK.get(), 0, "seed {seed}: a waker was touched under the index lock");
        });
    }
}

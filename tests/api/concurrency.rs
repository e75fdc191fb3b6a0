//! Many tasks, many threads: single flight, limits, queues, foreign memory.

use crate::common;

use std::{os::fd::AsRawFd, sync::Arc};

use common::{BLOCK_BYTES, Rng, config, directory, key, payload, store};
use kvhoist::{Cache, Config, Error, Layout, Route, Segment, StorageKind, Tier, WritePolicy, block_on};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn hundreds_of_tasks_get_the_right_bytes() {
    let seed = common::seed();
    for policy in [WritePolicy::WriteThrough, WritePolicy::WriteThroughSelective, WritePolicy::WriteBack] {
        let dir = directory();
        let settings = config(&dir, StorageKind::Auto, 24, 96).write_policy(policy).device_blocks(8);
        let cache = Cache::open(settings).await.expect("open");
        let tasks: Vec<_> = (0..200u64)
            .map(|task| {
                let cache = cache.clone();
                tokio::spawn(async move {
                    let mut rng = Rng(seed ^ (task << 32));
                    for _ in 0..40 {
                        one_step(&cache, &mut rng).await;
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("no task panics");
        }
        cache.sync().await.expect("sync");
        kvhoist::internals::validate(&cache).expect("valid");
        let stats = cache.stats();
        assert_eq!(stats.checksum_failures + stats.read_errors + stats.write_errors + stats.writes_refused, 0);
        cache.close().await.expect("close");
        slots_balance(&cache);
    }
}

/// With nothing in flight every slot either holds a block or is free.
fn slots_balance(cache: &Cache) {
    let stats = cache.stats();
    for tier in Tier::ALL {
        let tier_stats = stats.tier(tier);
        assert_eq!(tier_stats.resident + tier_stats.free, tier_stats.slots, "{tier}: a slot leaked");
    }
}

async fn one_step(cache: &Cache, rng: &mut Rng) {
    let n = rng.below(160);
    let expected = payload(n, BLOCK_BYTES);
    match rng.below(20) {
        0..8 => {
            if let Some(lease) = cache.fetch(&key(n)).await.expect("fetch") {
                assert!(lease[..] == expected[..], "wrong bytes for {n}");
            }
        }
        8..11 => {
            if let Some(lease) = cache.fetch_to_device(&key(n)).await.expect("fetch") {
                let bytes = cache.read_device(&lease, Vec::new()).await;
                match bytes {
                    Ok(bytes) => assert!(bytes == expected, "wrong bytes for {n} on the device"),
                    // Removed by another task between the two calls.
                    Err(error) => assert!(matches!(error, Error::Argument { .. }), "{error}"),
                }
            }
        }
        11..18 => {
            let parent = (!n.is_multiple_of(10)).then(|| key(n - 1));
            cache.store(&key(n), parent.as_ref(), &expected).await.expect("store");
        }
        18 => drop(cache.remove(&key(n)).await.expect("remove")),
        _ => drop(cache.prefetch(&[key(n), key(n + 1)]).expect("prefetch")),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_read_serves_all_who_wait_for_it() {
    let dir = directory();
    let cache = Cache::open(config(&dir, StorageKind::Auto, 4, 64)).await.expect("open");
    for n in 0..16 {
        store(&cache, n).await;
    }
    let before = cache.stats().route_blocks(Route::DiskToHost);
    let barrier = Arc::new(tokio::sync::Barrier::new(100));
    let tasks: Vec<_> = (0..100)
        .map(|_| {
            let (cache, barrier) = (cache.clone(), Arc::clone(&barrier));
            tokio::spawn(async move {
                barrier.wait().await;
                let lease = cache.fetch(&key(0)).await.expect("fetch").expect("on disk");
                assert!(lease[..] == payload(0, BLOCK_BYTES)[..]);
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no task panics");
    }
    assert_eq!(cache.stats().route_blocks(Route::DiskToHost) - before, 1);
    cache.close().await.expect("close");
}

#[test]
fn past_the_limit_of_waiters_callers_are_told_so() {
    let dir = directory();
    let settings = config(&dir, StorageKind::Auto, 1, 8).waiters_max(3);
    let cache = block_on(Cache::open(settings)).expect("open");
    let held = block_on(cache.reserve()).expect("the only slot");
    let mut waiting: Vec<_> = (0..3).map(|_| Box::pin(cache.reserve())).collect();
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    for future in &mut waiting {
        assert!(future.as_mut().poll(&mut context).is_pending());
    }
    match block_on(cache.reserve()) {
        Err(Error::Busy { setting: "waiters_max", limit: 3, .. }) => {}
        other => panic!("{other:?}"),
    }
    drop(waiting.pop());
    let mut next = Box::pin(cache.reserve());
    assert!(next.as_mut().poll(&mut context).is_pending(), "one gave up waiting, one may wait");
    drop(held);
    let first = waiting.iter_mut().find_map(|future| match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(slot) => Some(slot.expect("the freed slot")),
        std::task::Poll::Pending => None,
    });
    assert!(first.is_some(), "the freed slot goes to one who waits");
    drop((first, waiting, next));
    block_on(cache.close()).expect("close");
    slots_balance(&cache);
}

#[test]
fn a_lease_or_a_reservation_dropped_by_a_panic_gives_its_slot_to_who_waits() {
    let dir = directory();
    let cache = block_on(Cache::open(config(&dir, StorageKind::Auto, 1, 8))).expect("open");
    block_on(store(&cache, 0));
    let lease = block_on(cache.fetch(&key(0))).expect("fetch").expect("it was stored");
    let held: Box<dyn std::any::Any> = Box::new(lease);
    let mut held = Some(held);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    for _ in 0..2 {
        let mut waiting = Box::pin(cache.reserve());
        assert!(waiting.as_mut().poll(&mut context).is_pending(), "the only slot is held");
        let holder = held.take();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _holder = holder;
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        // Not at once: where another thread has the lock at this moment, it gives the slot back.
        held = Some(Box::new(block_on(waiting).expect("the freed slot")));
    }
    drop(held);
    block_on(cache.close()).expect("close");
    slots_balance(&cache);
}

#[test]
fn a_plain_thread_submits_polls_an_eventfd_and_drains() {
    let dir = directory();
    let cache = block_on(Cache::open(config(&dir, StorageKind::Auto, 8, 64))).expect("open");
    let mut pool: Vec<u8> = (0..8).flat_map(|n| payload(n, BLOCK_BYTES)).collect();
    // SAFETY: `pool` outlives the cache's use of it, which ends with `unregister` below, and is
    // touched only between submissions.
    let lent = unsafe { kvhoist::Memory::host(pool.as_mut_ptr(), pool.len()) };
    let region = kvhoist::block_on(cache.register(lent)).expect("register");
    let base = pool.as_mut_ptr();
    // Two segments a block, the second half first: lists are followed in their own order.
    let halves = |slot: usize| {
        let half = BLOCK_BYTES / 2;
        let at = |offset: usize| Segment { ptr: base.wrapping_add(slot * BLOCK_BYTES + offset), len: half };
        vec![at(0), at(half)]
    };
    let queue = cache.completion_queue(2).expect("queue");
    let keys: Vec<_> = (0..8).map(key).collect();
    let lists: Vec<_> = (0..8).map(halves).collect();
    let ticket = queue.submit_store(&keys, None, &lists).expect("submit");
    let (done, results) = wait_one(&queue);
    assert_eq!(done, ticket);
    assert!(results.iter().all(|result| matches!(result, Ok(true))));
    pool.fill(0);
    let mut wanted = keys.clone();
    wanted[7] = key(999);
    queue.submit_load(&wanted, &lists).expect("submit");
    let (_, results) = wait_one(&queue);
    assert!(results[..7].iter().all(|result| matches!(result, Ok(true))));
    assert!(matches!(results[7], Ok(false)), "resident nowhere");
    for n in 0..7 {
        assert!(pool[n * BLOCK_BYTES..(n + 1) * BLOCK_BYTES] == payload(n as u64, BLOCK_BYTES)[..]);
    }
    assert!(pool[7 * BLOCK_BYTES..].iter().all(|byte| *byte == 0), "a miss touches nothing");
    let outside = vec![vec![Segment { ptr: base.wrapping_add(1), len: 8 * BLOCK_BYTES }]];
    assert!(matches!(queue.submit_load(&keys[..1], &outside), Err(Error::Argument { .. })));
    assert_eq!(queue.outstanding(), 0);
    block_on(cache.unregister(&region)).expect("its own region");
    assert!(matches!(queue.submit_load(&keys, &lists), Err(Error::Argument { .. })), "no longer registered");
    block_on(cache.close()).expect("close");
}

fn wait_one(queue: &kvhoist::CompletionQueue) -> (u64, Vec<Result<bool, kvhoist::Error>>) {
    loop {
        let mut poll = libc::pollfd { fd: queue.event_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, valid for the call.
        let ready = unsafe { libc::poll(&raw mut poll, 1, 30_000) };
        assert_eq!(ready, 1, "the eventfd becomes readable");
        if let Some(completion) = queue.drain().pop() {
            return completion;
        }
    }
}

#[tokio::test]
async fn scattered_device_layouts_keep_the_order_of_bytes() {
    let dir = directory();
    let layout = Layout::new(vec![BLOCK_BYTES / 16; 16]).expect("sixteen layers");
    let settings = config(&dir, StorageKind::Auto, 8, 64).device_blocks(4).device_layout(layout);
    let cache = Cache::open(settings).await.expect("open");
    for n in 0..12 {
        store(&cache, n).await;
    }
    for n in 0..12 {
        let lease = cache.fetch_to_device(&key(n)).await.expect("fetch").expect("resident");
        assert_eq!(lease.segments().len(), 16);
        assert!(cache.read_device(&lease, Vec::new()).await.expect("read") == payload(n, BLOCK_BYTES));
    }
    assert_eq!(cache.stats().tier(Tier::Device).evictions, 8);
    cache.close().await.expect("close");
}

#[tokio::test]
async fn a_cache_without_disk_serves_from_memory() {
    let cache = Cache::open(Config::default().host_blocks(4).block_bytes(100)).await.expect("open");
    for n in 0..6 {
        cache.store(&key(n), None, &payload(n, 100)).await.expect("store");
    }
    assert!(cache.fetch(&key(0)).await.expect("fetch").is_none());
    let lease = cache.fetch(&key(5)).await.expect("fetch").expect("resident");
    assert_eq!(&lease[..], payload(5, 100));
    let error = cache.fetch_to_device(&key(5)).await.expect_err("no device tier");
    assert!(matches!(error, Error::Unavailable { tier: "device", .. }), "{error}");
    drop(lease);
    cache.close().await.expect("close");
}

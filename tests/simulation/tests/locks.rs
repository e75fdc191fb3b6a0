//! How often a call takes the lock that all callers share, from its start until nothing of it is under way.

mod scene;

use std::future::Future;

use kvhoist::Route;
use kvhoist_simulation::sim;
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

#[test]
fn a_call_takes_the_lock_this_often() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open(config()).await;
        fill(&cache).await;
        cache.remove(&key(15)).await.expect("removed");
        let (stored, store_locks) = locks_of(store(&cache, 15)).await;
        stored.expect("stored");
        let (hit, hit_locks) = locks_of(cache.fetch(&key(15))).await;
        let ((), lease_locks) = locks_of(async { drop(hit) }).await;
        let (read, fetch_locks) = locks_of(cache.fetch(&key(0))).await;
        assert_eq!(read.expect("no error").expect("it is on disk").route(), Route::DiskToHost);
        let locks = [store_locks, hit_locks, lease_locks, fetch_locks];
        println!("locks of a store, a hit, the end of a lease, a fetch from disk: {locks:?}");
        assert_eq!(locks, [5, 1, 1, 4], "of a store, a hit, the end of a lease, a fetch from disk");
        finish(cache, reactor).await;
    });
}

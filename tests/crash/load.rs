//! The child: it stores, removes, flushes, closes and opens until it is killed.

use kvhoist::Cache;

use super::Plan;
use crate::common::{Rng, fetch_verified, key, payload};

/// Stores at the same time. The order in which blocks were stored is known up to twice this.
pub const WIDTH: u64 = 12;

/// Runs `plan` to its end, over as many openings of the store as come up, and says what it does.
pub fn run(plan: &Plan, say: &dyn Fn(&str)) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let (mut rng, mut next) = (Rng(plan.seed), plan.first);
        while next < plan.end {
            session(plan, say, &mut rng, &mut next).await;
        }
    });
}

async fn session(plan: &Plan, say: &dyn Fn(&str), rng: &mut Rng, next: &mut u64) {
    say("opening");
    let cache = Cache::open(plan.config()).await.expect("a crash leaves a store that opens");
    let stats = cache.stats();
    say(&format!("opened by {}{}", stats.storage, if stats.direct_io { " with direct I/O" } else { "" }));
    for _ in 0..1 + rng.below(16) {
        if *next < plan.end {
            round(plan, &cache, say, rng, next).await;
        }
    }
    say("closing");
    cache.close().await.expect("close");
    say(&format!("synced {next}"));
}

async fn round(plan: &Plan, cache: &Cache, say: &dyn Fn(&str), rng: &mut Rng, next: &mut u64) {
    let from = *next;
    *next = (from + 1 + rng.below(WIDTH)).min(plan.end);
    say(&format!("store {next}"));
    let early_sync = (rng.below(3) == 0).then(|| {
        let cache = cache.clone();
        tokio::spawn(async move { cache.sync().await })
    });
    let stores: Vec<_> = (from..*next).map(|n| tokio::spawn(store(cache.clone(), n, !plan.evicts))).collect();
    for store in stores {
        store.await.expect("a store that ends");
    }
    if let Some(sync) = early_sync {
        sync.await.expect("a sync that ends").expect("sync");
        say(&format!("synced {from}"));
    }
    say(&format!("stored {next}"));
    if rng.below(4) == 0 {
        let n = from + rng.below(*next - from);
        say(&format!("remove {n}"));
        assert!(cache.remove(&key(n)).await.expect("remove"), "{n} was stored a moment ago");
        say(&format!("removed {n}"));
    }
    if !plan.evicts {
        for _ in 0..rng.below(4) {
            // There or not: removed blocks are among them.
            fetch_verified(cache, rng.below(*next)).await;
        }
    }
    if rng.below(3) == 0 {
        cache.sync().await.expect("sync");
        say(&format!("synced {next}"));
    }
}

/// Stores the `n`-th block; in a chain of up to four where `chained`.
async fn store(cache: Cache, n: u64, chained: bool) {
    let parent = (chained && !n.is_multiple_of(4)).then(|| key(n - 1));
    cache.store(&key(n), parent.as_ref(), &payload(n, cache.config().block_bytes)).await.expect("store");
}

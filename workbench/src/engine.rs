//! Drives the cache with the requests of a trace.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use kvhoist::{BlockKey, Cache, Route};
use tokio::{
    sync::{Mutex as AsyncMutex, OwnedMutexGuard, Semaphore},
    task::{JoinError, JoinSet},
};

use crate::{
    payload::{fill, is_payload, key_of},
    tally::{Outcome, Tally},
    trace::{Chain, Request},
};

/// How often a request that waits for its time checks for an interrupt.
const INTERRUPTED_EVERY: Duration = Duration::from_millis(50);

/// Blocks of one request that are fetched or stored at the same time.
const WINDOW: usize = 8;

/// What one fetch came to: the route and whether the bytes were right, or nothing.
type Fetched = Option<(Route, bool, Duration)>;

/// When requests start.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Requests at a time.
    pub in_flight: usize,
    /// How much faster than recorded; without it a request starts as soon as there is room for it.
    pub speed: Option<f64>,
}

/// Why a replay ended early.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A call of the cache failed.
    #[error(transparent)]
    Cache(#[from] kvhoist::Error),
    /// A task ended before its time.
    #[error("a {0} ended early: {1}")]
    Early(&'static str, JoinError),
}

/// Replays all requests at some pace, started in the order of the trace, until one fails or `interrupted` is set. Tells
/// `progress` how many have ended, with what became of them. Returns how many it replayed.
///
/// # Errors
/// The first failure.
pub async fn replay(
    cache: &Cache,
    requests: Vec<Request>,
    pace: Pace,
    interrupted: &Arc<AtomicBool>,
    mut progress: impl FnMut(usize, &Tally),
) -> Result<(usize, Tally), ReplayError> {
    let tally = Arc::new(Mutex::new(Tally::default()));
    let places = Arc::new(Semaphore::new(pace.in_flight));
    let mut running = JoinSet::new();
    let mut done = 0;
    let clock = Clock::new(pace.speed, &requests);
    let mut turns = Turns::default();
    let mut tell = |done| progress(done, &tally.lock().expect("nothing panics under it"));
    for (number, request) in requests.into_iter().enumerate() {
        clock.wait_for(&request, interrupted).await;
        let turn = turns.of(&request).await;
        let place = Arc::clone(&places).acquire_owned().await.expect("the semaphore is never closed");
        while let Some(ended) = running.try_join_next() {
            done += 1;
            joined(ended)?;
        }
        tell(done);
        if interrupted.load(Ordering::Relaxed) {
            break;
        }
        let worker = Worker { cache: cache.clone(), tally: Arc::clone(&tally), number };
        running.spawn(async move {
            let result = worker.serve(request).await;
            drop((place, turn));
            result
        });
    }
    while let Some(ended) = running.join_next().await {
        done += 1;
        joined(ended)?;
        tell(done);
    }
    let tally = std::mem::take(&mut *tally.lock().expect("nothing panics under it"));
    Ok((done, tally))
}

/// Lets the requests for one object run one after another: its reads find what its write has stored.
#[derive(Default)]
struct Turns(HashMap<u64, Arc<AsyncMutex<()>>>);

impl Turns {
    /// Waits for the request before this one that is for the same object.
    async fn of(&mut self, request: &Request) -> Option<OwnedMutexGuard<()>> {
        let Chain::Object(blocks) = &request.chain else { return None };
        Some(Arc::clone(self.0.entry(blocks.start).or_default()).lock_owned().await)
    }
}

/// When the requests of a trace start.
struct Clock {
    started: Instant,
    /// Timestamp of the first request, and seconds of the replay a millisecond of the trace; none where requests start
    /// when there is room for them.
    timed: Option<(f64, f64)>,
}

impl Clock {
    fn new(speed: Option<f64>, requests: &[Request]) -> Self {
        let first = requests.first().map_or(0.0, |request| request.timestamp);
        Clock { started: Instant::now(), timed: speed.map(|speed| (first, 1.0 / (1e3 * speed))) }
    }

    /// Waits until a request starts, or the command is interrupted.
    async fn wait_for(&self, request: &Request, interrupted: &AtomicBool) {
        let Some((first, scale)) = self.timed else { return };
        let due = Duration::try_from_secs_f64((request.timestamp - first) * scale).unwrap_or(Duration::ZERO);
        while let Some(left) = due.checked_sub(self.started.elapsed())
            && !left.is_zero()
            && !interrupted.load(Ordering::Relaxed)
        {
            tokio::time::sleep(left.min(INTERRUPTED_EVERY)).await;
        }
    }
}

fn joined(ended: Result<Result<(), ReplayError>, JoinError>) -> Result<(), ReplayError> {
    ended.map_err(|error| ReplayError::Early("request", error))?
}

/// Serves one request.
#[derive(Clone)]
struct Worker {
    cache: Cache,
    tally: Arc<Mutex<Tally>>,
    number: usize,
}

impl Worker {
    /// Matches the prefix, fetches and verifies the hits, stores the misses.
    async fn serve(self, request: Request) -> Result<(), ReplayError> {
        let keys: Arc<[BlockKey]> = request.chain.ids().map(key_of).collect();
        let found = self.cache.match_len(&keys);
        let mut missing = Vec::new();
        for start in (0..found).step_by(WINDOW) {
            let window = start..found.min(start + WINDOW);
            let mut fetches = JoinSet::new();
            for at in window {
                let (worker, key) = (self.clone(), keys[at]);
                fetches.spawn(async move { worker.fetch(key).await.map(|fetched| (at, fetched)) });
            }
            while let Some(ended) = fetches.join_next().await {
                let fetched = ended.map_err(|error| ReplayError::Early("fetch", error))?;
                let (at, fetched) = fetched?;
                if !self.count(fetched) {
                    missing.push(at);
                }
            }
        }
        missing.sort_unstable();
        missing.extend(found..keys.len());
        self.count_misses(missing.len());
        self.store_all(&keys, &missing).await
    }

    async fn fetch(&self, key: BlockKey) -> Result<Fetched, ReplayError> {
        let started = Instant::now();
        if self.cache.config().device_slots() == 0 {
            let Some(lease) = self.cache.fetch(&key).await? else { return Ok(None) };
            let took = started.elapsed();
            return Ok(Some((lease.route(), is_payload(&key, &lease), took)));
        }
        let Some(lease) = self.cache.fetch_to_device(&key).await? else { return Ok(None) };
        let took = started.elapsed();
        let bytes = self.cache.read_device(&lease, Vec::new()).await?;
        Ok(Some((lease.route(), is_payload(&key, &bytes), took)))
    }

    /// True for a hit.
    fn count(&self, fetched: Fetched) -> bool {
        let Some((route, verified, took)) = fetched else { return false };
        let mut tally = self.tally.lock().expect("nothing panics under it");
        tally.count(self.number, Outcome::Hit(route.served_from()));
        tally.moved(route, self.cache.config().block_bytes, took);
        tally.verification_failures += u64::from(!verified);
        true
    }

    fn count_misses(&self, misses: usize) {
        let mut tally = self.tally.lock().expect("nothing panics under it");
        for _ in 0..misses {
            tally.count(self.number, Outcome::Miss);
        }
    }

    async fn store_all(&self, keys: &Arc<[BlockKey]>, missing: &[usize]) -> Result<(), ReplayError> {
        // What may be refused goes in the order of its chain: what follows a refused block is refused too.
        let in_order = self.cache.config().eviction_policy == kvhoist::Eviction::RbRefuse;
        for window in missing.chunks(if in_order { 1 } else { WINDOW }) {
            let mut stores = JoinSet::new();
            for &at in window {
                let (worker, keys) = (self.clone(), Arc::clone(keys));
                stores.spawn(async move { worker.store(&keys, at).await });
            }
            while let Some(ended) = stores.join_next().await {
                ended.map_err(|error| ReplayError::Early("store", error))??;
            }
        }
        Ok(())
    }

    async fn store(&self, keys: &[BlockKey], at: usize) -> Result<(), ReplayError> {
        let mut block = self.cache.reserve_for_overwrite().await?;
        fill(&keys[at], &mut block);
        let started = Instant::now();
        let stored = block.commit(&keys[at], at.checked_sub(1).map(|parent| &keys[parent])).await;
        let mut tally = self.tally.lock().expect("nothing panics under it");
        match stored {
            Ok(()) => tally.moved(Route::CallerToHost, self.cache.config().block_bytes, started.elapsed()),
            // The trace goes on: a block that was not taken is a miss when it comes again.
            Err(kvhoist::Error::Refused { .. } | kvhoist::Error::Io { .. }) => tally.store_failures += 1,
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

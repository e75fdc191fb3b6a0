//! A remote store that lies: late, twice, in part, with bytes of other objects, by listings of yesterday; that refuses,
//! throttles, never answers, or is slow for an hour. It outlives the lives of a run, as a node's store does.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use kvhoist::remote::{Capabilities, Created, Object, Page, ReadBuffer, RemoteError, RemoteFuture, RemoteStore};
use tokio::time::sleep;

/// Objects of a page of a listing.
const PAGE: usize = 4;

/// Chances of each request.
#[derive(Debug, Clone, Copy, Default)]
pub struct RemoteRates {
    /// It fails; a creation may have taken place.
    pub error: f64,
    /// It never ends.
    pub hang: f64,
    /// A read has a bit flipped, too few bytes, too many, or those of another object.
    pub lie: f64,
    /// A listing lacks objects, and has some that are gone.
    pub stale: f64,
    /// An object is deleted, as a rule of the store does it.
    pub delete: f64,
    /// Every request takes a minute for the next hour.
    pub slow_hour: f64,
}

/// What happened, in numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RemoteCounts {
    /// Requests.
    pub requests: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Requests that never ended.
    pub hangs: u64,
    /// Reads that were wrong.
    pub lies: u64,
    /// Listings that were out of date.
    pub stale: u64,
    /// Objects deleted.
    pub deleted: u64,
    /// Objects created.
    pub created: u64,
}

struct State {
    objects: BTreeMap<String, Bytes>,
    /// Objects that were deleted.
    gone: BTreeMap<String, Bytes>,
    rng: Draws,
    slow_until: Option<tokio::time::Instant>,
    counts: RemoteCounts,
}

/// A generator that another thread may have: the store's futures may be polled on any.
struct Draws(u64);

impl Draws {
    fn below(&mut self, n: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn chance(&mut self, chance: f64) -> bool {
        (self.below(1 << 30) as f64) < chance * f64::from(1 << 30)
    }
}

/// The store.
pub struct SimRemote {
    state: Arc<Mutex<State>>,
    rates: RemoteRates,
    latency_max: Duration,
    object_bytes: u64,
}

/// How a request goes.
struct Way {
    delay: Duration,
    hangs: bool,
    error: Option<RemoteError>,
}

impl SimRemote {
    /// A store whose requests draw from `seed`, and take up to about `latency_max`.
    pub fn new(seed: u64, rates: RemoteRates, latency_max: Duration, object_bytes: u64) -> Arc<Self> {
        let state = State {
            objects: BTreeMap::new(),
            gone: BTreeMap::new(),
            rng: Draws(seed),
            slow_until: None,
            counts: RemoteCounts::default(),
        };
        Arc::new(SimRemote { state: Arc::new(Mutex::new(state)), rates, latency_max, object_bytes })
    }

    /// Another life begins: its clock begins too.
    pub fn begin_life(&self) {
        self.lock().slow_until = None;
    }

    /// What happened so far.
    pub fn counts(&self) -> RemoteCounts {
        self.lock().counts
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics under it")
    }

    /// Makes a request: what it draws, and when it is done, is decided when it is polled first.
    fn request<T: Send + 'static>(
        &self,
        run: impl FnOnce(&mut State, &RemoteRates) -> Result<T, RemoteError> + Send + 'static,
    ) -> RemoteFuture<T> {
        let (state, rates, latency_max) = (Arc::clone(&self.state), self.rates, self.latency_max);
        Box::pin(async move {
            let way = state.lock().expect("nothing panics under it").draw(&rates, latency_max);
            sleep(way.delay).await;
            if way.hangs {
                return std::future::pending().await;
            }
            let mut state = state.lock().expect("nothing panics under it");
            match way.error {
                None => run(&mut state, &rates),
                // Half of the requests that fail were carried out: the answer was lost.
                Some(error) => {
                    if state.rng.chance(0.5) {
                        _ = run(&mut state, &rates);
                    }
                    Err(error)
                }
            }
        })
    }
}

impl State {
    fn draw(&mut self, rates: &RemoteRates, latency_max: Duration) -> Way {
        let State { rng, counts, .. } = self;
        counts.requests += 1;
        let now = tokio::time::Instant::now();
        if rng.chance(rates.slow_hour) {
            self.slow_until = Some(now + Duration::from_secs(3600));
        }
        // Most are quick; some are late.
        let late = if rng.chance(0.05) { 20 } else { 1 };
        let delay = latency_max.mul_f64(rng.below(1000) as f64 / 1000.0) * late;
        let is_slow = self.slow_until.is_some_and(|until| now < until);
        let hangs = rng.chance(rates.hang);
        let error = rng.chance(rates.error).then(|| match rng.below(4) {
            0 => RemoteError::Refused("drawn".into()),
            1 => RemoteError::Throttled("drawn".into()),
            _ => RemoteError::Unavailable("drawn".into()),
        });
        counts.hangs += u64::from(hangs);
        counts.errors += u64::from(error.is_some());
        if rng.chance(rates.delete)
            && let Some(name) = self.any_object()
        {
            self.delete(&name);
        }
        Way { delay: if is_slow { Duration::from_secs(60) } else { delay }, hangs, error }
    }

    fn any_object(&mut self) -> Option<String> {
        let at = self.rng.below(self.objects.len().max(1) as u64) as usize;
        self.objects.keys().nth(at).cloned()
    }

    fn delete(&mut self, name: &str) {
        if let Some(bytes) = self.objects.remove(name) {
            self.counts.deleted += 1;
            self.gone.insert(name.to_owned(), bytes);
        }
    }

    /// What a read brings that should bring `bytes`.
    fn lie(&mut self, range: Range<u64>, bytes: Bytes) -> Bytes {
        self.counts.lies += 1;
        match self.rng.below(4) {
            0 => bytes.slice(..self.rng.below(bytes.len() as u64) as usize),
            1 => [&bytes[..], &[0; 7]].concat().into(),
            2 => {
                let mut bytes = bytes.to_vec();
                let at = self.rng.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << self.rng.below(8);
                bytes.into()
            }
            _ => {
                let other = self.any_object().and_then(|name| self.objects.get(&name).cloned());
                let other = other.filter(|other| other.len() as u64 >= range.end);
                other.map_or(bytes, |other| other.slice(range.start as usize..range.end as usize))
            }
        }
    }
}

impl RemoteStore for SimRemote {
    fn capabilities(&self) -> Capabilities {
        Capabilities { scheme: "sim", object_bytes: self.object_bytes, requests_in_flight: 3, reads_per_call: 2 }
    }

    fn read_into(&self, object: &str, start: u64, buffer: ReadBuffer) -> RemoteFuture<ReadBuffer> {
        let (object, mut buffer) = (object.to_owned(), buffer);
        let range = start..start + buffer.remaining() as u64;
        self.request(move |state, rates| {
            let bytes = state.objects.get(&object).ok_or(RemoteError::NotFound)?.clone();
            let whole = bytes.get(range.start as usize..range.end as usize).map(|part| bytes.slice_ref(part));
            let too_long =
                || RemoteError::Invalid { found: "an object that is shorter".into(), expected: "more".into() };
            let mut bytes = whole.ok_or_else(too_long)?;
            if state.rng.chance(rates.lie) && !bytes.is_empty() {
                bytes = state.lie(range, bytes);
            }
            // In parts, as a network has them.
            let (first, second) = bytes.split_at(state.rng.below(bytes.len() as u64 + 1) as usize);
            buffer.put(first)?;
            buffer.put(second)?;
            Ok(buffer)
        })
    }

    fn create(&self, object: &str, parts: Vec<Bytes>) -> RemoteFuture<Created> {
        let object = object.to_owned();
        self.request(move |state, _| {
            if state.objects.contains_key(&object) {
                return Ok(Created::Already);
            }
            state.counts.created += 1;
            state.objects.insert(object, parts.concat().into());
            Ok(Created::Now)
        })
    }

    fn list(&self, prefix: &str, after: Option<&str>) -> RemoteFuture<Page> {
        let (prefix, after) = (prefix.to_owned(), after.map(str::to_owned));
        self.request(move |state, rates| {
            let is_stale = state.rng.chance(rates.stale);
            state.counts.stale += u64::from(is_stale);
            let mut named = BTreeMap::new();
            for (name, bytes) in &state.objects {
                if !(is_stale && state.rng.chance(0.3)) {
                    named.insert(name.clone(), bytes.len() as u64);
                }
            }
            if is_stale {
                named.extend(state.gone.iter().map(|(name, bytes)| (name.clone(), bytes.len() as u64)));
            }
            let named = named.into_iter().filter(|(name, _)| name.starts_with(&prefix));
            let mut later = named.filter(|(name, _)| after.as_ref().is_none_or(|after| name > after));
            let objects: Vec<Object> =
                later.by_ref().take(PAGE).map(|(name, bytes)| Object { name, bytes, modified: None }).collect();
            let next = later.next().and_then(|_| objects.last()).map(|last| last.name.clone());
            Ok(Page { objects, next })
        })
    }

    fn delete(&self, objects: &[String]) -> RemoteFuture<()> {
        let objects = objects.to_vec();
        self.request(move |state, _| {
            objects.iter().for_each(|object| state.delete(object));
            Ok(())
        })
    }
}

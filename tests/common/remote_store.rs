//! A remote store in memory, which a test can slow down, take away, and have lie.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::{Bound, Range},
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use kvhoist::{
    BlockKey,
    remote::{Capabilities, Created, Object, Page, ReadBuffer, RemoteError, RemoteFuture, RemoteStore},
};
use tokio::sync::watch;

/// Objects of a page of a listing, unless a test says another number: few, so that listings have several pages.
const PAGE: usize = 3;

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Bytes>,
    /// When objects were created, those of which the store says it.
    created: BTreeMap<String, SystemTime>,
    reads: Vec<(String, Range<u64>)>,
    writes: usize,
    pages: usize,
    /// Objects of a page of a listing.
    page: Option<usize>,
    trouble: Trouble,
    refuses_deletions: bool,
    refuses_listings: bool,
    /// How creations fail.
    creations: Option<RemoteError>,
    /// With what the names of objects end whose reads and creations wait.
    held: BTreeSet<String>,
}

/// What goes wrong with each request from now on.
#[derive(Debug, Clone, Default)]
pub enum Trouble {
    #[default]
    None,
    /// It takes this long.
    Slow(Duration),
    /// It never ends.
    Hangs,
    /// It fails so.
    Fails(RemoteError),
    /// Reads have a wrong byte, at this place from their end.
    Corrupts(usize),
    /// Reads have a byte less.
    CutsOff,
    /// The next object is created, and the answer to that is lost: then nothing goes wrong any longer.
    LosesAnAnswer,
    /// It says that it deletes, and does not.
    KeepsAll,
    /// Each page of a listing is the first one.
    RepeatsPages,
    /// The code of the store panics.
    Panics,
}

/// A store in memory.
pub struct MemoryStore {
    object_bytes: u64,
    state: Arc<Mutex<State>>,
    /// The number of requests that have ended.
    changes: watch::Sender<u64>,
}

impl MemoryStore {
    pub fn new(object_bytes: u64) -> Arc<Self> {
        Arc::new(MemoryStore { object_bytes, state: Arc::default(), changes: watch::channel(0).0 })
    }

    pub fn set(&self, trouble: Trouble) {
        self.state.lock().expect("no panic").trouble = trouble;
    }

    /// Reads and the creation of the object that begins with this block wait from now on.
    pub fn hold(&self, first: &BlockKey) {
        self.state.lock().expect("no panic").held.insert(first.to_string());
    }

    /// They go on.
    pub fn release(&self, first: &BlockKey) {
        self.state.lock().expect("no panic").held.remove(&first.to_string());
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// Nothing is deleted from now on: the caller lacks that permission.
    pub fn refuse_deletions(&self) {
        self.state.lock().expect("no panic").refuses_deletions = true;
    }

    /// Pages of listings have so many objects.
    pub fn set_page(&self, objects: usize) {
        self.state.lock().expect("no panic").page = Some(objects);
    }

    /// Nothing is listed from now on: the caller lacks that permission. Or it is again.
    pub fn refuse_listings(&self, refuses: bool) {
        self.state.lock().expect("no panic").refuses_listings = refuses;
    }

    /// From now on creations fail so, and nothing else does; or succeed.
    pub fn fail_creations(&self, error: Option<RemoteError>) {
        self.state.lock().expect("no panic").creations = error;
    }

    /// The pages of listings so far.
    pub fn pages(&self) -> usize {
        self.state.lock().expect("no panic").pages
    }

    /// The reads so far, also those that failed.
    pub fn reads(&self) -> usize {
        self.state.lock().expect("no panic").reads.len()
    }

    /// The creations so far, also those that failed.
    pub fn writes(&self) -> usize {
        self.state.lock().expect("no panic").writes
    }

    pub fn objects(&self) -> Vec<(String, Bytes)> {
        self.state.lock().expect("no panic").objects.clone().into_iter().collect()
    }

    /// Whether an object begins with this block.
    pub fn has(&self, first: &BlockKey) -> bool {
        let name = format!("/{first}");
        self.state.lock().expect("no panic").objects.keys().any(|object| object.ends_with(&name))
    }

    pub fn bytes(&self) -> usize {
        self.objects().iter().map(|(_, bytes)| bytes.len()).sum()
    }

    pub fn put(&self, name: String, bytes: Bytes) {
        self.state.lock().expect("no panic").objects.insert(name, bytes);
    }

    /// From now on the store says that an object was created so many seconds after 1970.
    pub fn date(&self, name: &str, seconds: u64) {
        let created = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        self.state.lock().expect("no panic").created.insert(name.to_owned(), created);
    }

    pub fn delete_all(&self) {
        self.state.lock().expect("no panic").objects.clear();
    }

    /// Waits until `is_so` after some request.
    pub async fn wait(&self, is_so: impl Fn(&Self) -> bool) {
        let mut changes = self.changes.subscribe();
        while !is_so(self) {
            let changed = tokio::time::timeout(Duration::from_secs(60), changes.changed()).await;
            changed.expect("within a minute").expect("the store is here");
        }
    }

    /// Waits until the object is not held.
    fn released(&self, object: &str) -> impl Future<Output = ()> + Send + 'static {
        let (state, mut changes) = (Arc::clone(&self.state), self.changes.subscribe());
        let key = object.rsplit('/').next().unwrap_or_default().to_owned();
        async move { _ = changes.wait_for(|_| !state.lock().expect("no panic").held.contains(&key)).await }
    }

    fn request<T: Send + 'static>(
        &self,
        run: impl FnOnce(&mut State) -> Result<T, RemoteError> + Send + 'static,
    ) -> RemoteFuture<T> {
        let (state, changes) = (Arc::clone(&self.state), self.changes.clone());
        Box::pin(async move {
            let trouble = state.lock().expect("no panic").trouble.clone();
            match trouble {
                Trouble::Slow(time) => tokio::time::sleep(time).await,
                Trouble::Hangs => std::future::pending().await,
                Trouble::Fails(error) => return Err(error),
                Trouble::Panics => panic!("the store, on purpose"),
                Trouble::None
                | Trouble::Corrupts(_)
                | Trouble::CutsOff
                | Trouble::LosesAnAnswer
                | Trouble::KeepsAll
                | Trouble::RepeatsPages => {}
            }
            let result = run(&mut state.lock().expect("no panic"));
            changes.send_modify(|changes| *changes += 1);
            result
        })
    }
}

impl RemoteStore for MemoryStore {
    fn capabilities(&self) -> Capabilities {
        let panics = matches!(self.state.lock().expect("no panic").trouble, Trouble::Panics);
        assert!(!panics, "the store, on purpose");
        Capabilities { scheme: "memory", object_bytes: self.object_bytes, requests_in_flight: 4, reads_per_call: 1 }
    }

    fn read_into(&self, object: &str, start: u64, buffer: ReadBuffer) -> RemoteFuture<ReadBuffer> {
        let (object, mut buffer) = (object.to_owned(), buffer);
        let range = start..start + buffer.remaining() as u64;
        self.state.lock().expect("no panic").reads.push((object.clone(), range.clone()));
        let released = self.released(&object);
        let read = self.request(move |state| {
            let bytes = state.objects.get(&object).ok_or(RemoteError::NotFound)?;
            let mut bytes = bytes.slice(range.start as usize..range.end as usize).to_vec();
            match state.trouble {
                Trouble::Corrupts(from_end) => {
                    let at = bytes.len().saturating_sub(1 + from_end);
                    bytes[at] ^= 1;
                }
                Trouble::CutsOff => _ = bytes.pop(),
                _ => {}
            }
            // In parts, with a border in a block.
            let (first, second) = bytes.split_at((bytes.len() / 2 + 1).min(bytes.len()));
            buffer.put(first)?;
            buffer.put(second)?;
            Ok(buffer)
        });
        Box::pin(async move {
            released.await;
            read.await
        })
    }

    fn create(&self, object: &str, parts: Vec<Bytes>) -> RemoteFuture<Created> {
        let (released, object) = (self.released(object), object.to_owned());
        self.state.lock().expect("no panic").writes += 1;
        let create = self.request(move |state| {
            if let Some(error) = &state.creations {
                return Err(error.clone());
            }
            let exists = state.objects.contains_key(&object);
            if !exists {
                state.objects.insert(object, parts.concat().into());
            }
            match state.trouble {
                Trouble::LosesAnAnswer => {
                    state.trouble = Trouble::None;
                    Err(RemoteError::Unavailable("its answer is lost".into()))
                }
                _ if exists => Ok(Created::Already),
                _ => Ok(Created::Now),
            }
        });
        Box::pin(async move {
            released.await;
            create.await
        })
    }

    fn list(&self, prefix: &str, after: Option<&str>) -> RemoteFuture<Page> {
        let (prefix, after) = (prefix.to_owned(), after.map(str::to_owned));
        self.request(move |state| {
            state.pages += 1;
            if state.refuses_listings {
                return Err(RemoteError::Refused("403".into()));
            }
            let after = after.as_ref().filter(|_| !matches!(state.trouble, Trouble::RepeatsPages));
            let begin = after.map_or(Bound::Included(&prefix), Bound::Excluded);
            let later = state.objects.range::<String, _>((begin, Bound::Unbounded));
            let mut later =
                later.skip_while(|(name, _)| **name < prefix).take_while(|(name, _)| name.starts_with(&prefix));
            let object = |(name, bytes): (&String, &Bytes)| Object {
                name: name.clone(),
                bytes: bytes.len() as u64,
                modified: state.created.get(name).copied(),
            };
            let objects: Vec<Object> = later.by_ref().take(state.page.unwrap_or(PAGE)).map(object).collect();
            let next = later.next().and_then(|_| objects.last()).map(|last| last.name.clone());
            Ok(Page { objects, next })
        })
    }

    fn delete(&self, objects: &[String]) -> RemoteFuture<()> {
        let objects = objects.to_vec();
        self.request(move |state| {
            if state.refuses_deletions {
                return Err(RemoteError::Refused("403".into()));
            }
            if !matches!(state.trouble, Trouble::KeepsAll) {
                objects.iter().for_each(|object| _ = state.objects.remove(object));
            }
            Ok(())
        })
    }
}

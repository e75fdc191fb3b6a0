//! What operators do with a store: look at it, and delete from it.
//!
//! Only objects with names as kvhoist gives them are seen: `kvhoist1/NAMESPACE/KEY`, two digests in 64 digits each.
//! Deletion needs no agreement between nodes: an object is whole or gone, and a reader that finds none has a miss.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::ControlFlow,
    thread,
    time::{Duration, SystemTime},
};

use futures_util::{StreamExt, stream};
use kvhoist::{
    internals::{checksum::Digest, remote::blocks_of_object},
    remote::{Object, RemoteError, RemoteFuture, RemoteStore},
};

/// What the names of objects begin with: the format and its version.
pub const PREFIX: &str = "kvhoist1/";
/// Objects that one request deletes.
const DELETED_PER_REQUEST: usize = 1000;
/// Bytes of an object that are read at once: more than any table has.
const PIECE_BYTES: u64 = 8 << 20;
/// Objects that are verified at a time.
const VERIFIED_AT_A_TIME: u32 = 8;
/// Repetitions of a request that the store throttled or did not answer.
const REPEATS_MAX: u32 = 2;
/// The wait before the first repetition; it doubles with each.
const REPEAT_AFTER: Duration = Duration::from_millis(100);

/// Objects of a namespace, counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// Objects.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// When the oldest was created, where the store says that.
    pub oldest: Option<SystemTime>,
    /// When the newest was created.
    pub newest: Option<SystemTime>,
}

impl Usage {
    fn add(&mut self, object: &Object) {
        self.objects += 1;
        self.bytes += object.bytes;
        self.oldest = self.oldest.into_iter().chain(object.modified).min();
        self.newest = self.newest.max(object.modified);
    }
}

/// The digest of the namespace in an object's name; `None` for a name that kvhoist gives no object.
pub fn namespace_of(name: &str) -> Option<&str> {
    let (namespace, key) = name.strip_prefix(PREFIX)?.split_once('/')?;
    let is_digest = |text: &str| text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    (is_digest(namespace) && is_digest(key)).then_some(namespace)
}

/// A request, and its repetitions. Between two it blocks the thread: a command has nothing else to do, and other
/// requests go on in the threads of the store.
async fn repeated<T>(request: impl Fn() -> RemoteFuture<T>) -> Result<T, RemoteError> {
    for repeats in 0..REPEATS_MAX {
        match request().await {
            Err(RemoteError::Throttled(_) | RemoteError::Unavailable(_)) => {}
            ended => return ended,
        }
        thread::sleep(REPEAT_AFTER * (1 << repeats));
    }
    request().await
}

/// Lists the objects whose names begin with a prefix, page by page; `see` gets each.
///
/// # Errors
/// Of the store.
pub async fn list(
    store: &dyn RemoteStore,
    prefix: &str,
    mut see: impl FnMut(Object) -> Result<(), RemoteError>,
) -> Result<(), RemoteError> {
    let mut after: Option<String> = None;
    loop {
        let page = repeated(|| store.list(prefix, after.as_deref())).await?;
        page.objects.into_iter().filter(|object| namespace_of(&object.name).is_some()).try_for_each(&mut see)?;
        // A store whose pages do not go on would be listed for ever.
        match page.next {
            Some(next) if after.as_ref().is_none_or(|after| next > *after) => after = Some(next),
            Some(next) => {
                let found = format!("a page that ends with {next:?} behind {after:?}");
                return Err(RemoteError::Invalid { found, expected: "pages in the order of names".into() });
            }
            None => return Ok(()),
        }
    }
}

/// Counts the objects of each namespace.
///
/// # Errors
/// Of the store.
pub async fn usage(store: &dyn RemoteStore) -> Result<BTreeMap<String, Usage>, RemoteError> {
    let mut found: BTreeMap<String, Usage> = BTreeMap::new();
    let see = |object: Object| {
        let namespace = namespace_of(&object.name).expect("others are not seen").to_owned();
        found.entry(namespace).or_default().add(&object);
        Ok(())
    };
    list(store, PREFIX, see).await?;
    Ok(found)
}

/// Reads each object whose name begins with a prefix, and holds its table and its blocks against their checksums, some
/// objects at a time. `see` gets how many there are, and each with the number of its blocks, or what is wrong with it;
/// it may end the pass. One that is deleted meanwhile is left out.
///
/// # Errors
/// Of the store: one that was not read is not wrong.
pub async fn verify(
    store: &dyn RemoteStore,
    prefix: &str,
    mut see: impl FnMut(usize, &Object, Result<usize, RemoteError>) -> ControlFlow<()>,
) -> Result<(), RemoteError> {
    let mut objects = Vec::new();
    let keep = |object| {
        objects.push(object);
        Ok(())
    };
    list(store, prefix, keep).await?;
    let at_a_time = store.capabilities().requests_in_flight.clamp(1, VERIFIED_AT_A_TIME) as usize;
    let checks = objects.iter().map(async |object| (object, check(store, object).await));
    let mut checks = stream::iter(checks).buffer_unordered(at_a_time);
    while let Some((object, found)) = checks.next().await {
        match found {
            Err(RemoteError::NotFound) => {}
            Ok(_) | Err(RemoteError::Invalid { .. }) => {
                if see(objects.len(), object, found).is_break() {
                    break;
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads an object piece by piece; the number of its blocks, if all are right.
async fn check(store: &dyn RemoteStore, object: &Object) -> Result<usize, RemoteError> {
    let piece = async |from: u64| {
        let end = object.bytes.min(from + PIECE_BYTES);
        repeated(|| store.read(&object.name, from..end)).await
    };
    let (mut bytes, mut from) = (piece(0).await?, 0);
    let blocks = blocks_of_object(&object.name, &bytes, object.bytes)?;
    for (number, (range, expected)) in blocks.iter().enumerate() {
        let (mut digest, mut at) = (Digest::new(), range.start);
        while at < range.end {
            if at == from + bytes.len() as u64 {
                (bytes, from) = (piece(at).await?, at);
            }
            let end = range.end.min(from + bytes.len() as u64);
            digest.update(&bytes[(at - from) as usize..(end - from) as usize]);
            at = end;
        }
        if digest.finish() != *expected {
            let found = format!("block {number} with another checksum");
            return Err(RemoteError::Invalid { found, expected: "the one in its table".into() });
        }
    }
    Ok(blocks.len())
}

/// Which objects a collection deletes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Those that were created longer ago.
    pub age_max: Option<Duration>,
    /// The oldest, until the others have as many bytes.
    pub bytes_max: Option<u64>,
}

/// What a collection deletes and keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collection {
    /// Names of objects to delete, the oldest first.
    pub names: Vec<String>,
    /// Their bytes.
    pub bytes: u64,
    /// What stays.
    pub kept: Usage,
    /// The namespaces that were looked through.
    pub namespaces: BTreeSet<String>,
}

/// Finds what a collection deletes: with no bytes to be kept, all. Changes nothing.
///
/// # Errors
/// Of the store; [`RemoteError::Invalid`] where it does not say when objects were created, as Redis does not, unless
/// all are deleted.
pub async fn plan(
    store: &dyn RemoteStore,
    prefix: &str,
    limits: Limits,
    now: SystemTime,
) -> Result<Collection, RemoteError> {
    let mut all: Vec<Object> = Vec::new();
    let see = |object: Object| {
        if object.modified.is_none() && limits.bytes_max != Some(0) {
            let expected = "a store that has them, or all to be deleted (`--max-bytes 0`); give Redis values a time to \
                            live and the server a `maxmemory`";
            return Err(RemoteError::Invalid { found: "no times of creation".into(), expected: expected.into() });
        }
        all.push(object);
        Ok(())
    };
    list(store, prefix, see).await?;
    all.sort_unstable_by(|one, other| (one.modified, &one.name).cmp(&(other.modified, &other.name)));
    let mut bytes: u64 = all.iter().map(|object| object.bytes).sum();
    let namespaces = all.iter().filter_map(|object| namespace_of(&object.name).map(str::to_owned)).collect();
    let mut collection = Collection { namespaces, ..Collection::default() };
    for object in all {
        // A creation in the future, by the store's clock, is young.
        let age = object.modified.and_then(|created| now.duration_since(created).ok());
        let is_old = age.zip(limits.age_max).is_some_and(|(age, max)| age > max);
        let is_too_much = limits.bytes_max.is_some_and(|max| bytes > max);
        if is_old || is_too_much {
            bytes -= object.bytes;
            collection.bytes += object.bytes;
            collection.names.push(object.name);
        } else {
            collection.kept.add(&object);
        }
    }
    Ok(collection)
}

/// Deletes objects; `done` gets how many are deleted so far, after each request, and may end it.
///
/// # Errors
/// Of the store. What was deleted before stays deleted.
pub async fn delete(
    store: &dyn RemoteStore,
    names: &[String],
    mut done: impl FnMut(usize) -> ControlFlow<()>,
) -> Result<(), RemoteError> {
    for (at, some) in names.chunks(DELETED_PER_REQUEST).enumerate() {
        repeated(|| store.delete(some)).await?;
        if done(at * DELETED_PER_REQUEST + some.len()).is_break() {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        sync::{
            Mutex,
            atomic::{AtomicU32, Ordering::Relaxed},
        },
    };

    use bytes::Bytes;
    use kvhoist::remote::{Capabilities, Created, Page, ReadBuffer};
    use pollster::block_on;

    use super::*;

    /// Objects with times, in pages of two, and how many of the next requests are throttled.
    #[derive(Default)]
    struct Store(Mutex<BTreeMap<String, (u64, Option<SystemTime>)>>, AtomicU32);

    impl Store {
        fn ready<T: Send + 'static>(&self, value: T) -> RemoteFuture<T> {
            let is_throttled = self.1.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok();
            let answer = if is_throttled { Err(RemoteError::Throttled("503".into())) } else { Ok(value) };
            Box::pin(std::future::ready(answer))
        }
    }

    impl RemoteStore for Store {
        fn capabilities(&self) -> Capabilities {
            Capabilities { scheme: "test", object_bytes: 1, requests_in_flight: 1, reads_per_call: 1 }
        }

        fn read_into(&self, _: &str, _: u64, buffer: ReadBuffer) -> RemoteFuture<ReadBuffer> {
            self.ready(buffer)
        }

        fn create(&self, _: &str, _: Vec<Bytes>) -> RemoteFuture<Created> {
            self.ready(Created::Now)
        }

        fn list(&self, prefix: &str, after: Option<&str>) -> RemoteFuture<Page> {
            let objects = self.0.lock().expect("no panic");
            let after = after.unwrap_or_default();
            let found = objects.iter().filter(|(name, _)| name.starts_with(prefix) && name.as_str() > after);
            let object = |(name, &(bytes, modified)): (&String, &_)| Object { name: name.clone(), bytes, modified };
            let objects: Vec<Object> = found.map(object).take(2).collect();
            let next = objects.get(1).map(|object| object.name.clone());
            self.ready(Page { objects, next })
        }

        fn delete(&self, names: &[String]) -> RemoteFuture<()> {
            names.iter().for_each(|name| _ = self.0.lock().expect("no panic").remove(name));
            self.ready(())
        }
    }

    fn name(namespace: u8, key: u8) -> String {
        format!("{PREFIX}{}/{}", format!("{namespace:02x}").repeat(32), format!("{key:02x}").repeat(32))
    }

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// Objects of 10 bytes, created a second after each other, and what is nobody's of ours.
    fn filled() -> Store {
        let store = Store::default();
        let mut objects = store.0.lock().expect("no panic");
        for key in 0..5 {
            objects.insert(name(key % 2, 9 - key), (10, Some(at(100 + u64::from(key)))));
        }
        for foreign in ["other", "kvhoist1/readme", "kvhoist1/x/y", "kvhoist2/a/b"] {
            objects.insert(foreign.into(), (1000, Some(at(1))));
        }
        drop(objects);
        store
    }

    #[test]
    fn objects_are_counted_by_namespace() {
        let store = filled();
        let found = block_on(usage(&store)).expect("counted");
        let wanted = |objects, oldest, newest| Usage {
            objects,
            bytes: 10 * objects,
            oldest: Some(at(oldest)),
            newest: Some(at(newest)),
        };
        assert_eq!(found.into_values().collect::<Vec<_>>(), [wanted(3, 100, 104), wanted(2, 101, 103)]);
    }

    #[test]
    fn a_request_that_is_throttled_is_repeated_twice() {
        let store = filled();
        let throttle = |requests| store.1.store(requests, Relaxed);
        throttle(2);
        assert_eq!(block_on(usage(&store)).expect("counted").len(), 2);
        throttle(2);
        block_on(delete(&store, &[name(0, 9)], |_| ControlFlow::Continue(()))).expect("deleted");
        throttle(2);
        let bytes = Object { name: name(1, 8), bytes: 10, modified: None };
        let wrong = block_on(check(&store, &bytes)).expect_err("no object of kvhoist");
        assert!(matches!(wrong, RemoteError::Invalid { .. }), "{wrong}");
        throttle(3);
        assert!(matches!(block_on(usage(&store)), Err(RemoteError::Throttled(_))));
    }

    #[test]
    fn the_oldest_go_first_and_nothing_of_others() {
        let store = filled();
        let names = |limits| block_on(plan(&store, PREFIX, limits, at(110))).expect("planned").names;
        let by_age = |seconds| Limits { age_max: Some(Duration::from_secs(seconds)), bytes_max: None };
        let by_bytes = |bytes| Limits { age_max: None, bytes_max: Some(bytes) };
        assert_eq!(names(by_age(8)), [name(0, 9), name(1, 8)]);
        assert_eq!(names(by_bytes(50)), [""; 0]);
        assert_eq!(names(by_bytes(49)), [name(0, 9)]);
        assert_eq!(names(by_bytes(0)).len(), 5);
        assert_eq!(names(Limits { age_max: Some(Duration::from_secs(8)), bytes_max: Some(20) }).len(), 3);
        let mut told = Vec::new();
        let mut tell = |done| {
            told.push(done);
            ControlFlow::Break(())
        };
        block_on(delete(&store, &names(by_bytes(0)), &mut tell)).expect("deleted");
        assert_eq!(store.0.lock().expect("no panic").len(), 4);
        // An end is between two requests.
        let many: Vec<String> = (0..2 * DELETED_PER_REQUEST).map(|n| format!("{PREFIX}gone/{n}")).collect();
        block_on(delete(&store, &many, tell)).expect("deleted");
        assert_eq!(told, [5, DELETED_PER_REQUEST]);
    }

    #[test]
    fn a_store_without_times_is_not_collected() {
        let store = filled();
        store.0.lock().expect("no panic").values_mut().for_each(|(_, modified)| *modified = None);
        let by_bytes =
            |bytes| block_on(plan(&store, PREFIX, Limits { age_max: None, bytes_max: Some(bytes) }, at(110)));
        let error = by_bytes(1).expect_err("no times");
        assert!(error.to_string().contains("maxmemory"), "{error}");
        assert_eq!(by_bytes(0).expect("no times are asked for").names.len(), 5);
    }
}

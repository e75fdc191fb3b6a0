//! Objects of the remote store: which are deleted, and whose they are.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crate::{
    common::{
        key, payload,
        remote_store::{MemoryStore, Trouble},
    },
    remote::{BLOCK_BYTES, BLOCKS, assert_serves, eventually, open, reader, settings, write_chain},
};
use bytes::Bytes;
use kvhoist::{
    Config, Error, Memory, RemotePolicy, Segment, Tier,
    remote::{Capabilities, Created, Page, ReadBuffer, RemoteError, RemoteFuture, RemoteStore},
};
use tokio::sync::oneshot;

#[tokio::test]
async fn a_store_that_has_more_than_it_may_loses_objects_and_their_readers_miss() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let objects = store.objects();
    let reader = reader(&store, |config| config.remote_interval_s(3600)).await;
    let most = objects[1..].iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
    let cache = open(settings(&store).remote_bytes(most)).await;
    eventually("deleted", async || cache.stats().remote_deleted > 0).await;
    assert_eq!(store.objects(), objects[1..], "no more than it must");
    let mut missed = 0;
    for n in 0..BLOCKS {
        match reader.fetch(&key(n)).await.expect("no error") {
            Some(block) => assert_eq!(block[..], payload(n, BLOCK_BYTES)),
            None => missed += 1,
        }
    }
    assert_eq!((reader.stats().remote_stale, missed), (1, BLOCKS - cache.stats().tier(Tier::Remote).resident));
    reader.close().await.expect("closed");
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn the_oldest_objects_are_deleted_first_where_the_store_says_how_old_they_are() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let objects = store.objects();
    // The order of names turned round.
    objects.iter().rev().enumerate().for_each(|(age, (name, _))| store.date(name, age as u64));
    let cache = open(settings(&store).remote_bytes(store.bytes() as u64 - 1)).await;
    eventually("deleted", async || cache.stats().remote_deleted > 0).await;
    assert_eq!(store.objects(), objects[..objects.len() - 1], "the last by name is the oldest");
    cache.close().await.expect("closed");
}

/// Objects that are deleted after a listing at most.
const DELETED_MAX: usize = 1 << 16;

/// A store with ten objects more than one listing deletes, and settings with which one stays.
async fn with_too_many_objects() -> (Arc<MemoryStore>, Config) {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    write_chain(&store).await;
    let first = store.objects().remove(0).0;
    let prefix = first.rsplit_once('/').expect("a prefix").0;
    store.delete_all();
    store.set_page(1000);
    // Of these bytes none is an object.
    (0..DELETED_MAX as u64 + 10).for_each(|n| store.put(format!("{prefix}/{}", key(n)), "noise".into()));
    let config = settings(&store).remote_bytes(5).remote_interval_s(3600);
    (store, config)
}

#[tokio::test]
async fn more_objects_than_one_listing_deletes_are_deleted_by_the_next_one_at_once() {
    let (store, config) = with_too_many_objects().await;
    let cache = open(config).await;
    eventually("deleted", async || cache.stats().remote_deleted == DELETED_MAX as u64 + 9).await;
    assert_eq!(store.objects().len(), 1);
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_store_that_only_says_that_it_deletes_is_not_listed_again_and_again() {
    let (store, config) = with_too_many_objects().await;
    store.set(Trouble::KeepsAll);
    let before = store.pages();
    let cache = open(config).await;
    eventually("deleted twice", async || cache.stats().remote_deleted >= 2 * DELETED_MAX as u64).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(store.pages() - before, 2 * (DELETED_MAX + 10).div_ceil(1000));
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_listing_that_does_not_go_on_is_none_and_forgets_nothing() {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config).await;
    store.set(Trouble::RepeatsPages);
    eventually("told", async || cache.stats().remote_errors > 0).await;
    assert_eq!(cache.stats().tier(Tier::Remote).resident, BLOCKS);
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn another_owner_of_the_namespace_sees_no_block() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let mut config = settings(&store).remote_policy(RemotePolicy::Never);
    config.remote.owner = "\0of user 1000".into();
    let before = store.pages();
    let cache = open(config).await;
    // The first listing has ended where there is a second one. Of all objects one has several pages.
    store.wait(|store| store.pages() > before + store.objects().len()).await;
    assert_eq!(cache.stats().tier(Tier::Remote).resident, 0);
    for n in 0..BLOCKS {
        assert!(cache.fetch(&key(n)).await.expect("no error").is_none(), "block {n}");
    }
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn bytes_of_creations_that_fail_count_as_written() {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    // An object in some half a second.
    let config = settings(&store).remote_upload_bytes_per_s(BLOCK_BYTES as u64 * 2).remote_deadline_ms(600_000);
    let cache = open(config).await;
    store.set(Trouble::Fails(RemoteError::Unavailable("503".into())));
    let began = Instant::now();
    cache.store(&key(0), None, &payload(0, BLOCK_BYTES)).await.expect("stored");
    eventually("repeated", async || store.writes() == 3).await;
    cache.store(&key(1), None, &payload(1, BLOCK_BYTES)).await.expect("stored");
    eventually("the next", async || store.writes() > 3).await;
    assert!(began.elapsed() > Duration::from_millis(1500), "{:?}", began.elapsed());
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn an_object_that_was_created_anew_with_another_length_is_learned_anew() {
    let (store, other) = [8, 4].map(|blocks| MemoryStore::new(blocks * BLOCK_BYTES as u64)).into();
    write_chain(&store).await;
    write_chain(&other).await;
    let cache = reader(&store, |config| config).await;
    let is_second = |(name, _): &(String, _)| name.ends_with(&key(8).to_string());
    let (name, bytes) = other.objects().into_iter().find(is_second).expect("both stores have one");
    store.put(name, bytes);
    eventually("learned", async || cache.stats().tier(Tier::Remote).resident == BLOCKS - 4).await;
    assert_eq!((8..16).map(|n| cache.contains(&key(n))).collect::<Vec<_>>(), [[true; 4], [false; 4]].concat());
    let block = cache.fetch(&key(9)).await.expect("no error").expect("brought");
    assert_eq!(block[..], payload(9, BLOCK_BYTES));
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn blocks_behind_those_of_another_nodes_object_of_the_same_name_are_written_too() {
    let [store, other] = [8, 2].map(|blocks| MemoryStore::new(blocks * BLOCK_BYTES as u64));
    let cache = open(settings(&store).remote_interval_s(3600)).await;
    store.wait(|store| store.pages() == 1).await;
    write_chain(&other).await;
    let is_first = |(name, _): &(String, _)| name.ends_with(&key(0).to_string());
    let (name, bytes) = other.objects().into_iter().find(is_first).expect("it was written");
    store.put(name, bytes);
    for n in 0_u64..8 {
        let parent = n.checked_sub(1).map(key);
        cache.store(&key(n), parent.as_ref(), &payload(n, BLOCK_BYTES)).await.expect("stored");
    }
    eventually("written", async || cache.stats().tier(Tier::Remote).resident == 8).await;
    assert_eq!((store.objects().len(), cache.stats().remote_unsent), (2, 0));
    cache.close().await.expect("closed");
    let reader = open(settings(&store)).await;
    eventually("listed", async || reader.stats().tier(Tier::Remote).resident == 8).await;
    for (n, block) in (0..).zip(reader.fetch_many(&(0..8).map(key).collect::<Vec<_>>()).await) {
        assert_eq!(block.expect("no error").expect("brought")[..], payload(n, BLOCK_BYTES), "block {n}");
    }
    reader.close().await.expect("closed");
}

#[tokio::test]
async fn an_object_that_was_created_anew_with_other_bytes_is_a_miss_and_learned_anew_and_a_damaged_one_is_not() {
    let [store, other] = [(); 2].map(|()| MemoryStore::new(BLOCK_BYTES as u64));
    write_chain(&store).await;
    let writer = open(settings(&other)).await;
    writer.store(&key(9), Some(&key(8)), &payload(900, BLOCK_BYTES)).await.expect("stored");
    eventually("written", async || writer.stats().tier(Tier::Remote).resident == 1).await;
    writer.close().await.expect("closed");
    let cache = reader(&store, |config| config).await;
    let (name, bytes) = other.objects().remove(0);
    store.put(name, bytes);
    let is_fifth = |(name, _): &(String, _)| name.ends_with(&key(5).to_string());
    let (name, bytes) = store.objects().into_iter().find(is_fifth).expect("it was written");
    let mut damaged = bytes.to_vec();
    damaged[BLOCK_BYTES] ^= 1;
    store.put(name, damaged.into());
    for n in [5, 9] {
        assert!(cache.fetch(&key(n)).await.expect("no error").is_none(), "its table is of before");
    }
    assert_eq!(cache.stats().remote_invalid, 2);
    eventually("learned", async || cache.contains(&key(9))).await;
    let block = cache.fetch(&key(9)).await.expect("no error").expect("brought");
    assert_eq!(block[..], payload(900, BLOCK_BYTES));
    // Whole listings: of these objects one has 7 pages.
    let before = store.pages();
    store.wait(|store| store.pages() > before + 14).await;
    assert!(!cache.contains(&key(5)), "its table is the same");
    assert_eq!(cache.stats().remote_invalid, 2);
    cache.close().await.expect("closed");
}

/// A store that answers every two reads with one another's buffers.
struct Swapping {
    store: Arc<MemoryStore>,
    waiting: Mutex<Option<(ReadBuffer, oneshot::Sender<ReadBuffer>)>>,
}

impl RemoteStore for Swapping {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    fn read_into(&self, object: &str, start: u64, buffer: ReadBuffer) -> RemoteFuture<ReadBuffer> {
        // Tables are read as they are.
        if start == 0 {
            return self.store.read_into(object, start, buffer);
        }
        let mut waiting = self.waiting.lock().expect("no panic");
        let Some((others, sender)) = waiting.take() else {
            let (sender, receiver) = oneshot::channel();
            *waiting = Some((buffer, sender));
            return Box::pin(async { receiver.await.map_err(|_| RemoteError::NotFound) });
        };
        let [own, others] = [buffer, others].map(|buffer| self.store.read_into(object, start, buffer));
        Box::pin(async move {
            sender.send(own.await?).expect("the other read waits");
            others.await
        })
    }

    fn create(&self, object: &str, parts: Vec<Bytes>) -> RemoteFuture<Created> {
        self.store.create(object, parts)
    }

    fn list(&self, prefix: &str, after: Option<&str>) -> RemoteFuture<Page> {
        self.store.list(prefix, after)
    }

    fn delete(&self, objects: &[String]) -> RemoteFuture<()> {
        self.store.delete(objects)
    }
}

#[tokio::test]
async fn a_read_that_is_answered_with_slots_of_another_cache_is_a_miss() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let swapping = Arc::new(Swapping { store: Arc::clone(&store), waiting: Mutex::default() });
    let swap = |config: Config| config.remote_store(Arc::clone(&swapping) as _).remote_deadline_ms(600_000);
    let (one, other) = (reader(&store, swap).await, reader(&store, swap).await);
    let (key, before) = (key(3), one.stats().tier(Tier::Host).free);
    let (found, found_too) = tokio::join!(one.fetch(&key), other.fetch(&key));
    assert!(found.expect("no error").is_none() && found_too.expect("no error").is_none());
    for cache in [one, other] {
        let stats = cache.stats();
        assert_eq!((stats.remote_invalid, stats.tier(Tier::Host).free), (1, before), "its slot is free again");
        cache.close().await.expect("closed");
    }
}

#[tokio::test]
async fn a_submission_that_is_refused_has_nothing_read() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config).await;
    let tables = store.reads();
    let mut pool = vec![0; BLOCK_BYTES];
    // SAFETY: the pool lives until the region is unregistered, and nobody touches it during the load.
    let memory = unsafe { Memory::host(pool.as_mut_ptr(), pool.len()) };
    let region = cache.register(memory).await.expect("registered");
    let place = [vec![Segment { ptr: pool.as_mut_ptr(), len: BLOCK_BYTES }]];
    let queue = cache.completion_queue(1).expect("an eventfd");
    queue.submit_load(&[key(0)], &place).expect("there is room");
    // A block of each other object.
    for n in [8, 16] {
        let refused = queue.submit_load(&[key(n)], &place);
        assert!(matches!(refused, Err(Error::Busy { .. })), "{refused:?}");
    }
    eventually("loaded", async || !queue.drain().is_empty()).await;
    // Reads begin in the order in which blocks are wanted.
    assert_serves(&cache, 16).await;
    assert_eq!(store.reads(), tables + 2, "of two objects");
    cache.unregister(&region).await.expect("unregistered");
    cache.close().await.expect("closed");
}

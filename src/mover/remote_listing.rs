//! What the remote store has: listed when the cache is opened, and at an interval for what other nodes do.

use std::{
    collections::BinaryHeap,
    iter,
    rc::Rc,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures_util::{StreamExt, stream};
use tokio::time::{sleep, timeout};

use super::{
    Mover,
    remote::{of_store, repeated},
};
use crate::{
    config::RemotePolicy,
    device::CopyEngine,
    io::Storage,
    remote::{Object, ReadBuffer, Remote, RemoteError},
    shield::log,
};

/// Objects that one request deletes: what S3 takes.
const DELETED_PER_REQUEST: usize = 1000;

/// Names of a listing that are looked up in one turn of the reactor.
const SEEN_PER_TURN: usize = 1024;

/// Blocks of tables that are entered in one turn of the reactor.
const ENTERED_PER_TURN: usize = 256;

/// Objects that are deleted after a listing at most: their names take some 13 MB.
const DELETED_PER_LISTING: usize = 1 << 16;

/// Bytes of the tables that one call reads, as of the blocks that one reads together: each call in flight has memory
/// for all of its tables.
const TABLES_TOGETHER_BYTES: u64 = 1 << 20;

/// The oldest objects of a listing, so many at most, with the bytes of all.
struct Oldest {
    most: usize,
    bytes: u64,
    /// The newest of them first: when an object was created, its name and its bytes.
    objects: BinaryHeap<(Option<SystemTime>, String, u64)>,
}

impl Oldest {
    fn new(most: usize) -> Self {
        Oldest { most, bytes: 0, objects: BinaryHeap::new() }
    }

    fn add(&mut self, object: Object) {
        self.bytes = self.bytes.saturating_add(object.bytes);
        self.objects.push((object.modified, object.name, object.bytes));
        if self.objects.len() > self.most {
            self.objects.pop();
        }
    }

    /// Their names, oldest first, until all others have no more than so many bytes.
    fn beyond(self, bytes_max: u64) -> Vec<String> {
        let mut bytes = self.bytes;
        let beyond = self.objects.into_sorted_vec().into_iter().map_while(|(_, name, object_bytes)| {
            let is_beyond = bytes > bytes_max;
            bytes = bytes.saturating_sub(object_bytes);
            is_beyond.then_some(name)
        });
        beyond.collect()
    }
}

/// Cuts objects into calls: each of `objects_max`, and of [`TABLES_TOGETHER_BYTES`] or of one object.
fn calls<T>(objects: &[T], objects_max: usize, table_bytes: impl Fn(&T) -> u64) -> impl Iterator<Item = &[T]> {
    let mut left = objects;
    iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |object: &&T| {
            bytes += table_bytes(object);
            bytes <= TABLES_TOGETHER_BYTES
        };
        let fitting = left.iter().take(objects_max).take_while(fits).count();
        let (call, rest) = left.split_at(fitting.max(1).min(left.len()));
        left = rest;
        (!call.is_empty()).then_some(call)
    })
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Lists the store now and at the interval, until it is dropped.
    pub(super) async fn remote_listing_loop(self: Rc<Self>, remote: Arc<Remote>) {
        let interval = Duration::from_secs(self.shared.config.remote.interval_s);
        let mut bytes_before = u64::MAX;
        loop {
            let listed = of_store(self.list_remote(&remote)).await;
            // Where every block was written as it was stored, most of them would be written again.
            if listed.is_ok() || self.shared.config.remote.policy != RemotePolicy::Stored {
                remote.end_listing();
            }
            let left = match listed {
                Ok(oldest) => {
                    let deleted = of_store(self.delete_oldest(&remote, oldest)).await;
                    deleted.map_err(|error| (error, "the remote store did not delete all beyond `remote_bytes`"))
                }
                Err(error) => Err((error, "the remote store was not listed: new blocks stay unknown")),
            };
            if let Err((error, said)) = &left {
                self.shared.metrics.remote_errors.add(1);
                log(|| tracing::warn!(%error, "{said}"));
            }
            // One that says that it deletes, and does not, has no less than before.
            match left {
                Ok(Some(bytes)) if bytes < bytes_before => bytes_before = bytes,
                _ => {
                    bytes_before = u64::MAX;
                    sleep(remote.jittered(interval)).await;
                }
            }
        }
    }

    /// Enters the objects that are new, and forgets those that are gone. Returns the oldest, if `remote_bytes` bounds
    /// their bytes.
    async fn list_remote(&self, remote: &Remote) -> Result<Oldest, RemoteError> {
        let (listing, prefix) = (remote.begin_listing(), remote.space.prefix());
        let in_flight = remote.capabilities.requests_in_flight.max(1) as usize;
        let reads_per_call = remote.capabilities.reads_per_call.max(1) as usize;
        let is_bounded = self.shared.config.remote.bytes.is_some();
        let (mut after, mut oldest): (Option<String>, _) = (None, Oldest::new(DELETED_PER_LISTING));
        loop {
            // Without the deadline of reads: a store bounds its calls, and a page may take it longer.
            let page = repeated(remote, || remote.store().list(&prefix, after.as_deref())).await?;
            let mut new: Vec<&Object> = Vec::new();
            for objects in page.objects.chunks(SEEN_PER_TURN) {
                new.extend(objects.iter().filter(|object| !remote.see(object, listing)));
                crate::io::yield_now().await;
            }
            // One that has no table is not read.
            let table_bytes = |object: &&Object| remote.space.table_bytes(object.bytes).unwrap_or(0);
            let calls = stream::iter(calls(&new, reads_per_call, table_bytes));
            calls.for_each_concurrent(in_flight, |objects| self.enter_objects(remote, objects)).await;
            let mut objects = page.objects.into_iter().filter(|_| is_bounded).peekable();
            while objects.peek().is_some() {
                objects.by_ref().take(SEEN_PER_TURN).for_each(|object| oldest.add(object));
                crate::io::yield_now().await;
            }
            match page.next {
                Some(next) if after.as_ref().is_none_or(|after| next > *after) => after = Some(next),
                // It would be listed for ever, and what was not listed is not gone.
                Some(next) => {
                    let found = format!("a page that ends with {next:?} behind {after:?}");
                    return Err(RemoteError::Invalid { found, expected: "pages in the order of names".into() });
                }
                None => break,
            }
        }
        let mut next = Some(0);
        while let Some(from) = next {
            next = remote.forget_unseen(listing, from);
            crate::io::yield_now().await;
        }
        Ok(oldest)
    }

    /// Deletes the oldest objects of a listing until the others have no more than `remote_bytes`. Returns the bytes of
    /// all, if it deleted as many as it may, and the next listing goes on with more. A reader of one finds nothing,
    /// which is a miss; of several nodes that delete, each may delete what another has deleted.
    async fn delete_oldest(&self, remote: &Remote, oldest: Oldest) -> Result<Option<u64>, RemoteError> {
        let Some(bytes_max) = self.shared.config.remote.bytes else { return Ok(None) };
        let listed_bytes = oldest.bytes;
        let bytes = (oldest.objects.len() * size_of::<Object>()) as u64;
        let names = match self.workers.take(bytes) {
            true => self.workers.run(bytes, move || oldest.beyond(bytes_max)).await.unwrap_or_default(),
            false => oldest.beyond(bytes_max),
        };
        for names in names.chunks(DELETED_PER_REQUEST) {
            self.in_time(repeated(remote, || remote.store().delete(names))).await?;
            // Not before: what the store keeps would be new to the next listing, with all that was removed here.
            for name in names {
                remote.forget_object(name);
                crate::io::yield_now().await;
            }
            self.shared.metrics.remote_deleted.add(names.len() as u64);
        }
        Ok((names.len() == DELETED_PER_LISTING).then_some(listed_bytes))
    }

    /// Reads the tables of objects in one call, and enters them. One that is not what it should be is passed over.
    pub(super) async fn enter_objects(&self, remote: &Remote, objects: &[&Object]) {
        if remote.is_full() {
            return self.shared.metrics.remote_unlisted.add(objects.len() as u64);
        }
        let (known, unknown): (Vec<_>, Vec<_>) = objects
            .iter()
            .map(|object| (*object, remote.space.table_bytes(object.bytes)))
            .partition(|(_, bytes)| bytes.is_some());
        for (object, _) in unknown {
            let expected = format!("whole blocks of {} bytes behind their table", remote.space.block_bytes);
            let found = format!("an object of {} bytes", object.bytes);
            self.pass_over(remote, object, &RemoteError::Invalid { found, expected });
        }
        let reads = || {
            let read = |(object, bytes): &(&Object, Option<u64>)| {
                (object.name.clone(), 0, ReadBuffer::new(bytes.unwrap_or(0) as usize))
            };
            known.iter().map(read).collect()
        };
        let read = self.in_time(repeated(remote, || remote.store().read_each(reads()))).await;
        let Ok(tables) = read else { return self.shared.metrics.remote_errors.add(1) };
        let mut entered = 0;
        for ((object, _), table) in known.iter().zip(tables) {
            self.enter_table(remote, object, table);
            entered += remote.space.blocks_in(object.bytes).unwrap_or(0);
            if entered >= ENTERED_PER_TURN {
                entered = 0;
                crate::io::yield_now().await;
            }
        }
    }

    /// Enters an object with its table, as a read has it.
    fn enter_table(&self, remote: &Remote, object: &Object, table: Result<ReadBuffer, RemoteError>) {
        let table = table.and_then(ReadBuffer::into_bytes);
        match table.and_then(|table| remote.space.decode(&object.name, &table, object.bytes)) {
            Ok(table) => self.shared.metrics.remote_unlisted.add(u64::from(!remote.enter(&object.name, table))),
            Err(RemoteError::NotFound) => {}
            Err(error @ RemoteError::Invalid { .. }) => self.pass_over(remote, object, &error),
            Err(_) => self.shared.metrics.remote_errors.add(1),
        }
    }

    /// Passes over an object until it is another one, which each listing asks: a read may have been wrong.
    fn pass_over(&self, remote: &Remote, object: &Object, error: &RemoteError) {
        if remote.pass_over(&object.name) {
            self.shared.metrics.remote_invalid.add(1);
            log(|| tracing::warn!(%error, object = object.name, "an object of the remote store is passed over"));
        }
    }

    /// A request with its repetitions, within the deadline.
    pub(super) async fn in_time<T>(
        &self,
        request: impl Future<Output = Result<T, RemoteError>>,
    ) -> Result<T, RemoteError> {
        let deadline = Duration::from_millis(self.shared.config.remote.deadline_ms);
        let late = |_| RemoteError::Unavailable(format!("no answer within {deadline:?} (`remote_deadline_ms`)"));
        timeout(deadline, request).await.map_err(late)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_objects_are_deleted_until_the_others_are_few_or_as_many_as_are_kept() {
        let beyond = |most, bytes_max| {
            let mut oldest = Oldest::new(most);
            // Two of each age, the newest first, and one of an age that is not known.
            for age in (0..10).rev() {
                let modified = (age > 0).then(|| SystemTime::UNIX_EPOCH + Duration::from_secs(age));
                ["b", "a"].into_iter().take(if age > 0 { 2 } else { 1 }).for_each(|name| {
                    oldest.add(Object { name: format!("{name}{age}"), bytes: 10, modified });
                    assert!(oldest.objects.len() <= most);
                });
            }
            oldest.beyond(bytes_max)
        };
        assert_eq!(beyond(100, 190), [""; 0]);
        assert_eq!(beyond(100, 151), ["b0", "a1", "b1", "a2"]);
        assert_eq!(beyond(3, 151), ["b0", "a1", "b1"], "the rest is for the next listing");
        assert_eq!(beyond(100, 0).len(), 19);
    }

    #[test]
    fn a_call_reads_as_many_tables_as_the_store_takes_and_as_memory_allows_and_one_at_least() {
        const MOST: u64 = TABLES_TOGETHER_BYTES;
        let cut = |table_bytes: &[u64], objects_max| {
            calls(table_bytes, objects_max, |bytes| *bytes).map(<[u64]>::to_vec).collect::<Vec<_>>()
        };
        assert_eq!(cut(&[], 3), [[0; 0]; 0]);
        assert_eq!(cut(&[0, 1, 2, 3, 4, 5, 6], 3), [vec![0, 1, 2], vec![3, 4, 5], vec![6]]);
        assert_eq!(cut(&[1, MOST - 1, 0, 1, MOST], 9), [vec![1, MOST - 1, 0], vec![1], vec![MOST]]);
        assert_eq!(cut(&[MOST + 1, 2 * MOST, 1, 1], 9), [vec![MOST + 1], vec![2 * MOST], vec![1, 1]]);
    }
}

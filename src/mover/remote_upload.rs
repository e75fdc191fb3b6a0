//! Blocks that go to the remote store: behind everything that a caller awaits, as many bytes a second as the settings
//! say, a run of one chain's blocks in one object.

use std::{cell::Cell, collections::BTreeMap, rc::Rc, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    Mover,
    remote::{SLOT_PARTS, of_store, parts_of, repeated},
};
use crate::{
    block::{BlockKey, Route, Tier},
    config::RemotePolicy,
    device::CopyEngine,
    io::Storage,
    remote::{Created, Remote, RemoteError},
    shield::log,
    state::{Class, Pin},
};

/// How long the task waits for more blocks of a chain, after the first.
const GATHER: Duration = Duration::from_millis(200);

/// How often the task looks for blocks that were used again, or are evicted next, and whether the store may be tried.
const LOOK_AFTER: Duration = Duration::from_secs(1);

/// Blocks that are looked up under one lock.
const PER_LOCK: usize = 64;

/// Bytes that are copied on the reactor in one turn: some 25 us.
const COPIED_PER_TURN: usize = 256 << 10;

/// Objects that are written at a time.
const OBJECTS_IN_FLIGHT: usize = 4;

/// Of this share of the host tier the slots are written from in place: a store that hangs pins no more.
const SLOTS_SHARE: u32 = 8;

/// What the writes of all objects share.
struct UploadLimits {
    /// Parts of the host slots that may be written from in place.
    slots: Semaphore,
    /// When the next object may begin, as the bytes a second allow.
    next: Cell<Instant>,
}

/// A block of the host tier on its way to the store.
struct Sent(Pin);

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Writes what is queued, until it is dropped.
    pub(super) async fn remote_upload_loop(self: Rc<Self>, remote: Arc<Remote>) {
        let limits = UploadLimits { slots: Semaphore::new(SLOT_PARTS), next: Cell::new(Instant::now()) };
        let policy = self.shared.config.remote.policy;
        if policy == RemotePolicy::Never {
            return;
        }
        let mut pause = LOOK_AFTER;
        loop {
            // No event tells of another use, or that a tier is nearly full.
            let is_woken = timeout(pause, remote.wake_uploads.notified()).await.is_ok();
            pause = LOOK_AFTER;
            if !remote.may_write() {
                continue;
            }
            if is_woken && policy == RemotePolicy::Stored && remote.blocks_of_object() > 1 {
                sleep(GATHER).await;
            }
            for keys in self.shared.found_for_remote(&remote).chunks(PER_LOCK) {
                self.shared.queue_remote(&remote, keys);
                crate::io::yield_now().await;
            }
            let runs = self.chain_runs(&remote, remote.take_uploads()).await;
            let written = stream::iter(runs)
                .map(async |(parent, run)| self.upload_run(&remote, &limits, parent, &run).await)
                .buffer_unordered(OBJECTS_IN_FLIGHT)
                .fold(false, async |some, is_written| some || is_written);
            // As long as objects are written it is looked at once for more.
            if written.await {
                pause = Duration::ZERO;
            }
        }
    }

    /// Writes an object of these blocks; false if none is known then.
    async fn upload_run(
        self: &Rc<Self>,
        remote: &Remote,
        limits: &UploadLimits,
        parent: Option<BlockKey>,
        run: &[BlockKey],
    ) -> bool {
        limits.wait().await;
        if !remote.may_write() || remote.is_full() {
            // As others have found meanwhile.
            self.shared.queue_remote(remote, run);
            return false;
        }
        remote.begin_upload(run);
        let written = of_store(self.upload(remote, limits, parent, run)).await;
        remote.end_upload(run);
        let error = match written {
            Ok(is_written) => return is_written,
            Err(error) => error,
        };
        self.shared.metrics.remote_errors.add(1);
        self.shared.metrics.remote_unsent.add(run.len() as u64);
        log(|| tracing::debug!(%error, "blocks were not written to the remote store"));
        false
    }

    /// Blocks as runs of their chains, each with the key before it, and no longer than an object.
    async fn chain_runs(&self, remote: &Remote, keys: Vec<BlockKey>) -> Vec<(Option<BlockKey>, Vec<BlockKey>)> {
        let mut parents = BTreeMap::new();
        for keys in keys.chunks(PER_LOCK) {
            {
                let state = self.shared.lock();
                let ids = keys.iter().filter_map(|key| Some((*key, state.index.find(key)?)));
                parents.extend(ids.map(|(key, id)| (key, state.index.parent_key(id))));
            }
            crate::io::yield_now().await;
        }
        // The others are gone since.
        self.shared.metrics.remote_unsent.add((keys.len() - parents.len()) as u64);
        runs(&parents, remote.blocks_of_object())
    }

    /// Writes an object of these blocks, those that are still there; false if there is none, or the first is not
    /// offered then: whoever looks for blocks to be written would find these again.
    async fn upload(
        self: &Rc<Self>,
        remote: &Remote,
        limits: &UploadLimits,
        parent: Option<BlockKey>,
        run: &[BlockKey],
    ) -> Result<bool, RemoteError> {
        let began = Instant::now();
        let share = (self.shared.host_slots() / SLOTS_SHARE) as usize;
        let parts = (run.len() <= share).then(|| parts_of(run.len(), share));
        let slots = parts.and_then(|parts| limits.slots.try_acquire_many(parts).ok());
        let blocks = self.blocks_of_run(run, slots.is_some()).await;
        self.shared.metrics.remote_unsent.add((run.len() - blocks.len()) as u64);
        let Some((first, ..)) = blocks.first() else { return Ok(false) };
        let name = remote.space.name(first);
        let stored: Vec<(BlockKey, u64)> = blocks.iter().map(|(key, checksum, _)| (*key, *checksum)).collect();
        // What is known of the name, and not offered, would not be overwritten.
        if !remote.knows(&name) {
            if !remote.begin_write() {
                self.shared.queue_remote(remote, run);
                return Ok(false);
            }
            let parts = remote.space.encode(parent.as_ref(), blocks);
            if let Created::Now = self.create(remote, limits, &name, &parts).await? {
                let bytes = parts.iter().map(|part| part.len() as u64).sum();
                let table = remote.space.decode(&name, &parts[0], bytes)?;
                self.shared.metrics.remote_writes.add(1);
                stored.iter().for_each(|_| self.shared.metrics.moved(Route::HostToRemote, began.elapsed()));
                let is_known = remote.enter_written(&name, table);
                self.shared.metrics.remote_unlisted.add(u64::from(!is_known));
                return Ok(is_known);
            }
            if let Err(error) = self.learn(remote, &name).await {
                // Each later use would send it again to a store that lists nothing.
                remote.found_written(&name, &stored);
                return Err(error);
            }
        }
        // What that object does not have goes into another. Without its table nobody can tell.
        let behind = if remote.knows(&name) { &stored[1..] } else { &[] };
        let is_offered = remote.found_written(&name, &stored);
        let unsent = usize::from(!is_offered) + stored.len() - 1 - behind.len();
        self.shared.metrics.remote_unsent.add(unsent as u64);
        self.shared.send_remote(&behind.iter().map(|(key, _)| *key).collect::<Vec<_>>());
        Ok(is_offered)
    }

    /// Creates an object of these parts.
    async fn create(
        &self,
        remote: &Remote,
        limits: &UploadLimits,
        name: &str,
        parts: &[Bytes],
    ) -> Result<Created, RemoteError> {
        let bytes = parts.iter().map(|part| part.len() as u64).sum();
        let create = || {
            // Also of what fails: it went over the network.
            limits.count(bytes, self.shared.config.remote.upload_bytes_per_s);
            remote.store().create(name, parts.to_vec())
        };
        let created = of_store(self.in_time(repeated(remote, create))).await;
        if let Some(reason) = remote.end_write(created.as_ref().map(|_| ())) {
            log(|| tracing::warn!(reason, "nothing is written to the remote store until a trial succeeds"));
        }
        created
    }

    /// Enters an object that another node has written, or this node, to which the answer was lost.
    async fn learn(&self, remote: &Remote, name: &str) -> Result<(), RemoteError> {
        let page = self.in_time(repeated(remote, || remote.store().list(name, None))).await?;
        if let Some(object) = page.objects.iter().find(|object| object.name == name) {
            self.enter_objects(remote, &[object]).await;
        }
        Ok(())
    }

    /// The leading blocks of a run that are there, each with its checksum. In place where they are in host memory, if
    /// that `may_pin`: what has to be waited for is copied, and before any slot is pinned.
    async fn blocks_of_run(self: &Rc<Self>, run: &[BlockKey], may_pin: bool) -> Vec<(BlockKey, u64, Bytes)> {
        let mut copies = BTreeMap::new();
        for key in run {
            if may_pin && self.pin_resident(key).is_some() {
                continue;
            }
            // What follows one that is gone would be another run.
            let Some(copy) = self.copy_of(key).await else { break };
            copies.insert(*key, copy);
        }
        let block = |key: &BlockKey| {
            let (checksum, bytes) = copies.remove(key).or_else(|| {
                let (checksum, pin) = self.pin_resident(key).filter(|_| may_pin)?;
                Some((checksum, Bytes::from_owner(Sent(pin))))
            })?;
            Some((*key, checksum, bytes))
        };
        run.iter().map_while(block).collect()
    }

    /// Pins a block that is in host memory.
    fn pin_resident(&self, key: &BlockKey) -> Option<(u64, Pin)> {
        let mut state = self.shared.lock();
        let id = state.index.find(key)?;
        let pin = state.pin(id, Tier::Host, Route::HostHit)?;
        Some((state.checksum(&pin), pin))
    }

    /// A block's bytes and checksum, from whichever tier of the node has it: a copy, so that a store holds no slot.
    async fn copy_of(self: &Rc<Self>, key: &BlockKey) -> Option<(u64, Bytes)> {
        let pin = self.obtain_host(key, Class::Background).await.ok()??;
        let checksum = self.shared.lock().checksum(&pin);
        let bytes = self.shared.config.block_bytes as u64;
        if self.workers.take(bytes) {
            let copy = move || Bytes::copy_from_slice(pin.bytes());
            return Some((checksum, self.workers.run(bytes, copy).await?));
        }
        let mut copied = Vec::with_capacity(pin.bytes().len());
        for part in pin.bytes().chunks(COPIED_PER_TURN) {
            copied.extend_from_slice(part);
            crate::io::yield_now().await;
        }
        Some((checksum, copied.into()))
    }
}

impl UploadLimits {
    /// Waits until the bytes that were sent allow more.
    async fn wait(&self) {
        while self.next.get() > Instant::now() {
            sleep_until(self.next.get()).await;
        }
    }

    fn count(&self, bytes: u64, bytes_per_s: u64) {
        let begin = self.next.get().max(Instant::now());
        self.next.set(begin + Duration::from_secs_f64(bytes as f64 / bytes_per_s as f64));
    }
}

/// Keys with their parents, as runs of at most `most` blocks: each key follows its parent where that is among them and
/// has no other child before it.
fn runs(parents: &BTreeMap<BlockKey, Option<BlockKey>>, most: usize) -> Vec<(Option<BlockKey>, Vec<BlockKey>)> {
    let mut child = BTreeMap::new();
    for (key, parent) in parents {
        if let Some(parent) = parent.filter(|parent| parents.contains_key(parent)) {
            child.entry(parent).or_insert(*key);
        }
    }
    let is_first =
        |(key, parent): &(&BlockKey, &Option<BlockKey>)| parent.is_none_or(|parent| child.get(&parent) != Some(key));
    let mut runs = Vec::new();
    for (first, parent) in parents.iter().filter(is_first) {
        let chain = std::iter::successors(Some(*first), |key| child.get(key).copied()).collect::<Vec<_>>();
        let mut before = *parent;
        for run in chain.chunks(most) {
            runs.push((before, run.to_vec()));
            before = run.last().copied();
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_follow_chains_and_fill_objects() {
        let key = |n: u8| BlockKey::new([n; 32]);
        // 1 - 2 - 3 - 4 - 5, and 2 - 9; 7 follows a block that is not among them.
        let parents: BTreeMap<_, _> =
            [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(3)), (5, Some(4)), (9, Some(2)), (7, Some(6))]
                .map(|(n, parent)| (key(n), parent.map(key)))
                .into();
        let found = runs(&parents, 3);
        let expected = [(None, vec![1, 2, 3]), (Some(3), vec![4, 5]), (Some(6), vec![7]), (Some(2), vec![9])];
        let expected = expected.map(|(parent, run)| (parent.map(key), run.into_iter().map(key).collect::<Vec<_>>()));
        assert_eq!(found, expected);
    }
}

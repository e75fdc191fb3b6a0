//! Blocks from the remote tier: read in few ranges, verified, and stored in host memory as any new block.
//!
//! A batch that fails, or takes longer than its deadline, is a miss for all who wait for what it did not bring.

use std::{cell::Cell, panic::AssertUnwindSafe, rc::Rc, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, stream, stream::FuturesUnordered};
use tokio::{
    sync::Semaphore,
    task::{JoinHandle, spawn_local},
    time::{Instant, sleep},
};

use super::Mover;
use crate::{
    block::{Route, Tier},
    checksum::checksum,
    device::CopyEngine,
    io::Storage,
    remote::{self, Batch, Read, ReadBlock, Remote, RemoteError, RemoteFuture},
    shield::caught,
    state::{Committed, Filling, Purpose},
};

/// Repetitions of a request that the store throttled or did not answer.
const REPEATS_MAX: u32 = 2;

/// The longest wait before the first repetition; it doubles with each.
const REPEAT_AFTER: Duration = Duration::from_millis(50);

/// Turns of reads, those of all batches.
struct Turns {
    /// Requests in flight.
    requests: Semaphore,
    /// Reads that have memory: in flight, or being copied.
    held: Semaphore,
}

impl Turns {
    fn new(requests: usize) -> Self {
        Turns { requests: Semaphore::new(requests), held: Semaphore::new(2 * requests) }
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Starts the tasks of the remote tier, if there is one.
    pub(super) fn start_remote(self: &Rc<Self>) -> Vec<JoinHandle<()>> {
        let Some(remote) = &self.shared.remote else { return Vec::new() };
        let (this, remote) = (|| Rc::clone(self), || Arc::clone(remote));
        vec![
            spawn_local(this().remote_loop(remote())),
            spawn_local(this().remote_listing_loop(remote())),
            spawn_local(this().remote_upload_loop(remote())),
        ]
    }

    /// Ends what is under way for the remote tier: a close waits for nothing of it.
    pub(super) fn end_remote(&self, tasks: Vec<JoinHandle<()>>) {
        tasks.iter().for_each(JoinHandle::abort);
        if let Some(remote) = &self.shared.remote {
            remote.close();
        }
    }

    /// Brings what is wanted, until it is dropped.
    pub(super) async fn remote_loop(self: Rc<Self>, remote: Arc<Remote>) {
        let turns = Rc::new(Turns::new(remote.capabilities().requests_in_flight.max(1) as usize));
        let mut batches = FuturesUnordered::new();
        loop {
            while let Some((batch, planned)) = remote.next_batch() {
                batches.push(self.bring_batch(&remote, &turns, batch, planned));
            }
            tokio::select! {
                biased;
                () = remote.wake.notified() => {}
                Some(()) = batches.next() => {}
            }
        }
    }

    /// Brings the blocks of a batch, and answers all who wait for one.
    async fn bring_batch(self: &Rc<Self>, remote: &Arc<Remote>, turns: &Turns, batch: Batch, planned: Vec<Read>) {
        let (began, brought, failed) = (Instant::now(), Cell::new(0), Cell::new(None));
        let read = async |read: Read| {
            let held = turns.held.acquire().await.expect("it is not closed");
            if let Err(error) = self.read_blocks(remote, &turns.requests, &read, batch.is_awaited, &brought).await {
                failed.set(Some(error));
            }
            drop(held);
        };
        let all = stream::iter(planned).map(read).buffer_unordered(usize::MAX).for_each(async |()| {});
        let failed = self.in_time(of_store(all.map(Ok))).await.err().or(failed.take());
        match &failed {
            None => remote.ended(Ok(brought.get()), began),
            Some(error) => remote.ended(Err(error), began),
        }
        self.shared.metrics.remote_missed.add((batch.keys.len() - brought.get()) as u64);
        batch.keys.iter().for_each(|key| remote.answer(key, false));
        if let Some(error) = failed {
            self.shared.metrics.remote_errors.add(1);
            // A subscriber that panics must not end the task that brings blocks.
            _ = caught(|| tracing::debug!(%error, "blocks were not brought from the remote store"));
        }
    }

    /// Reads a range of an object, and stores its blocks.
    async fn read_blocks(
        self: &Rc<Self>,
        remote: &Arc<Remote>,
        requests: &Semaphore,
        read: &Read,
        is_awaited: bool,
        brought: &Cell<usize>,
    ) -> Result<(), RemoteError> {
        let turn = requests.acquire().await.expect("it is not closed");
        let began = Instant::now();
        let result = repeated(remote, || remote.store().read(&read.object, read.range.clone())).await;
        // The next request is on its way while these blocks are copied.
        drop(turn);
        let parts = match result {
            Ok(parts) => parts,
            // Another node deleted it, or a rule of the store.
            Err(RemoteError::NotFound) => {
                remote.forget_object(&read.object);
                self.shared.metrics.remote_stale.add(1);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let (found, expected) = (parts.iter().map(Bytes::len).sum::<usize>() as u64, read.range.end - read.range.start);
        if found != expected {
            remote.forget_object(&read.object);
            self.shared.metrics.remote_invalid.add(read.blocks.len() as u64);
            let (found, expected) = (format!("{found} bytes"), format!("{expected} bytes"));
            return Err(RemoteError::Invalid { found, expected });
        }
        self.shared.metrics.remote_reads.add(1);
        for block in &read.blocks {
            let bytes = remote::slice(&parts, block.known.offset - read.range.start, remote.space.block_bytes);
            if self.store_brought(remote, block, bytes, is_awaited, began).await {
                brought.set(brought.get() + 1);
                remote.answer(&block.known.key, true);
            }
        }
        Ok(())
    }

    /// Copies a block into a host slot, verifies it there, and makes it visible; false if it is not right, not wanted
    /// any longer, or finds no slot.
    async fn store_brought(
        self: &Rc<Self>,
        remote: &Arc<Remote>,
        block: &ReadBlock,
        bytes: Vec<Bytes>,
        is_awaited: bool,
        began: Instant,
    ) -> bool {
        let ReadBlock { known, parent } = *block;
        let filling = match is_awaited {
            true => self.shared.acquire(Tier::Host, Purpose::Call).await.ok(),
            false => self.shared.acquire_now(Tier::Host),
        };
        let Some(filling) = filling else { return false };
        let (sum, filling) = self.fill(filling, bytes).await;
        let Some(filling) = filling else { return false };
        if sum != known.checksum {
            drop(filling);
            remote.forget(&known.key);
            self.shared.metrics.remote_invalid.add(1);
            tracing::warn!(key = ?known.key, "a block of the remote store has another checksum than its object says");
            return false;
        }
        let is_wanted = || !remote.is_removed(&known.key);
        let committed =
            self.shared.commit_if(&known.key, parent.as_ref(), filling, sum, Route::RemoteToHost, is_wanted);
        if let Ok(Committed::Write(write, _nobody)) = committed {
            self.spawn(Rc::clone(self).write(write));
        }
        self.shared.metrics.timed(Route::RemoteToHost, began.elapsed());
        !remote.is_removed(&known.key)
    }

    /// Copies what was read into a slot, and computes its checksum: on a worker, if there is one.
    async fn fill(&self, filling: Filling, bytes: Vec<Bytes>) -> (u64, Option<Filling>) {
        let block_bytes = self.shared.config.block_bytes;
        let mut filling = filling;
        let copy = move || {
            let mut at = 0;
            for part in bytes {
                filling.bytes_mut()[at..at + part.len()].copy_from_slice(&part);
                at += part.len();
            }
            (checksum(filling.bytes()), Some(filling))
        };
        if self.workers.take(block_bytes as u64) {
            // What panicked has dropped the slot.
            return self.workers.run(block_bytes as u64, copy).await.unwrap_or((0, None));
        }
        // The other tasks get a turn after each block.
        let filled = copy();
        crate::io::yield_now().await;
        filled
    }
}

/// What becomes of a future in which the store's code runs, which is users': its panic is an error, and no more.
pub(super) async fn of_store<T>(future: impl Future<Output = Result<T, RemoteError>>) -> Result<T, RemoteError> {
    AssertUnwindSafe(future).catch_unwind().await.unwrap_or_else(|panic| {
        std::mem::forget(panic);
        Err(RemoteError::Unavailable("the store's code panicked".into()))
    })
}

/// A request, and its repetitions.
pub(super) async fn repeated<T>(remote: &Remote, request: impl Fn() -> RemoteFuture<T>) -> Result<T, RemoteError> {
    let mut repeats = 0;
    loop {
        match request().await {
            Err(RemoteError::Throttled(_) | RemoteError::Unavailable(_)) if repeats < REPEATS_MAX => {
                sleep(remote.jittered(REPEAT_AFTER * (1 << repeats))).await;
                repeats += 1;
            }
            ended => return ended,
        }
    }
}

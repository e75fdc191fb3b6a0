//! Blocks from the remote tier: read in few ranges, verified, and stored in host memory as any new block.
//!
//! What a read does not bring, which fails or takes longer than its deadline, is a miss for all who wait for it. A read
//! waits longer for its turn, as long as others bring blocks.

use std::{cell::Cell, pin::pin, rc::Rc, sync::Arc, time::Duration};

use futures_util::{StreamExt, future::select, stream, stream::FuturesUnordered};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::{Instant, sleep},
};

use super::{Mover, Task};
use crate::{
    block::{Route, Tier},
    device::CopyEngine,
    io::Storage,
    remote::{Batch, FAILURES_MAX, ReadBlock, ReadBuffer, Remote, RemoteError},
    shield::{caught_future, log},
    state::{Committed, Filling, Purpose},
};

/// Repetitions of a request that the store throttled or did not answer.
const REPEATS_MAX: u32 = 2;

/// The longest wait before the first repetition; it doubles with each.
const REPEAT_AFTER: Duration = Duration::from_millis(50);

/// Of this share of the host tier the slots are filled by requests at a time: a store that hangs holds no more.
const SLOTS_SHARE: u32 = 4;

/// Permits of reads, those of all batches.
struct ReadPermits {
    all: Permits,
    /// Those of them that no caller waits for: half of all, so that callers do not wait behind all of a prefetch.
    background: Permits,
    /// Reads that failed, since the store answered one.
    failed: Cell<u32>,
}

/// Requests in flight, and the host slots that they fill.
struct Permits {
    requests: Semaphore,
    slots: Semaphore,
    slots_max: usize,
}

impl Permits {
    fn new(requests: usize, slots_max: usize) -> Self {
        Permits { requests: Semaphore::new(requests), slots: Semaphore::new(slots_max), slots_max }
    }

    async fn acquire(&self, slots: usize) -> [SemaphorePermit<'_>; 2] {
        const OPEN: &str = "it is not closed";
        let request = self.requests.acquire().await.expect(OPEN);
        [request, self.slots.acquire_many(slots as u32).await.expect(OPEN)]
    }
}

impl ReadPermits {
    fn new(requests: usize, host_slots: u32) -> Self {
        let slots = (host_slots / SLOTS_SHARE).max(1) as usize;
        ReadPermits {
            all: Permits::new(requests, slots),
            background: Permits::new(requests.div_ceil(2), slots.div_ceil(2)),
            failed: Cell::new(0),
        }
    }

    /// The slots that one read may fill.
    fn slots_max(&self, is_awaited: bool) -> usize {
        if is_awaited { self.all.slots_max } else { self.background.slots_max }
    }

    /// Waits for the turn of a read to so many slots. `None` where too many others failed meanwhile: who waits has
    /// waited long enough.
    async fn turn(&self, slots: usize, is_awaited: bool) -> Option<[Option<[SemaphorePermit<'_>; 2]>; 2]> {
        let failed = self.failed.get();
        let background = if is_awaited { None } else { Some(self.background.acquire(slots).await) };
        let all = self.all.acquire(slots).await;
        let is_away = self.failed.get().saturating_sub(failed) >= FAILURES_MAX;
        (!is_away).then_some([background, Some(all)])
    }

    /// Notes the end of a read.
    fn ended<T>(&self, result: &Result<T, RemoteError>) {
        let is_answered = matches!(result, Ok(_) | Err(RemoteError::NotFound | RemoteError::Invalid { .. }));
        self.failed.set(if is_answered { 0 } else { self.failed.get() + 1 });
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Starts the tasks of the remote tier, if there is one.
    pub(super) fn start_remote(self: &Rc<Self>) -> Vec<Task> {
        let Some(remote) = &self.shared.remote else { return Vec::new() };
        let (this, remote) = (|| Rc::clone(self), || Arc::clone(remote));
        vec![
            self.spawn_part(this().remote_loop(remote())),
            self.spawn_part(this().remote_listing_loop(remote())),
            self.spawn_part(this().remote_upload_loop(remote())),
        ]
    }

    /// Ends what is under way for the remote tier: a close waits for nothing of it.
    pub(super) fn end_remote(&self, tasks: &[Task]) {
        tasks.iter().for_each(Task::abort);
        if let Some(remote) = &self.shared.remote {
            remote.close();
        }
    }

    /// Brings what is wanted, until it is dropped.
    pub(super) async fn remote_loop(self: Rc<Self>, remote: Arc<Remote>) {
        let requests = remote.capabilities.requests_in_flight.max(1) as usize;
        let permits = ReadPermits::new(requests, self.shared.config.host_slots());
        let mut batches = FuturesUnordered::new();
        loop {
            while let Some((batch, planned)) = remote.next_batch() {
                batches.push(self.bring_batch(&remote, &permits, batch, planned));
            }
            let woken = pin!(remote.wake.notified());
            if batches.is_empty() {
                woken.await;
            } else {
                select(woken, batches.next()).await;
            }
        }
    }

    /// Brings the blocks of a batch, and answers all who wait for one.
    async fn bring_batch(
        self: &Rc<Self>,
        remote: &Arc<Remote>,
        permits: &ReadPermits,
        batch: Batch,
        planned: Vec<Vec<ReadBlock>>,
    ) {
        let (began, brought, failed) = (Instant::now(), Cell::new(0), Cell::new(None));
        let read = async |blocks: Vec<ReadBlock>| {
            let slots = blocks.len().min(permits.slots_max(batch.is_awaited));
            let Some(_turn) = permits.turn(slots, batch.is_awaited).await else { return };
            for blocks in blocks.chunks(slots) {
                if let Err(error) = self.read_blocks(remote, permits, blocks, &batch, &brought).await {
                    failed.set(Some(error));
                    break;
                }
            }
        };
        stream::iter(planned).map(read).buffer_unordered(usize::MAX).for_each(async |()| {}).await;
        let failed = failed.take();
        match &failed {
            // A store that brings blocks is there, whatever became of the others.
            Some(error) if brought.get() == 0 => remote.ended(Err(error), began),
            _ => remote.ended(Ok(brought.get()), began),
        }
        self.shared.metrics.remote_missed.add((batch.keys.len() - brought.get()) as u64);
        batch.keys.iter().for_each(|key| remote.answer(key, &batch, false));
        if let Some(error) = failed {
            self.shared.metrics.remote_errors.add(1);
            log(|| tracing::debug!(%error, "blocks were not brought from the remote store"));
        }
    }

    /// Reads blocks in one call, or in some where there are fewer slots, and makes them visible.
    async fn read_blocks(
        self: &Rc<Self>,
        remote: &Arc<Remote>,
        permits: &ReadPermits,
        blocks: &[ReadBlock],
        batch: &Batch,
        brought: &Cell<usize>,
    ) -> Result<(), RemoteError> {
        let (mut blocks, mut failed) = (blocks, Ok(()));
        while !blocks.is_empty() {
            let began = Instant::now();
            // A wait for memory says nothing of the store.
            let first = Cell::new(Some(self.slots(remote, blocks, batch.is_awaited).await));
            let read = async || {
                let slots = match first.take() {
                    Some(slots) => slots,
                    // None is held while a repetition waits.
                    None => self.slots(remote, blocks, batch.is_awaited).await,
                };
                self.read_ranges(remote, blocks, slots).await
            };
            let read = of_store(self.in_time(repeated(remote, read))).await;
            if matches!(read, Ok((now, _)) if now.is_empty()) {
                // Nothing was asked.
                break;
            }
            permits.ended(&read);
            let (now, answers) = read?;
            blocks = &blocks[now.len()..];
            for (range, answer) in ranges(now).zip(answers) {
                match answer.and_then(ReadBuffer::into_slots) {
                    Ok(filled) => {
                        self.shared.metrics.remote_reads.add(1);
                        for (block, (filling, sum)) in range.iter().zip(filled) {
                            if self.publish_brought(remote, block, filling, sum, began) {
                                brought.set(brought.get() + 1);
                                remote.answer(&block.known.key, batch, true);
                            }
                        }
                    }
                    // Another node deleted it, or a rule of the store.
                    Err(RemoteError::NotFound) => {
                        remote.forget_object(&range[0].object);
                        self.shared.metrics.remote_stale.add(1);
                    }
                    Err(error) => {
                        remote.hide_object(&range[0].object);
                        self.shared.metrics.remote_invalid.add(range.len() as u64);
                        failed = Err(error);
                    }
                }
            }
        }
        failed
    }

    /// Reads as many of the blocks as there are slots: these, and the answer for each of their ranges.
    async fn read_ranges<'a>(
        &self,
        remote: &Remote,
        blocks: &'a [ReadBlock],
        slots: Vec<Filling>,
    ) -> Result<(&'a [ReadBlock], Vec<Result<ReadBuffer, RemoteError>>), RemoteError> {
        let (now, mut slots) = (&blocks[..slots.len()], slots.into_iter());
        if now.is_empty() {
            return Ok((now, Vec::new()));
        }
        let read = |range: &[ReadBlock]| {
            let buffer = ReadBuffer::of_slots(slots.by_ref().take(range.len()).collect());
            (range[0].object.to_string(), range[0].known.offset, buffer)
        };
        Ok((now, remote.store().read_each(ranges(now).map(read).collect()).await?))
    }

    /// Host slots for up to all of the blocks. Only the first is waited for, and only by a caller: who holds one waits
    /// for none.
    async fn slots(&self, remote: &Remote, blocks: &[ReadBlock], is_awaited: bool) -> Vec<Filling> {
        // A caller may wait by now for what was a prefetch.
        let first = match is_awaited || remote.is_awaited(blocks) {
            true => self.shared.acquire(Tier::Host, Purpose::Call).await.ok(),
            false => self.shared.lock().acquire(Tier::Host),
        };
        let more = std::iter::from_fn(|| self.shared.lock().acquire(Tier::Host));
        first.into_iter().chain(more).take(blocks.len()).collect()
    }

    /// Makes a block visible that a host slot has; false if it is not right, or not wanted any longer.
    fn publish_brought(
        self: &Rc<Self>,
        remote: &Arc<Remote>,
        block: &ReadBlock,
        filling: Filling,
        sum: u64,
        began: Instant,
    ) -> bool {
        let ReadBlock { object, known, parent, .. } = block;
        if sum != known.checksum {
            drop(filling);
            remote.doubt(object, known);
            self.shared.metrics.remote_invalid.add(1);
            let said = "a block of the remote store has another checksum than its object says";
            log(|| tracing::warn!(key = ?known.key, "{said}"));
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
}

/// The blocks as ranges of their objects.
fn ranges(blocks: &[ReadBlock]) -> impl Iterator<Item = &[ReadBlock]> {
    blocks.chunk_by(|_, block| block.follows)
}

/// What becomes of a future in which the store's code runs, which is users': its panic is an error, and no more.
pub(super) async fn of_store<T>(future: impl Future<Output = Result<T, RemoteError>>) -> Result<T, RemoteError> {
    let panicked = || Err(RemoteError::Unavailable("the store's code panicked".into()));
    caught_future(future).await.unwrap_or_else(panicked)
}

/// A request, and its repetitions.
pub(super) async fn repeated<T>(
    remote: &Remote,
    request: impl AsyncFn() -> Result<T, RemoteError>,
) -> Result<T, RemoteError> {
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

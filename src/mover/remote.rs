//! Blocks from the remote tier: read in few ranges, verified, and stored in host memory as any new block.
//!
//! What a read does not bring, which fails or takes longer than its deadline, is a miss for all who wait for it. A read
//! waits longer for its turn, as long as others bring blocks.

use std::{cell::Cell, pin::pin, rc::Rc, sync::Arc, time::Duration};

use futures_util::{
    StreamExt,
    future::{Either, select},
    stream,
    stream::FuturesUnordered,
};
use tokio::{
    sync::{Notify, Semaphore, SemaphorePermit},
    time::{Instant, sleep},
};

use super::{Mover, Task};
use crate::{
    block::{Route, Tier},
    device::CopyEngine,
    io::Storage,
    remote::{Batch, FAILURES_MAX, Read, ReadBlock, ReadBuffer, Remote, RemoteError},
    shield::{caught_future, log},
    state::{Committed, Filling, Purpose},
};

/// Repetitions of a request that the store throttled or did not answer.
const REPEATS_MAX: u32 = 2;

/// The longest wait before the first repetition; it doubles with each.
const REPEAT_AFTER: Duration = Duration::from_millis(50);

/// Of this share of the host tier the slots are filled by requests at a time: a store that hangs holds no more.
const SLOTS_SHARE: u32 = 4;

/// Parts of such a share, which requests take: the host tier has more slots at one time than at another.
pub(super) const SLOT_PARTS: usize = 1 << 30;

/// Slots that are taken for reads, and blocks that are made visible, in one turn of the reactor.
const PER_TURN: usize = 16;

/// Permits of reads, those of all batches.
struct ReadPermits {
    all: Permits,
    /// Those of them that no caller waits for: half of all, so that callers do not wait behind all of a prefetch.
    background: Permits,
    /// One permit: whose slots are taken, or whose blocks made visible.
    reactor: Semaphore,
    /// Slots that were taken, and blocks that were made visible, by all reads.
    steps: Cell<usize>,
    /// Reads that failed, since the store answered one.
    failed: Cell<u32>,
}

/// Requests in flight, and parts of the host slots that they may fill.
struct Permits {
    requests: Semaphore,
    slots: Semaphore,
}

/// Why a semaphore has permits.
const OPEN: &str = "it is not closed";

/// How many of its parts so many slots of a share take: exactly `share` slots fit, of up to 32,768.
pub(super) fn parts_of(slots: usize, share: usize) -> u32 {
    (slots * SLOT_PARTS / share).clamp(1, SLOT_PARTS) as u32
}

impl Permits {
    fn new(requests: usize) -> Self {
        Permits { requests: Semaphore::new(requests), slots: Semaphore::new(SLOT_PARTS) }
    }

    async fn acquire(&self, slots: usize, share: impl Fn() -> usize) -> [SemaphorePermit<'_>; 2] {
        let request = self.requests.acquire().await.expect(OPEN);
        [request, self.slots.acquire_many(parts_of(slots, share())).await.expect(OPEN)]
    }
}

impl ReadPermits {
    fn new(requests: usize) -> Self {
        let (all, background) = (Permits::new(requests), Permits::new(requests.div_ceil(2)));
        ReadPermits { all, background, reactor: Semaphore::new(1), steps: Cell::new(0), failed: Cell::new(0) }
    }

    /// Waits for the turn of a read to so many slots, of those that reads may fill now; once it is `raised`, because a
    /// caller waits for it, not behind those that nobody waits for. `None` where too many others failed meanwhile: who
    /// waits has waited long enough.
    async fn turn(
        &self,
        slots: usize,
        (is_awaited, raised): (bool, &Notify),
        share: impl Fn(bool) -> usize,
    ) -> Option<[Option<[SemaphorePermit<'_>; 2]>; 2]> {
        let failed = self.failed.get();
        let background = if is_awaited {
            None
        } else {
            match select(pin!(self.background.acquire(slots, || share(false))), pin!(raised.notified())).await {
                Either::Left((permits, _)) => Some(permits),
                Either::Right(_) => None,
            }
        };
        let all = self.all.acquire(slots, || share(true)).await;
        let is_away = self.failed.get().saturating_sub(failed) >= FAILURES_MAX;
        (!is_away).then_some([background, Some(all)])
    }

    /// Waits for the turn of a read on the reactor.
    async fn reactor(&self) -> SemaphorePermit<'_> {
        self.reactor.acquire().await.expect(OPEN)
    }

    /// Counts a step. The turn on the reactor may end with it: then waits for the next one, behind other reads.
    async fn step<'a>(&'a self, turn: SemaphorePermit<'a>) -> SemaphorePermit<'a> {
        self.steps.set(self.steps.get().wrapping_add(1));
        if !self.steps.get().is_multiple_of(PER_TURN) {
            return turn;
        }
        crate::io::yield_now().await;
        drop(turn);
        self.reactor().await
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
        let permits = ReadPermits::new(requests);
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
        planned: Vec<Read>,
    ) {
        let (asked, brought, failed) = (Instant::now(), Cell::new(0), Cell::new(None));
        // What is measured is what callers feel: not how long a prefetch waits for its turn behind others.
        let began = Cell::new(batch.is_awaited.then_some(asked));
        let read = async |Read { blocks, raised }: Read| {
            let slots = blocks.len().min(self.read_slots(batch.is_awaited));
            let share = |is_awaited| self.read_slots(is_awaited);
            let Some(_turn) = permits.turn(slots, (batch.is_awaited, &raised), share).await else { return };
            began.set(began.get().or_else(|| Some(Instant::now())));
            // There may be fewer by now.
            for blocks in blocks.chunks(slots.min(self.read_slots(batch.is_awaited))) {
                if let Err(error) = self.read_blocks(remote, permits, blocks, &batch, &brought).await {
                    failed.set(Some(error));
                    break;
                }
            }
        };
        stream::iter(planned).map(read).buffer_unordered(usize::MAX).for_each(async |()| {}).await;
        let (failed, began) = (failed.take(), began.get().unwrap_or(asked));
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

    /// Host slots that reads may fill at a time: all, or those that no caller waits for.
    fn read_slots(&self, is_awaited: bool) -> usize {
        let slots = (self.shared.host_slots() / SLOTS_SHARE).max(1) as usize;
        if is_awaited { slots } else { slots.div_ceil(2) }
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
            let first = Cell::new(Some(self.slots(remote, permits, blocks, batch.is_awaited).await));
            let failure = Cell::new(None);
            let read = async || {
                let slots = match first.take() {
                    Some(slots) => slots,
                    // None is held while a repetition waits.
                    None => self.slots(remote, permits, blocks, batch.is_awaited).await,
                };
                let read = self.read_ranges(remote, blocks, slots).await;
                read.inspect_err(|error| failure.set(Some(error.clone())))
            };
            let mut read = of_store(self.in_time(repeated(remote, read))).await;
            if matches!(read, Ok((now, _)) if now.is_empty()) {
                // Nothing was asked, or not again after a failure.
                let Some(error) = failure.take() else { break };
                read = Err(error);
            }
            permits.ended(&read);
            let (now, answers) = read?;
            blocks = &blocks[now.len()..];
            // A store that serves several caches may answer one with the slots of another.
            let is_own = |filling: &Filling| filling.is_of(&self.shared);
            let mut turn = permits.reactor().await;
            for (range, answer) in ranges(now).zip(answers) {
                match answer.and_then(|buffer| buffer.into_slots(is_own)) {
                    Ok(filled) => {
                        self.shared.metrics.remote_reads.add(1);
                        for (block, (filling, sum)) in range.iter().zip(filled) {
                            turn = permits.step(turn).await;
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
            drop(turn);
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
    async fn slots(
        &self,
        remote: &Remote,
        permits: &ReadPermits,
        blocks: &[ReadBlock],
        is_awaited: bool,
    ) -> Vec<Filling> {
        let mut slots = Vec::with_capacity(blocks.len());
        // A caller may wait by now for what was a prefetch.
        if is_awaited || remote.is_awaited(blocks) {
            slots.extend(self.shared.acquire(Tier::Host, Purpose::Call).await.ok());
        }
        let mut turn = permits.reactor().await;
        while slots.len() < blocks.len() {
            // Not in the head of the loop, whose body would have the lock, too.
            let slot = self.shared.lock().acquire(Tier::Host);
            let Some(slot) = slot else { break };
            slots.push(slot);
            turn = permits.step(turn).await;
        }
        drop(turn);
        slots
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_slots_as_a_share_has_fit_it() {
        for share in [1, 3, 4, 7, 1000, 32_767] {
            let fit = SLOT_PARTS / parts_of(1, share) as usize;
            assert_eq!((fit, parts_of(share, share) as usize), (share, SLOT_PARTS), "one at a time, and all at once");
        }
        assert_eq!(parts_of(9, 3) as usize, SLOT_PARTS, "no more than there are");
    }
}

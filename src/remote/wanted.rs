//! Blocks that are wanted from the store: each is brought once, whoever waits for it.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use tokio::sync::{Notify, oneshot};

use super::presence::ReadBlock;
use crate::block::BlockKey;

/// Blocks to be brought together.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Tells it from the others.
    pub(crate) number: u64,
    pub(crate) keys: Vec<BlockKey>,
    /// A caller waits for some of them.
    pub(crate) is_awaited: bool,
}

/// Blocks that are read together.
pub(crate) struct Read {
    pub(crate) blocks: Vec<ReadBlock>,
    /// Told once a caller waits for one of them.
    pub(crate) raised: Arc<Notify>,
}

/// A block that is wanted.
struct Pending {
    /// The batch that brings it.
    batch: u64,
    /// It counts among those of [`Wanted::awaited`].
    is_awaited: bool,
    waiters: Vec<Waiter>,
    /// It was removed since: it is not stored.
    is_removed: bool,
    /// Tells the read that brings it of its waiters.
    raised: Option<Arc<Notify>>,
}

/// It is told whether the block is there.
struct Waiter {
    answer: oneshot::Sender<bool>,
    /// When it began to wait, in looks at the clock.
    since: u64,
}

/// A block has as many waiters as it may.
#[derive(Debug)]
pub(crate) struct Full;

/// What is wanted, and the batches that nobody carries out yet.
#[derive(Default)]
pub(crate) struct Wanted {
    pending: BTreeMap<BlockKey, Pending>,
    queue: VecDeque<Batch>,
    /// Blocks of batches that a caller waits for.
    awaited: usize,
    /// Batches so far.
    batches: u64,
}

impl Wanted {
    /// Blocks that are wanted now.
    pub(crate) fn len(&self) -> usize {
        self.pending.len()
    }

    /// Those of them that a caller waited for from the beginning.
    pub(crate) fn awaited(&self) -> usize {
        self.awaited
    }

    pub(crate) fn contains(&self, key: &BlockKey) -> bool {
        self.pending.contains_key(key)
    }

    /// Queues blocks, none of which is wanted already.
    pub(crate) fn push(&mut self, keys: Vec<BlockKey>, is_awaited: bool) {
        self.batches += 1;
        let batch = Batch { number: self.batches, keys, is_awaited };
        let number = batch.number;
        let pending = || Pending { batch: number, is_awaited, waiters: Vec::new(), is_removed: false, raised: None };
        self.pending.extend(batch.keys.iter().map(|key| (*key, pending())));
        self.awaited += if is_awaited { batch.keys.len() } else { 0 };
        // What somebody waits for goes first.
        match batch.is_awaited {
            true => {
                let at = self.queue.iter().take_while(|queued| queued.is_awaited).count();
                self.queue.insert(at, batch);
            }
            false => self.queue.push_back(batch),
        }
    }

    /// The next batch to be carried out.
    pub(crate) fn pop(&mut self) -> Option<Batch> {
        self.queue.pop_front()
    }

    /// Waits for a block that is wanted; `None` if it is not. Waiters that left make room: they are dropped after the
    /// unlock.
    pub(crate) fn join(
        &mut self,
        key: &BlockKey,
        since: u64,
        waiters_max: usize,
        gone: &mut Vec<oneshot::Sender<bool>>,
    ) -> Result<Option<oneshot::Receiver<bool>>, Full> {
        let Some(Pending { waiters, .. }) = self.pending.get_mut(key) else { return Ok(None) };
        if waiters.len() >= waiters_max {
            take_waiters(waiters, |waiter| waiter.answer.is_closed(), gone);
        }
        if waiters.len() >= waiters_max {
            return Err(Full);
        }
        let (answer, receiver) = oneshot::channel();
        waiters.push(Waiter { answer, since });
        Ok(Some(receiver))
    }

    /// A read of blocks, which is told of their waiters: at once, if there are some.
    pub(crate) fn read(&mut self, blocks: Vec<ReadBlock>) -> Read {
        let raised = Arc::<Notify>::default();
        for block in &blocks {
            let Some(pending) = self.pending.get_mut(&block.known.key) else { continue };
            pending.raised = Some(Arc::clone(&raised));
            if !pending.waiters.is_empty() {
                raised.notify_one();
            }
        }
        Read { blocks, raised }
    }

    /// What is to be told, after the unlock, of a waiter for a block.
    pub(crate) fn raised(&self, key: &BlockKey) -> Option<Arc<Notify>> {
        self.pending.get(key)?.raised.clone()
    }

    pub(crate) fn has_waiter(&self, key: &BlockKey) -> bool {
        self.pending.get(key).is_some_and(|pending| pending.waiters.iter().any(|waiter| !waiter.answer.is_closed()))
    }

    pub(crate) fn has_waiters(&self) -> bool {
        self.pending.values().any(|pending| !pending.waiters.is_empty())
    }

    /// Ends the waits that are overdue; the waiters are told after the unlock.
    #[must_use]
    pub(crate) fn take_overdue(&mut self, is_overdue: impl Fn(u64) -> bool) -> Vec<oneshot::Sender<bool>> {
        let mut overdue = Vec::new();
        for pending in self.pending.values_mut() {
            take_waiters(&mut pending.waiters, |waiter| is_overdue(waiter.since), &mut overdue);
        }
        overdue
    }

    /// Notes that a block was removed: what comes of it is not stored.
    pub(crate) fn remove(&mut self, key: &BlockKey) {
        if let Some(pending) = self.pending.get_mut(key) {
            pending.is_removed = true;
        }
    }

    /// As [`remove`](Self::remove), of every block.
    pub(crate) fn remove_all(&mut self) {
        self.pending.values_mut().for_each(|pending| pending.is_removed = true);
    }

    pub(crate) fn is_removed(&self, key: &BlockKey) -> bool {
        self.pending.get(key).is_none_or(|pending| pending.is_removed)
    }

    /// Ends the wait for a block that the batch of this number brings, if it does still; the waiters are told after the
    /// unlock.
    #[must_use]
    pub(crate) fn end(&mut self, key: &BlockKey, batch: u64) -> Vec<oneshot::Sender<bool>> {
        if self.pending.get(key).is_none_or(|pending| pending.batch != batch) {
            return Vec::new();
        }
        let ended = self.pending.remove(key).expect("just looked at");
        self.awaited -= usize::from(ended.is_awaited);
        ended.answers()
    }

    /// Ends every wait.
    #[must_use]
    pub(crate) fn end_all(&mut self) -> Vec<oneshot::Sender<bool>> {
        self.queue.clear();
        self.awaited = 0;
        std::mem::take(&mut self.pending).into_values().flat_map(Pending::answers).collect()
    }
}

impl Pending {
    fn answers(self) -> Vec<oneshot::Sender<bool>> {
        self.waiters.into_iter().map(|waiter| waiter.answer).collect()
    }
}

fn take_waiters(waiters: &mut Vec<Waiter>, are: impl Fn(&Waiter) -> bool, taken: &mut Vec<oneshot::Sender<bool>>) {
    taken.extend(waiters.extract_if(.., |waiter| are(waiter)).map(|waiter| waiter.answer));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_batch_ends_no_wait_for_another() {
        let (mut wanted, key) = (Wanted::default(), BlockKey::new([1; 32]));
        wanted.push(vec![key], false);
        let first = wanted.pop().expect("queued").number;
        assert!(wanted.end(&key, first).is_empty(), "it came, and nobody waited");
        wanted.push(vec![key], true);
        let second = wanted.pop().expect("queued").number;
        let mut waiting = wanted.join(&key, 0, 1, &mut Vec::new()).expect("room").expect("wanted");
        assert!(wanted.end(&key, first).is_empty() && wanted.contains(&key) && !wanted.is_removed(&key));
        assert!(waiting.try_recv().is_err(), "it still waits");
        assert_eq!((wanted.end(&key, second).len(), wanted.contains(&key)), (1, false));
    }
}

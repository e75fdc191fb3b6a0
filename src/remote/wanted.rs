//! Blocks that are wanted from the store: each is brought once, whoever waits for it.

use std::collections::{BTreeMap, VecDeque};

use tokio::sync::oneshot;

use crate::block::BlockKey;

/// Blocks to be brought together.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) keys: Vec<BlockKey>,
    /// A caller waits for some of them.
    pub(crate) is_awaited: bool,
}

/// A block that is wanted.
#[derive(Default)]
struct Pending {
    /// They are told whether it is there.
    waiters: Vec<oneshot::Sender<bool>>,
    /// It was removed since: it is not stored.
    is_removed: bool,
}

/// What is wanted, and the batches that nobody carries out yet.
#[derive(Default)]
pub(crate) struct Wanted {
    pending: BTreeMap<BlockKey, Pending>,
    queue: VecDeque<Batch>,
}

impl Wanted {
    /// Blocks that are wanted now.
    pub(crate) fn len(&self) -> usize {
        self.pending.len()
    }

    pub(crate) fn contains(&self, key: &BlockKey) -> bool {
        self.pending.contains_key(key)
    }

    /// Queues blocks, none of which is wanted already.
    pub(crate) fn push(&mut self, batch: Batch) {
        batch.keys.iter().for_each(|key| _ = self.pending.insert(*key, Pending::default()));
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

    /// Waits for a block that is wanted; `None` if it is not, or has `waiters_max` waiters.
    pub(crate) fn join(&mut self, key: &BlockKey, waiters_max: usize) -> Option<oneshot::Receiver<bool>> {
        let pending = self.pending.get_mut(key)?;
        if pending.waiters.len() >= waiters_max {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        pending.waiters.push(sender);
        Some(receiver)
    }

    pub(crate) fn has_waiter(&self, key: &BlockKey) -> bool {
        self.pending.get(key).is_some_and(|pending| !pending.waiters.is_empty())
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

    /// Ends the wait for a block; the waiters are told after the unlock.
    #[must_use]
    pub(crate) fn end(&mut self, key: &BlockKey) -> Vec<oneshot::Sender<bool>> {
        self.pending.remove(key).map(|pending| pending.waiters).unwrap_or_default()
    }

    /// Ends every wait.
    #[must_use]
    pub(crate) fn end_all(&mut self) -> Vec<oneshot::Sender<bool>> {
        self.queue.clear();
        std::mem::take(&mut self.pending).into_values().flat_map(|pending| pending.waiters).collect()
    }
}

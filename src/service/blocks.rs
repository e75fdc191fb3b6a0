//! Blocks between a client's memory and its space, some at a time.

#[cfg(test)]
mod tests;

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use tokio::{
    sync::{Notify, Semaphore},
    task::JoinSet,
};

use super::{
    protocol::{BlockResult, Blocks, Failure, Place, Way},
    regions::Regions,
    spaces::Space,
};
use crate::{
    block::{BlockKey, Segment},
    cache::Cache,
    error::{Result, ServiceFault},
};

/// Blocks that are given to the cache in one call.
const BLOCKS_PER_CALL: usize = 32;

/// A client's cancellation of a request.
#[derive(Clone, Default)]
pub(super) struct Cancel(Rc<(Cell<bool>, Notify)>);

impl Cancel {
    pub(super) fn cancel(&self) {
        self.0.0.set(true);
        self.0.1.notify_one();
    }

    async fn canceled(&self) {
        while !self.0.0.get() {
            self.0.1.notified().await;
        }
    }
}

/// Moves blocks for one connection: its memory, its space's cache, and its share of bytes in flight.
pub(super) struct Movers {
    cache: Cache,
    pub(super) regions: Regions,
    /// A permit a block.
    permits: Arc<Semaphore>,
    per_call: usize,
    /// Blocks in flight.
    moving: Cell<u64>,
}

impl Movers {
    pub(super) fn new(space: &Space, bytes_in_flight_max: u64, client: String) -> Self {
        let cache = space.cache.clone();
        let block_bytes = cache.config().block_bytes as u64;
        let blocks = (bytes_in_flight_max / block_bytes).clamp(1, 4096) as usize;
        let movements_max = cache.config().limits.movements_max as usize;
        Movers {
            regions: Regions::new(cache.clone(), Rc::clone(&space.system), Rc::clone(&space.lenders), client),
            cache,
            permits: Arc::new(Semaphore::new(blocks)),
            per_call: BLOCKS_PER_CALL.min(blocks).min(movements_max),
            moving: Cell::new(0),
        }
    }

    pub(super) fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Bytes of blocks in flight.
    pub(super) fn bytes_in_flight(&self) -> u64 {
        self.moving.get() * self.cache.config().block_bytes as u64
    }

    /// Moves blocks; a result for each, in order. After a cancellation no more blocks begin; those in flight complete.
    ///
    /// # Cancel safety
    /// No more blocks begin. Movements in flight continue, and hold their regions until they end.
    pub(super) async fn run(self: Rc<Self>, way: Way, blocks: Blocks, cancel: Cancel) -> Vec<BlockResult> {
        let count = blocks.keys.len();
        let canceled = Failure::new(ServiceFault::Canceled, "canceled before the block was begun");
        let results = Rc::new(RefCell::new(vec![Err(canceled); count]));
        let blocks = Rc::new(blocks);
        let mut calls = JoinSet::new();
        for first in (0..count).step_by(self.per_call) {
            let last = (first + self.per_call).min(count);
            let permits = Arc::clone(&self.permits).acquire_many_owned((last - first) as u32);
            let permits = tokio::select! { biased;
                () = cancel.canceled() => break,
                permits = permits => permits.expect("nobody closes it"),
            };
            let (this, blocks, results) = (Rc::clone(&self), Rc::clone(&blocks), Rc::clone(&results));
            calls.spawn_local(async move {
                let range = first..last;
                let way = way.of_part(&blocks.keys, first);
                let ended = this.call(way, &blocks.keys[range.clone()], &blocks.places[range.clone()]).await;
                results.borrow_mut()[range].clone_from_slice(&ended);
                drop(permits);
            });
            while calls.try_join_next().is_some() {}
        }
        while calls.join_next().await.is_some() {}
        results.take()
    }

    /// One call of the cache.
    async fn call(&self, way: Way, keys: &[BlockKey], places: &[Vec<Place>]) -> Vec<BlockResult> {
        let refuse = |failure: Failure| vec![Err(failure); keys.len()];
        let segments = places.iter().map(|places| self.regions.segments(places));
        let segments: Vec<Vec<Segment>> = match segments.collect() {
            Ok(segments) => segments,
            Err(failure) => return refuse(failure),
        };
        let _moving = Moving::new(&self.moving, keys.len() as u64);
        // Polled before other tasks of this thread: the call holds the segments' regions from its first poll on,
        // and a region that leaves is waited for.
        let ended = match way {
            Way::Load if self.regions.lenders() > 1 => self.cache.load_shared(keys, &segments).await,
            Way::Load => self.cache.load_into(keys, &segments).await,
            Way::Store(parent) => self.cache.store_from(keys, parent.as_ref(), &segments).await,
        };
        if let Some(region) = self.regions.spoiled(places) {
            if matches!(way, Way::Store(_)) {
                self.forget(keys).await;
            }
            let text = format!("region {region}: found a file that has shrunk, expected one that keeps its size");
            return refuse(Failure::new(ServiceFault::Memory, text));
        }
        match ended {
            Ok(results) => results.into_iter().map(told).collect(),
            Err(error) => refuse(Failure::from(&error)),
        }
    }

    /// Removes blocks whose bytes may be the guard's zeros.
    async fn forget(&self, keys: &[BlockKey]) {
        for key in keys {
            if let Err(error) = self.cache.remove(key).await {
                tracing::warn!(%error, "a block of memory that was taken away stays");
            }
        }
    }
}

fn told(result: Result<bool>) -> BlockResult {
    result.map_err(|error| Failure::from(&error))
}

/// Counts blocks for as long as it lives.
struct Moving<'a>(&'a Cell<u64>, u64);

impl<'a> Moving<'a> {
    fn new(count: &'a Cell<u64>, blocks: u64) -> Self {
        count.set(count.get() + blocks);
        Moving(count, blocks)
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - self.1);
    }
}

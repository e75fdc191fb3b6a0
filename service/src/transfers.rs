//! Blocks between a client's memory and its space, some at a time.

mod layers;
#[cfg(test)]
mod tests;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    future::pending,
    panic::resume_unwind,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use futures_util::FutureExt;
use kvhoist::{
    BlockKey, Cache,
    internals::service::{Gpu, KeepWalk},
};
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    task::{JoinError, JoinSet, yield_now},
};

use self::layers::Found;
use super::{
    budget::Account,
    protocol::{BlockResult, Blocks, Failure, Way},
    regions::{Lent, Regions, shrunk},
    spaces::Space,
};
use crate::error::{Result, ServiceFault};

/// Blocks that are given to the cache in one call.
const BLOCKS_PER_CALL: usize = 32;
/// Places that are worked through for one connection before the others have their turn: some 20 us, where each lies in
/// another region.
const PLACES_PER_TURN: usize = 64;
/// Requests of a connection that load layer by layer at a time: each has all of its blocks under way.
const LAYERED_MAX: usize = 8;

/// A client's cancellation of a request.
#[derive(Clone, Default)]
pub(super) struct Cancel(Rc<(Cell<bool>, Notify)>);

impl Cancel {
    pub(super) fn cancel(&self) {
        self.0.0.set(true);
        self.0.1.notify_one();
    }

    pub(super) fn is_canceled(&self) -> bool {
        self.0.0.get()
    }

    pub(super) async fn canceled(&self) {
        while !self.is_canceled() {
            self.0.1.notified().await;
        }
    }
}

/// Moves blocks for one connection: its memory, its space's cache, and its share of bytes in flight.
pub(super) struct ClientTransfers {
    cache: Cache,
    pub(super) regions: Regions,
    /// A permit a block.
    permits: Arc<Semaphore>,
    /// The same for blocks that are stored, which have half of it: no load waits for stores.
    stores: Arc<Semaphore>,
    per_call: usize,
    /// The most blocks that the cache takes in one call.
    movements_max: usize,
    /// One request of the connection at a time works through its places.
    turns: Semaphore,
    /// Places since the others had their turn.
    places: Cell<usize>,
    /// Blocks in flight.
    moving: Cell<u64>,
    /// A permit a request that loads layer by layer.
    layered: Semaphore,
}

impl ClientTransfers {
    /// `client`: its name for the log. `account`: what the regions of the connection are charged to. `gpu`: whose
    /// memory the client lends.
    pub(super) fn new(
        space: &Space,
        bytes_in_flight_max: u64,
        client: String,
        account: Rc<Account>,
        gpu: Option<Arc<Gpu>>,
    ) -> Self {
        let cache = space.cache.clone();
        let block_bytes = cache.config().block_bytes as u64;
        let blocks = (bytes_in_flight_max / block_bytes).clamp(1, 4096) as usize;
        let (blocks, stores) = (blocks.max(2), (blocks / 2).max(1));
        let movements_max = cache.config().limits.movements_max as usize;
        ClientTransfers {
            regions: Regions::new(
                cache.clone(),
                Rc::clone(&space.system),
                Rc::clone(&space.lenders),
                client,
                account,
                gpu,
            ),
            cache,
            permits: Arc::new(Semaphore::new(blocks)),
            stores: Arc::new(Semaphore::new(stores)),
            per_call: BLOCKS_PER_CALL.min(stores).min(movements_max),
            movements_max,
            turns: Semaphore::new(1),
            places: Cell::new(0),
            moving: Cell::new(0),
            layered: Semaphore::new(LAYERED_MAX),
        }
    }

    pub(super) fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Bytes of blocks in flight.
    pub(super) fn bytes_in_flight(&self) -> u64 {
        self.moving.get() * self.cache.config().block_bytes as u64
    }

    /// Waits for the connection's turn to work through so many places.
    async fn turn(&self, places: usize) {
        let _others_wait = self.turns.acquire().await.expect("nobody closes it");
        let so_far = self.places.get() + places;
        if so_far < PLACES_PER_TURN {
            return self.places.set(so_far);
        }
        yield_now().await;
        self.places.set(places.min(PLACES_PER_TURN - 1));
    }

    /// Keeps a chain, and the blocks before it, which may be all of the space's. Returns how many of the chain are
    /// kept.
    ///
    /// # Cancel safety
    /// A part of the blocks is kept.
    pub(super) async fn keep(&self, keys: &[BlockKey], time: Duration) -> usize {
        let mut walk = self.cache.keep_in_parts(keys, time);
        // As long as other hints and look-ups of so many keys take, which are answered at once.
        let mut at_once = 2 * keys.len() / KeepWalk::BLOCKS_PER_PART + 1;
        loop {
            if at_once == 0 {
                // A part takes as long as a turn's places.
                self.turn(PLACES_PER_TURN).await;
            }
            at_once = at_once.saturating_sub(1);
            if let Some(kept) = walk.keep_some() {
                return kept;
            }
        }
    }

    /// Checks the places of all blocks.
    async fn check(&self, blocks: &Blocks) -> Result<(), Failure> {
        for block in 0..blocks.places.blocks() {
            let (mut bytes, mut left) = (0, blocks.places.count(block..block + 1));
            let mut places = blocks.places.of(block..block + 1);
            while left > 0 {
                let turn = left.min(PLACES_PER_TURN);
                self.turn(turn).await;
                bytes += self.regions.check(places.by_ref().take(turn))?;
                left -= turn;
            }
            self.check_block(bytes)?;
        }
        Ok(())
    }

    /// Refuses what is not one block long.
    fn check_block(&self, bytes: u64) -> Result<(), Failure> {
        let block_bytes = self.cache.config().block_bytes as u64;
        if bytes == block_bytes {
            return Ok(());
        }
        let text = format!("places: found {bytes} bytes, expected one block of {block_bytes}");
        Err(Failure::new(ServiceFault::Argument, text))
    }

    /// The end of a call's blocks that begin with `first`.
    fn last(&self, blocks: &Blocks, first: usize) -> usize {
        let most = (first + self.per_call).min(blocks.keys.len());
        let mut last = first + 1;
        while last < most && blocks.places.count(first..last + 1) <= PLACES_PER_TURN {
            last += 1;
        }
        last
    }

    /// Moves blocks; a result for each, in order. After a cancellation no more blocks begin; those in flight complete.
    ///
    /// # Errors
    /// Before anything moves, for places that are wrong.
    ///
    /// # Cancel safety
    /// No more blocks begin. Movements in flight continue, and hold their regions until they end.
    pub(super) async fn run(
        self: Rc<Self>,
        way: Way,
        blocks: Blocks,
        cancel: Cancel,
    ) -> Result<Vec<BlockResult>, Failure> {
        self.check(&blocks).await?;
        let count = blocks.keys.len();
        let results: Rc<RefCell<Vec<Option<BlockResult>>>> = Rc::new(RefCell::new(vec![None; count]));
        let blocks = Rc::new(blocks);
        let mut calls = JoinSet::new();
        let mut next = 0;
        while next < count {
            let first = next;
            let last = self.last(&blocks, first);
            next = last;
            let permits = tokio::select! { biased;
                () = cancel.canceled() => break,
                permits = self.permits_for(&way, (last - first) as u32) => permits,
            };
            let find = self.unchanged(async || self.listed(&blocks.places, first..last).await);
            let found = tokio::select! { biased;
                () = cancel.canceled() => break,
                found = find => found,
            };
            let (this, blocks, results) = (Rc::clone(&self), Rc::clone(&blocks), Rc::clone(&results));
            let mut call = Box::pin(async move {
                let ended = this.call(way.of_part(&blocks.keys, first), &blocks.keys[first..last], found).await;
                results.borrow_mut()[first..last].iter_mut().zip(ended).for_each(|(at, ended)| *at = Some(ended));
                drop(permits);
            });
            // Before other tasks of this thread: the call holds the segments' regions from its first poll on, and a
            // region that leaves is waited for.
            if (&mut call).now_or_never().is_none() {
                calls.spawn_local(call);
            }
            while let Some(ended) = calls.try_join_next() {
                pass_on(ended);
            }
        }
        while let Some(ended) = calls.join_next().await {
            pass_on(ended);
        }
        Ok(results.take().into_iter().map(|ended| ended.unwrap_or_else(|| Err(canceled()))).collect())
    }

    /// Waits for the connection's share of bytes in flight.
    async fn permits_for(&self, way: &Way, blocks: u32) -> [Option<OwnedSemaphorePermit>; 2] {
        let take = |permits: &Arc<Semaphore>| Arc::clone(permits).acquire_many_owned(blocks);
        let of_stores = match way {
            Way::Load => None,
            Way::Store(_) => take(&self.stores).await.ok(),
        };
        [of_stores, take(&self.permits).await.ok()]
    }

    /// One call of the cache, for blocks that were found there.
    async fn call(&self, way: Way, keys: &[BlockKey], found: Result<Found, Failure>) -> Vec<BlockResult> {
        let refuse = |failure: Failure| vec![Err(failure); keys.len()];
        let (segments, guarded) = match found {
            Ok(found) => found,
            Err(failure) => return refuse(failure),
        };
        let _moving = Moving::new(&self.moving, keys.len() as u64);
        let ended = match way {
            Way::Load if self.regions.lenders() > 1 => self.cache.load_shared(keys, &segments).await,
            Way::Load => self.cache.load_into(keys, &segments).await,
            Way::Store(parent) => self.cache.store_from(keys, parent.as_ref(), &segments).await,
        };
        if let Some(failure) = self.settle(guarded).await {
            return refuse(failure);
        }
        match ended {
            Ok(results) => results.into_iter().map(told).collect(),
            Err(error) => refuse(Failure::from(&error)),
        }
    }

    /// Whether memory of a movement that has ended was taken away meanwhile: then it is given up. The cache has stored
    /// nothing from it since then; what it has of the same keys is others'.
    ///
    /// Pending for ever once the cache has ended: the kernel may still write to the client's memory, which is not to be
    /// told that it is its own again. The session ends then, and hangs up last.
    async fn settle(&self, guarded: BTreeMap<u32, Rc<Lent>>) -> Option<Failure> {
        if self.cache.has_ended() {
            pending::<()>().await;
        }
        let spoiled: Vec<_> = guarded.into_iter().filter(|(_, lent)| lent.is_spoiled()).collect();
        let (first, _) = spoiled.first()?;
        // What is written there is the service's memory.
        for (region, lent) in &spoiled {
            self.regions.give_up(*region, lent).await;
        }
        Some(shrunk(*first))
    }
}

/// Passes a panic of a call on: what it had begun goes on, and so the request must not be answered.
fn pass_on(ended: Result<(), JoinError>) {
    if let Some(panic) = ended.err().and_then(|error| error.try_into_panic().ok()) {
        resume_unwind(panic);
    }
}

fn canceled() -> Failure {
    Failure::new(ServiceFault::Canceled, "canceled before the block was begun")
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

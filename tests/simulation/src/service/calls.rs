//! The calls of one caller of a client, and the checks of their answers.

use std::{cell::RefCell, rc::Rc, time::Duration};

use kvhoist::{BlockKey, Error, Segment, ServiceFault};
use kvhoist_service::{Client, Pins};
use tokio::time::{sleep, timeout};

use super::{
    asked::Asked,
    memory::{Memory, cut},
    plan::PATIENCE,
    run::Run,
};
use crate::{
    cancel::{Cancel, late, until},
    model::{RemoveEnd, StoreEnd},
    plan::{Call, pick},
    sim::Rng,
};

/// Blocks of one call, at most.
const BLOCKS_MAX: u64 = 6;

/// Makes a call, unless it is dropped: then `None`.
pub(super) async fn make<T>(run: &Run, call: impl Future<Output = T>, cancel: Cancel, rng: Rng) -> Option<T> {
    let made = until(late(call, rng), cancel).await;
    run.report.borrow_mut().dropped += u64::from(made.is_none());
    made
}

pub struct Caller {
    pub(super) run: Rc<Run>,
    pub(super) client: Client,
    pub(super) space: usize,
    pub(super) number: u64,
    pub(super) rng: Rng,
    pub(super) memory: Memory,
    /// Blocks that it has pinned.
    pub(super) pins: Vec<Pins>,
    /// Takes the memory when the caller has ended.
    kept: Rc<RefCell<Vec<Memory>>>,
}

impl Caller {
    pub fn new(
        run: Rc<Run>,
        client: Client,
        space: usize,
        number: u64,
        mut rng: Rng,
        kept: Rc<RefCell<Vec<Memory>>>,
    ) -> Self {
        let memory = Memory::new(run.plan.spaces[space].block_bytes, rng.between(1, BLOCKS_MAX) as usize);
        Caller { run, client, space, number, rng, memory, pins: Vec::new(), kept }
    }

    pub async fn run(mut self) {
        for _ in 0..self.run.plan.calls_each {
            if self.run.failed() {
                break;
            }
            if self.rng.chance(self.run.plan.pause) {
                sleep(Duration::from_millis(self.rng.below(20))).await;
            }
            if timeout(PATIENCE, self.call()).await.is_err() {
                self.run.fail(format!("a call of caller {} never ended", self.number));
            }
        }
        if self.memory.region.is_some() {
            self.kept.borrow_mut().push(self.memory);
        }
    }

    async fn call(&mut self) {
        if self.memory.region.is_none()
            && let Err(error) = self.register().await
        {
            self.refused("a registration", &error);
            // It may be registered all the same.
            return self.renew_memory().await;
        }
        const WEIGHTED: [(Call, u64); 9] = [
            (Call::Load, 8),
            (Call::StoreFrom, 8),
            (Call::Match, 3),
            (Call::Prefetch, 2),
            (Call::Remove, 1),
            (Call::Sync, 1),
            (Call::Regions, 2),
            (Call::Reserve, 3),
            (Call::Hint, 1),
        ];
        if self.run.plan.by_layer && self.rng.chance(0.4) {
            return self.by_layer().await;
        }
        let mut at = self.rng.below(WEIGHTED.iter().map(|(_, weight)| weight).sum());
        let drawn = WEIGHTED.iter().find(|(_, weight)| {
            let found = at < *weight;
            at = at.saturating_sub(*weight);
            found
        });
        let call = drawn.map_or(Call::Load, |(call, _)| *call);
        self.run.report.borrow_mut().calls[call as usize] += 1;
        self.run.mix(self.number << 16 | call as u64);
        let result = match call {
            Call::Load => self.load().await,
            Call::StoreFrom => self.store().await,
            Call::Match => self.look_up().await,
            Call::Prefetch => self.prefetch().await,
            Call::Remove => self.remove().await,
            Call::Sync => self.sync().await,
            Call::Regions => self.take_back_in_use().await,
            Call::Reserve => self.copied().await,
            _ => self.hint().await,
        };
        if let Err(error) = result {
            self.refused(call.name(), &error);
            sleep(Duration::from_millis(self.rng.below(30))).await;
        }
    }

    /// Lends its memory, as a device's or the host's.
    async fn register(&mut self) -> Result<(), Error> {
        let device = self.run.plan.spaces[self.space].device && self.rng.chance(0.8);
        match device {
            true => self.memory.register_device(&self.client).await,
            false => self.memory.register(&self.client, self.rng.chance(0.5)).await,
        }
    }

    pub(super) fn refused(&self, what: &str, error: &Error) {
        self.run.say(|| format!("caller {}: {what}: {error}", self.number));
        self.run.mix(self.number << 16 | 0xe0);
        self.run.check_error(&format!("{what} of caller {}", self.number), error);
    }

    /// Makes a call, unless it is dropped: then `None`.
    pub(super) async fn made<T>(&mut self, call: impl Future<Output = T>) -> Option<T> {
        let (cancel, rng) = (Cancel::draw(&mut self.rng, self.run.plan.cancel), self.rng.fork());
        make(&self.run, call, cancel, rng).await
    }

    /// Draws blocks: any ones, or a part of a chain.
    pub(super) fn draw(&mut self, chain: bool) -> (Vec<usize>, Vec<BlockKey>) {
        let universe = &self.run.plan.spaces[self.space].universe;
        let (len, room) = (universe.len() as u64, self.memory.blocks());
        let blocks: Vec<usize> = match chain {
            true => {
                let path = universe.path(self.rng.below(len) as usize);
                path[path.len().saturating_sub(room)..].to_vec()
            }
            false => (0..self.rng.between(1, room as u64)).map(|_| self.rng.below(len) as usize).collect(),
        };
        let keys = blocks.iter().map(|&block| universe.key(block)).collect();
        (blocks, keys)
    }

    pub(super) fn ask(&self, blocks: &[usize]) -> Asked {
        let model = self.run.models[self.space].borrow();
        let began = blocks.iter().map(|&block| model.begin(block)).collect();
        Asked { run: Rc::clone(&self.run), space: self.space, life: self.run.life.get(), began, stores: false }
    }

    fn ask_to_store(&self, blocks: &[usize]) -> Asked {
        let mut model = self.run.models[self.space].borrow_mut();
        let began = blocks.iter().map(|&block| model.store_begins(block)).collect();
        Asked { run: Rc::clone(&self.run), space: self.space, life: self.run.life.get(), began, stores: true }
    }

    fn segments(&mut self, blocks: usize) -> Vec<Vec<Segment>> {
        (0..blocks).map(|at| self.memory.segments(at, &mut self.rng)).collect()
    }

    pub(super) fn payload(&self, block: usize) -> &[u8] {
        &self.run.plan.spaces[self.space].universe.block(block).payload
    }

    /// Checks the results of a load; `holds` compares the bytes of one block.
    pub(super) fn loaded(
        &self,
        blocks: &[usize],
        asked: &Asked,
        results: Vec<Result<bool, Error>>,
        holds: impl Fn(usize, &[u8]) -> bool,
    ) {
        if results.len() != blocks.len() {
            self.run.fail(format!("{} results for {} blocks", results.len(), blocks.len()));
        }
        for (at, (result, &block)) in results.into_iter().zip(blocks).enumerate() {
            self.run.mix(result.as_ref().map_or(2, |found| u64::from(*found)));
            match result {
                Ok(found) => {
                    if found && !holds(at, self.payload(block)) {
                        self.run.fail(format!("block {block} of space {} was loaded with wrong bytes", self.space));
                    }
                    asked.found(at, found);
                }
                Err(error) => self.refused("a load of one block", &error),
            }
        }
    }

    fn stored(&self, asked: Asked, results: Vec<Result<bool, Error>>) {
        let end = |at: usize| match results.get(at) {
            Some(Ok(true)) => StoreEnd::Acknowledged,
            Some(Err(Error::Service { fault: ServiceFault::Timeout, .. })) | None => StoreEnd::GoesOn,
            Some(Ok(false) | Err(_)) => StoreEnd::Failed,
        };
        for result in &results {
            self.run.mix(result.as_ref().map_or(2, |found| u64::from(*found)));
            if let Err(error) = result {
                self.refused("a store of one block", error);
            }
        }
        asked.stored(end);
    }

    async fn load(&mut self) -> Result<(), Error> {
        let (blocks, keys) = self.draw(false);
        let segments = self.segments(blocks.len());
        (0..blocks.len()).for_each(|at| self.memory.clear(at));
        self.run.say(|| format!("caller {} loads {blocks:?} of space {}", self.number, self.space));
        let (asked, client) = (self.ask(&blocks), self.client.clone());
        match self.made(client.load_into(&keys, &segments)).await {
            Some(Ok(results)) => self.loaded(&blocks, &asked, results, |at, data| self.memory.holds(at, data)),
            other => return self.unanswered(other).await,
        }
        Ok(())
    }

    async fn store(&mut self) -> Result<(), Error> {
        let (blocks, keys) = self.draw(true);
        let segments = self.segments(blocks.len());
        let universe = &self.run.plan.spaces[self.space].universe;
        for (at, &block) in blocks.iter().enumerate() {
            self.memory.fill(at, &universe.block(block).payload);
        }
        let parent = universe.parent_key(blocks[0]);
        self.run.say(|| format!("caller {} stores {blocks:?} in space {}", self.number, self.space));
        let (asked, client) = (self.ask_to_store(&blocks), self.client.clone());
        match self.made(client.store_from(&keys, parent.as_ref(), &segments)).await {
            Some(Ok(results)) => self.stored(asked, results),
            other => {
                drop(asked);
                return self.unanswered(other).await;
            }
        }
        Ok(())
    }

    /// After a call without an answer the service may still use the memory.
    pub(super) async fn unanswered<T>(&mut self, ended: Option<Result<T, Error>>) -> Result<(), Error> {
        self.renew_memory().await;
        ended.map_or(Ok(()), |ended| ended.map(drop))
    }

    /// Takes the memory back, which nobody writes to afterwards, and makes another.
    pub(super) async fn renew_memory(&mut self) {
        let other = Memory::new(self.run.plan.spaces[self.space].block_bytes, self.memory.blocks());
        let mut memory = std::mem::replace(&mut self.memory, other);
        // Without a region its registration was not answered: it may be in use until the client closes.
        let Some(region) = memory.region.take() else { return };
        if let Err(error) = self.client.unregister(&region).await {
            self.refused("an unregister", &error);
        } else {
            memory.take_back();
            self.run.given_back.borrow_mut().push(memory);
        }
    }

    /// Takes memory back while blocks are loaded into it.
    async fn take_back_in_use(&mut self) -> Result<(), Error> {
        let (blocks, keys) = self.draw(false);
        let segments = self.segments(blocks.len());
        let (client, pause) = (self.client.clone(), Duration::from_millis(self.rng.below(8)));
        let asked = self.ask(&blocks);
        self.run.say(|| format!("caller {} loads {blocks:?} and takes the memory back", self.number));
        let load = async { client.load_into(&keys, &segments).await };
        let take_back = async {
            sleep(pause).await;
            self.renew_memory().await;
        };
        let (loaded, ()) = tokio::join!(load, take_back);
        // The region had left before the places were checked, or before the block began.
        let has_left = |error: &Error| matches!(error, Error::Service { fault: ServiceFault::Argument, .. });
        let results = match loaded {
            Err(error) if has_left(&error) => return Ok(()),
            loaded => loaded?,
        };
        for (at, result) in results.into_iter().enumerate() {
            match result {
                Ok(found) => asked.found(at, found),
                Err(error) if has_left(&error) => {}
                Err(error) => self.refused("a load of one block", &error),
            }
        }
        Ok(())
    }

    /// Moves blocks from and to memory that the service does not have.
    async fn copied(&mut self) -> Result<(), Error> {
        let (blocks, keys) = self.draw(true);
        let universe = &self.run.plan.spaces[self.space].universe;
        let bytes = self.run.plan.spaces[self.space].block_bytes;
        let mut memory: Vec<Vec<u8>> = blocks.iter().map(|&block| universe.block(block).payload.clone()).collect();
        let stores = self.rng.chance(0.5);
        if !stores {
            memory.iter_mut().for_each(|block| block.fill(0));
        }
        let starts: Vec<*mut u8> = memory.iter_mut().map(Vec::as_mut_ptr).collect();
        let lent: Vec<Segment> = starts.iter().map(|&ptr| Segment { ptr, len: bytes }).collect();
        let segments: Vec<_> = starts.iter().map(|&ptr| cut(ptr, bytes, &mut self.rng)).collect();
        let parent = universe.parent_key(blocks[0]);
        // SAFETY: the memory outlives the region, and nobody else uses it before the call has ended.
        let region = unsafe { self.client.lend(&lent) }?;
        self.run.say(|| format!("caller {} copies {blocks:?} of space {}, stores: {stores}", self.number, self.space));
        let (asked, call) = match stores {
            true => (self.ask_to_store(&blocks), self.made(region.store_from(&keys, parent.as_ref(), &segments)).await),
            false => (self.ask(&blocks), self.made(region.load_into(&keys, &segments)).await),
        };
        match call {
            None => {}
            Some(Err(error)) => return Err(error),
            Some(Ok(results)) if stores => self.stored(asked, results),
            Some(Ok(results)) => self.loaded(&blocks, &asked, results, |at, data| memory[at] == data),
        }
        Ok(())
    }

    async fn look_up(&mut self) -> Result<(), Error> {
        let chain = self.rng.chance(0.5);
        let (blocks, keys) = self.draw(chain);
        let (asked, client) = (self.ask(&blocks), self.client.clone());
        if chain {
            let Some(found) = self.made(client.match_len(&keys)).await else { return Ok(()) };
            let found = found?;
            self.run.mix(found as u64);
            (0..blocks.len().min(found + 1)).for_each(|at| asked.found(at, at < found));
        } else {
            let Some(found) = self.made(client.contains(&keys)).await else { return Ok(()) };
            for (at, found) in found?.into_iter().enumerate() {
                self.run.mix(u64::from(found));
                asked.found(at, found);
            }
        }
        Ok(())
    }

    async fn prefetch(&mut self) -> Result<(), Error> {
        let (_, keys) = self.draw(false);
        let client = self.client.clone();
        if let Some(started) = self.made(client.prefetch(&keys)).await
            && started? > keys.len()
        {
            self.run.fail("a prefetch started more movements than it has blocks");
        }
        Ok(())
    }

    async fn remove(&mut self) -> Result<(), Error> {
        let (blocks, keys) = self.draw(false);
        let (client, life) = (self.client.clone(), self.run.life.get());
        self.run.say(|| format!("caller {} removes block {} of space {}", self.number, blocks[0], self.space));
        let began = self.run.models[self.space].borrow_mut().remove_begins(blocks[0]);
        // Without an answer it may be made at any time, for as long as the service runs: it does not end.
        let Some(removed) = self.made(client.remove(&keys[0])).await else { return Ok(()) };
        if self.run.life.get() == life && removed.is_ok() {
            self.run.models[self.space].borrow_mut().remove_ends(began, RemoveEnd::Recorded);
        }
        removed.map(|found| self.run.mix(u64::from(found)))
    }

    async fn sync(&mut self) -> Result<(), Error> {
        self.run.say(|| format!("caller {} syncs space {}", self.number, self.space));
        let (client, life) = (self.client.clone(), self.run.life.get());
        let began = self.run.models[self.space].borrow().sync_begins();
        let synced = self.made(client.sync()).await;
        let mut model = self.run.models[self.space].borrow_mut();
        match &synced {
            _ if self.run.life.get() != life => {}
            Some(Ok(())) => model.sync_ends(began),
            // A reply that nobody waited for may have reported refused blocks: no later sync does.
            _ => model.sync_reports(),
        }
        synced.unwrap_or(Ok(()))
    }

    /// What changes no answer.
    async fn hint(&mut self) -> Result<(), Error> {
        let (_, keys) = self.draw(true);
        let client = self.client.clone();
        match pick(&mut self.rng, &[0, 1, 2]) {
            0 => self.made(client.touch(&keys)).await.unwrap_or(Ok(())),
            1 => self.made(client.keep(&keys, Duration::from_millis(50))).await.map_or(Ok(()), |kept| kept.map(drop)),
            _ => self.made(client.stats()).await.map_or(Ok(()), |stats| stats.map(drop)),
        }
    }
}

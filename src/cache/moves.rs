//! Loads and stores of blocks in callers' memory.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{Cache, Region};
use crate::{
    block::{BlockKey, Segment},
    error::{Error, Result},
    mover::{Command, Job, Reply},
    shield::shield,
};

impl Cache {
    /// Copies blocks into registered memory: one result per block, in order. `true`: it is there;
    /// `false`: it is resident nowhere, its segments are as they were. Where they are on the device, or
    /// [`Config::bypass_host`](crate::Config::bypass_host) is on, they may hold anything then: the block was on its way
    /// when it turned out to be damaged, or was removed.
    ///
    /// `segments[i]` are the places of block `i`, in the order of its bytes, one block long in all.
    ///
    /// # Errors
    /// [`Error::Argument`] before anything moved: lengths, a segment outside every region, or more than
    /// [`Config::movements_max`](crate::Config::movements_max) blocks. [`Error::Closed`]. A block's own error is in its
    /// result, [`Error::Closed`] too if the cache is closed meanwhile; its segments then hold anything, and stay in use
    /// until [`unregister`](Cache::unregister) resolves if the cache has ended by a panic of its own.
    ///
    /// # Cancel safety
    /// The loads go on: their segments stay in use until [`unregister`](Cache::unregister) resolves.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
    /// use kvhoist::{Memory, Segment};
    ///
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// # cache.store(&key, None, &[9; 4096]).await?;
    /// let mut pool = vec![7; 16 * 4096];
    /// // SAFETY: the pool lives until `unregister` has resolved, and nobody touches it while a block is on its way.
    /// let memory = unsafe { Memory::host(pool.as_mut_ptr(), pool.len()) };
    /// let region = cache.register(memory).await?;
    /// // The block's first half goes to the end of the pool, its second half to the beginning.
    /// let [end, begin] = [pool.len() - 2048, 0].map(|at| Segment { ptr: pool[at..].as_mut_ptr(), len: 2048 });
    /// let loaded = cache.load_into(&[key], &[vec![end, begin]]).await?;
    /// cache.unregister(&region).await?;
    /// assert!(matches!(loaded[..], [Ok(true)]) && pool[..2048] == [9; 2048]);
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub async fn load_into(&self, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<Vec<Result<bool>>> {
        self.load_jobs(self.jobs(keys, None, segments, None)?).await
    }

    /// As [`load_into`](Self::load_into), of blocks that others load at the same time: each is read once for all who
    /// wait for it, into host memory, where it is pinned until it is copied to the last of them.
    #[doc(hidden)]
    pub async fn load_shared(&self, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<Vec<Result<bool>>> {
        let mut jobs = self.jobs(keys, None, segments, None)?;
        jobs.iter_mut().for_each(|job| job.through_host = true);
        self.load_jobs(jobs).await
    }

    /// Stores blocks from registered memory: one result per block, in order; `true`: stored, as the
    /// write policy wants it.
    ///
    /// `keys` are one prefix chain: the parent of each is the one before it; `parent` is the first's.
    ///
    /// # Errors
    /// As [`load_into`](Cache::load_into) and [`store`](Cache::store).
    ///
    /// # Cancel safety
    /// The stores go on: their segments stay in use until [`unregister`](Cache::unregister) resolves.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
    /// use kvhoist::{Memory, Segment};
    ///
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// let mut pool = vec![7; 16 * 4096];
    /// // SAFETY: the pool lives until `unregister` has resolved, and nobody touches it while a block is on its way.
    /// let memory = unsafe { Memory::host(pool.as_mut_ptr(), pool.len()) };
    /// let region = cache.register(memory).await?;
    /// let place = Segment { ptr: pool.as_mut_ptr(), len: 4096 };
    /// let stored = cache.store_from(&[key], None, &[vec![place]]).await?;
    /// cache.unregister(&region).await?;
    /// assert!(matches!(stored[..], [Ok(true)]) && cache.contains(&key));
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub async fn store_from(
        &self,
        keys: &[BlockKey],
        parent: Option<&BlockKey>,
        segments: &[Vec<Segment>],
    ) -> Result<Vec<Result<bool>>> {
        self.store_jobs(self.jobs(keys, Some(parent), segments, None)?).await
    }

    pub(super) async fn load_jobs(&self, jobs: Vec<Job>) -> Result<Vec<Result<bool>>> {
        self.want_remote(&jobs);
        self.ask_jobs(|reply| self.inner.submitter.begin_load(jobs, reply)).await
    }

    /// Has what the remote tier alone has brought together.
    pub(super) fn want_remote(&self, jobs: &[Job]) {
        if self.shared().remote.is_some() {
            let keys: Vec<BlockKey> = jobs.iter().map(|job| job.key).collect();
            self.shared().want_remote(&keys, true);
        }
    }

    pub(super) async fn store_jobs(&self, jobs: Vec<Job>) -> Result<Vec<Result<bool>>> {
        let keys: Vec<BlockKey> = jobs.iter().map(|job| job.key).collect();
        let results = self.ask_jobs(|reply| self.begin_store(jobs, reply)).await?;
        self.shared().forget_reported(&keys, &results);
        Ok(results)
    }

    /// Begins a store; what is left of it to the reactor.
    pub(super) fn begin_store(&self, jobs: Vec<Job>, reply: Reply) -> Option<Command> {
        let shared = Arc::clone(self.shared());
        let reply: Reply = Box::new(move |results| {
            let failed = results.iter().filter(|result| result.is_err()).count();
            shared.metrics.stores_failed.add(failed as u64);
            reply(results);
        });
        self.inner.submitter.begin_store(jobs, reply)
    }

    /// Refuses more blocks than a call may have, and other numbers of keys and lists.
    pub(super) fn check_blocks(&self, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<()> {
        if keys.len() != segments.len() {
            return Err(Error::argument(
                "segments",
                format!("{} lists", segments.len()),
                format!("one for each of {} keys", keys.len()),
            ));
        }
        let jobs_max = self.config().limits.movements_max;
        if keys.len() > jobs_max as usize {
            let most = format!("at most {jobs_max} in one call (`movements_max`): call once for each part of them");
            return Err(Error::argument("keys", keys.len(), most));
        }
        Ok(())
    }

    /// `chain`: the first key's parent, if the keys are a chain to be stored. `lent`: memory that the segments may lie
    /// in beside the registered regions.
    pub(super) fn jobs(
        &self,
        keys: &[BlockKey],
        chain: Option<Option<&BlockKey>>,
        segments: &[Vec<Segment>],
        lent: Option<&Region>,
    ) -> Result<Vec<Job>> {
        self.check_blocks(keys, segments)?;
        let mut parent = chain.flatten().copied();
        let mut jobs = Vec::with_capacity(keys.len());
        let held = self.inner.regions.hold(segments, self.config().block_bytes, lent)?;
        for ((key, segments), regions) in keys.iter().zip(segments).zip(held) {
            let segments = segments.clone();
            jobs.push(Job { key: *key, parent, segments, regions, through_host: false, is_counted: false });
            if chain.is_some() {
                parent = Some(*key);
            }
        }
        Ok(jobs)
    }

    async fn ask_jobs(&self, command: impl FnOnce(Reply) -> Option<Command>) -> Result<Vec<Result<bool>>> {
        let (sender, receiver) = oneshot::channel();
        // A caller that is gone does not want the answer.
        let reply: Reply = Box::new(move |results| drop(sender.send(results)));
        if let Some(command) = command(reply) {
            // A command that is dropped is answered once the reads of its call have ended.
            match self.room().await {
                Ok(room) => self.send((command, room)),
                Err(Error::Closed) => drop(command),
                Err(error) => command.refuse(error),
            }
        }
        shield(receiver).await.map_err(|_| Error::Closed)
    }
}

//! Loads and stores: blocks whose memory the service has go straight, the others through a bounce buffer.

use std::{ops::Range, sync::Arc};

use futures_util::future::{Either, join_all};
use kvhoist::{BlockKey, Segment};

use super::{
    bounce::{Bounce, Direction, Taken},
    calls::{Client, unexpected},
    order::What,
    places::{Found, LentForCalls},
};
use crate::{
    error::{Error, Result, ServiceFault},
    protocol::{Blocks, KEYS_MAX, PLACES_MAX, Place, Reply, Request, Way},
};

impl Client {
    /// Copies blocks into registered memory: one result a block, in order, as [`Cache::load_into`](
    /// kvhoist::Cache::load_into) has it. `segments[i]` are the places of block `i`, one block long in all: at most
    /// 65,536 of them, unless the block goes through the bounce buffer.
    ///
    /// # Errors
    /// [`Error::Argument`] before anything moved; [`Error::Service`] if the service is away or did not answer in
    /// time; [`Error::Closed`]. A block's own error is in its result; its segments then hold anything.
    ///
    /// When the call has ended, the service uses none of its segments, whatever the results: blocks that are not begun
    /// at the [deadline](super::ClientOptions::deadline) fail with
    /// [`ServiceFault::Timeout`](kvhoist::ServiceFault::Timeout), and those in flight are waited for. A service
    /// that hangs for [longer](super::ClientOptions::give_up) keeps the segments: the call fails with
    /// [`ServiceFault::Abandoned`](kvhoist::ServiceFault::Abandoned).
    ///
    /// # Cancel safety
    /// The service begins no more of its blocks. Movements in flight continue, and their segments stay in use until
    /// [`unregister`](Client::unregister) resolves, or the connection is lost.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_stored(async |client, keys| {
    /// use std::sync::Arc;
    /// use kvhoist::{Memory, Segment, SharedMemory};
    ///
    /// let pool = Arc::new(SharedMemory::new(64 << 10)?);
    /// // SAFETY: nobody touches a block of the pool while it is on its way.
    /// let lent = unsafe { Memory::shared(pool.clone()) };
    /// let region = client.register(lent).await?;
    /// let places = [0, 1].map(|n| vec![Segment { ptr: pool.as_ptr().wrapping_add(n * 4096), len: 4096 }]);
    /// let loaded = client.load_into(keys, &places).await?;
    /// assert!(matches!(loaded[..], [Ok(true), Ok(false)]), "the second block is nowhere");
    /// let mut block = [0; 4096];
    /// pool.read(0, &mut block);
    /// assert_eq!(block, [7; 4096]);
    /// client.unregister(&region).await?;
    /// # Ok(()) });
    /// ```
    pub async fn load_into(&self, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<Vec<Result<bool>>> {
        self.moved(Way::Load, keys, segments, None).await
    }

    /// Stores blocks from registered memory: one result a block, in order; `true`: the disk has taken it.
    ///
    /// `keys` are one prefix chain: the parent of each is the one before it; `parent` is the first's. `segments` as of
    /// [`load_into`](Client::load_into), with as many places of a block at most.
    ///
    /// # Errors
    /// As [`load_into`](Client::load_into).
    ///
    /// # Cancel safety
    /// As [`load_into`](Client::load_into).
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_client(async |client| {
    /// use std::sync::Arc;
    /// use kvhoist::{Memory, Segment, SharedMemory};
    ///
    /// let keys = kvhoist::PrefixChain::new("model").extend_tokens(&[1, 2, 3, 4], 2)?;
    /// let pool = Arc::new(SharedMemory::new(64 << 10)?);
    /// // SAFETY: nobody touches a block of the pool while it is on its way.
    /// let lent = unsafe { Memory::shared(pool.clone()) };
    /// let region = client.register(lent).await?;
    /// pool.write(0, &[7; 8192]);
    /// let places = [0, 1].map(|n| vec![Segment { ptr: pool.as_ptr().wrapping_add(n * 4096), len: 4096 }]);
    /// let stored = client.store_from(&keys, None, &places).await?;
    /// assert!(matches!(stored[..], [Ok(true), Ok(true)]));
    /// client.unregister(&region).await?;
    /// # Ok(()) });
    /// ```
    pub async fn store_from(
        &self,
        keys: &[BlockKey],
        parent: Option<&BlockKey>,
        segments: &[Vec<Segment>],
    ) -> Result<Vec<Result<bool>>> {
        self.moved(Way::Store(parent.copied()), keys, segments, None).await
    }

    /// Moves blocks, as few requests as the limits let it.
    pub(super) async fn moved(
        &self,
        way: Way,
        keys: &[BlockKey],
        segments: &[Vec<Segment>],
        lent: Option<&LentForCalls>,
    ) -> Result<Vec<Result<bool>>> {
        let (found, _keeps) = self.places().find(keys.len(), segments, self.block_bytes(), lent)?;
        let bounce = if found.contains(&Found::Copied) { Some(self.bounce().await?) } else { None };
        let mut calls = Vec::new();
        for run in runs(&found, bounce.as_ref().map_or(1, |bounce| bounce.blocks_per_call())) {
            let way = way.of_part(keys, run.start);
            let keys = &keys[run.clone()];
            calls.push(match &bounce {
                Some(bounce) if found[run.start] == Found::Copied => {
                    Either::Left(self.move_copied(way, keys, &segments[run], bounce))
                }
                _ => Either::Right(self.move_straight(way, keys, &found[run])),
            });
        }
        let mut results = Vec::with_capacity(keys.len());
        for ended in join_all(calls).await {
            results.extend(ended?);
        }
        Ok(results)
    }

    /// Moves blocks between regions and the service.
    async fn move_straight(&self, way: Way, keys: &[BlockKey], found: &[Found]) -> Result<Vec<Result<bool>>> {
        let places = found.iter().map(Found::places).collect();
        let request = way.request(Blocks { keys: keys.to_vec(), places });
        let results = self.results(request, What::Move, keys.len(), None).await;
        if let Err(Error::Service { fault: ServiceFault::Abandoned, .. }) = &results {
            self.places().give_up(&found.iter().flat_map(Found::places).map(|place| place.region).collect());
        }
        results
    }

    /// Moves blocks between segments and slots of the bounce buffer, and these and the service.
    async fn move_copied(
        &self,
        way: Way,
        keys: &[BlockKey],
        segments: &[Vec<Segment>],
        bounce: &Bounce,
    ) -> Result<Vec<Result<bool>>> {
        let taken = Arc::new(self.in_time(bounce.take(&way, keys.len())).await?);
        let slots: Vec<_> = (0..keys.len()).map(|at| taken.slot(at, self.block_bytes())).collect();
        if matches!(way, Way::Store(_)) {
            for (at, segments) in segments.iter().enumerate() {
                // SAFETY: `find` has seen to it that the segments are one block long and lie in memory whose owner
                // keeps it mapped: registered, or lent for this call. The service does not know of the slots yet.
                unsafe { taken.copy(at, segments, Direction::In) };
            }
        }
        let places = slots.iter().map(|slot| self.places().place(slot).map(|place| [place]));
        let blocks = Blocks { keys: keys.to_vec(), places: places.collect::<Result<_>>()? };
        let request = way.request(blocks);
        let results = self.results(request, What::Plain, keys.len(), Some(Arc::clone(&taken))).await?;
        if matches!(way, Way::Load) {
            for (at, (segments, result)) in segments.iter().zip(&results).enumerate() {
                if matches!(result, Ok(true)) {
                    // SAFETY: `find` has seen to the segments, and this is a poll of the call that the memory was lent
                    // for. The service has replied.
                    unsafe { taken.copy(at, segments, Direction::Out) };
                }
            }
        }
        Ok(results)
    }

    /// One request that answers for each of its blocks. The service has `slots` until it has replied.
    async fn results(
        &self,
        request: Request,
        what: What,
        blocks: usize,
        slots: Option<Arc<Taken>>,
    ) -> Result<Vec<Result<bool>>> {
        match self.call(request, what, slots).await? {
            Reply::Results(results) if results.len() == blocks => {
                Ok(results.into_iter().map(|result| result.map_err(Error::from)).collect())
            }
            other => Err(unexpected(&other)),
        }
    }
}

/// Cuts a call's blocks into requests: each of one kind, and within the limits.
pub(super) fn runs(found: &[Found], copied_max: usize) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut places = 0;
    for (at, one) in found.iter().enumerate() {
        let more = one.places().len();
        let fits = runs.last().is_some_and(|run| {
            let copied = *one == Found::Copied;
            copied == (found[run.start] == Found::Copied)
                && run.len() < if copied { copied_max } else { KEYS_MAX }
                && places + more <= PLACES_MAX
        });
        match runs.last_mut() {
            Some(run) if fits => (run.end, places) = (at + 1, places + more),
            _ => {
                runs.push(at..at + 1);
                places = more;
            }
        }
    }
    runs
}

impl Found {
    pub(super) fn places(&self) -> &[Place] {
        match self {
            Found::Straight(places) => places,
            Found::Copied => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_blocks_of_one_kind_within_the_limits() {
        let place = Place { region: 1, len: 1, offset: 0 };
        let straight = |count| vec![Found::Straight(vec![place; 2]); count];
        let copied = |count| vec![Found::Copied; count];
        let found = [straight(3), copied(5), straight(KEYS_MAX + 1)].concat();
        assert_eq!(runs(&found, 2), [0..3, 3..5, 5..7, 7..8, 8..8 + KEYS_MAX, 8 + KEYS_MAX..9 + KEYS_MAX]);
        let found = vec![Found::Straight(vec![place; PLACES_MAX / 2]); 3];
        assert_eq!(runs(&found, 2), [0..2, 2..3]);
        assert!(runs(&[], 2).is_empty());
    }
}

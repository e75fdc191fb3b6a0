//! Copies of blocks from host memory to their callers, some together.

use std::{rc::Rc, sync::Arc};

use tokio::time::Instant;

use super::{
    Active, Mover,
    caller_memory::BEGUN_PER_TURN,
    load::ENDED_PER_LOCK,
    region::{Job, RegionMemory},
    results::CallResults,
};
use crate::{
    block::{CopyOp, Route},
    device::{CopyEngine, OwnedBatch, pair_segments},
    error::Result,
    io::Storage,
    state::Pin,
};

/// Bytes that are copied to a device together: 40 us on the bus. With more, many slots would become free at once, and
/// the disk would idle before.
const COPY_BYTES: usize = 2 << 20;

/// Copies of a block or of some together: one block may have more.
const COPIES_MAX: usize = 1024;

/// A block in host memory, pinned, and where it goes.
pub(super) type Arrived = (usize, Pin, Job);

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Has blocks of a call copied that have arrived in host memory. It is under way until then.
    pub(super) fn copy_arrived(
        self: &Rc<Self>,
        arrived: Vec<Arrived>,
        (results, active): (&Arc<CallResults>, &Rc<Active<S, C>>),
        began: Instant,
    ) {
        let (mut together, mut copies): (Vec<Arrived>, _) = (Vec::new(), 0);
        let most = (COPY_BYTES / self.shared.config.block_bytes).min(BEGUN_PER_TURN);
        let copy = |blocks| {
            let copied = Rc::clone(self).copy_together(blocks, began);
            let (results, active) = (Arc::clone(results), Rc::clone(active));
            self.spawn_part(async move {
                results.settle(copied.await);
                drop(active);
            });
        };
        for (number, pin, job) in arrived {
            let joins = |(_, last, other): &Arrived| {
                let is_device = job.memory() == RegionMemory::Device;
                is_device && Arc::ptr_eq(&job.regions, &other.regions) && pin.route() == last.route()
            };
            let is_full = together.len() >= most || copies + job.segments.len() > COPIES_MAX;
            if !together.is_empty() && (is_full || !together.last().is_some_and(joins)) {
                copy(std::mem::take(&mut together));
                copies = 0;
            }
            copies += job.segments.len();
            together.push((number, pin, job));
        }
        if !together.is_empty() {
            copy(together);
        }
    }

    /// Copies blocks from host memory to one caller's memory. Their results, with their numbers.
    async fn copy_together(self: Rc<Self>, blocks: Vec<Arrived>, began: Instant) -> Vec<(usize, Result<bool>)> {
        let numbers: Vec<usize> = blocks.iter().map(|(number, ..)| *number).collect();
        let copied = match self.copies_of(&blocks) {
            Ok(ops) => {
                let (_, pin, job) = &blocks[0];
                let (regions, is_resident) = (job.copy_regions(), pin.route() == Route::HostHit);
                let direction = self.direction(false, job.memory() == RegionMemory::Device);
                // SAFETY: as of `BlockMemory` of the pins and of `FilledMemory` of the jobs, which travel with it.
                let batch = unsafe { OwnedBatch::new(ops, direction, blocks) };
                // SAFETY: the owner of the regions keeps them mapped until `Cache::unregister` has resolved, which
                // tells the engine.
                let batch = unsafe { batch.within(regions) };
                self.copied(if is_resident { batch } else { batch.prompt() }).await
            }
            Err(error) => Ok((Err(error), blocks)),
        };
        let result = match copied {
            Ok((result, blocks)) => {
                self.unpin_loaded(blocks, result.is_ok().then_some(began));
                result
            }
            Err(lost) => Err(lost),
        };
        numbers.into_iter().map(|number| (number, result.clone().map(|()| true))).collect()
    }

    fn copies_of(&self, blocks: &[Arrived]) -> Result<Vec<CopyOp>> {
        let mut ops = Vec::with_capacity(blocks.len());
        for (_, pin, job) in blocks {
            ops.extend(pair_segments([self.shared.host_segment(pin.slot())], &job.segments)?);
        }
        Ok(ops)
    }

    /// Unpins blocks that were copied from host memory, and counts them if they are in place.
    pub(super) fn unpin_loaded(self: &Rc<Self>, blocks: Vec<Arrived>, began: Option<Instant>) {
        let (mut pins, jobs): (Vec<Pin>, Vec<Job>) = blocks.into_iter().map(|(_, pin, job)| (pin, job)).unzip();
        while !pins.is_empty() {
            let mut state = self.shared.lock();
            let some = pins.len().saturating_sub(ENDED_PER_LOCK);
            pins[some..].iter().for_each(|pin| state.index.prefetch(pin.id()));
            pins.drain(some..).for_each(|pin| pin.release(&mut state));
        }
        if let Some(began) = began {
            jobs.iter().for_each(|job| self.loaded(&job.key, began));
        }
    }
}

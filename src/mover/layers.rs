//! Loads that complete layer by layer.
//!
//! Blocks in host memory are copied layer by layer: the first layer of all of them, then the second. Blocks that must
//! be read first come whole, as each arrives. A layer is complete when what becomes of it is known of every block.

use std::{cell::RefCell, collections::VecDeque, rc::Rc, sync::Arc};

use futures_util::future::join;
use tokio::{sync::oneshot, task::JoinHandle, time::Instant};

use super::{
    Mover,
    busy_poll::expected,
    caller_memory::BEGUN_PER_TURN,
    load::{Numbered, PLANNED_PER_LOCK},
    load_copies::Arrived,
    progress::{LayerBoard, LayerJobs},
    region::{Job, RegionMemory},
    results::CallResults,
};
use crate::{
    block::{CopyOp, Direction},
    device::{CopyEngine, CopyRegion, OwnedBatch},
    error::Result,
    io::{Storage, yield_now},
};

/// Bytes of layers that are under way at once: enough to keep the bus busy, few enough that an early layer does not
/// share it with many later ones.
const IN_FLIGHT_BYTES: u64 = 8 << 20;

/// Layers of blocks that are noted in one turn of the reactor.
const MARKS_PER_TURN: usize = 4096;

/// Blocks that are in host memory, pinned, and where they go.
struct Resident {
    blocks: Vec<Arrived>,
    /// Of each of them: where in the block every segment begins. Blocks that are cut alike share it.
    starts: Vec<Arc<[usize]>>,
}

/// How long a block's segments are.
fn lengths(job: &Job) -> impl Iterator<Item = usize> {
    job.segments.iter().map(|segment| segment.len)
}

impl Resident {
    fn new(blocks: Vec<Arrived>) -> Self {
        let mut starts: Vec<Arc<[usize]>> = Vec::with_capacity(blocks.len());
        for (at, (.., job)) in blocks.iter().enumerate() {
            let before = starts.last().filter(|_| lengths(&blocks[at - 1].2).eq(lengths(job)));
            let of_job = || lengths(job).scan(0, |end, len| Some(std::mem::replace(end, *end + len))).collect();
            starts.push(before.cloned().unwrap_or_else(of_job));
        }
        Resident { starts, blocks }
    }

    /// What copy engines know of the memory that the blocks go to, each region once.
    fn regions(&self) -> Vec<CopyRegion> {
        let mut jobs: Vec<&Job> = self.blocks.iter().map(|(_, _, job)| job).collect();
        jobs.dedup_by(|job, before| Arc::ptr_eq(&job.regions, &before.regions));
        let mut regions = Vec::new();
        for region in jobs.into_iter().flat_map(Job::copy_regions) {
            if !regions.contains(&region) {
                regions.push(region);
            }
        }
        regions
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Copies blocks into their segments, and reports each layer when it is complete.
    pub(super) async fn load_layers(self: Rc<Self>, load: oneshot::Receiver<LayerJobs>) {
        let Some(LayerJobs { jobs, layers, board }) = expected(load).await else { return };
        let board = Rc::new(RefCell::new(board));
        let (resident, away) = self.pin_what_is_resident(jobs).await;
        let (numbers, away) = self.load_away(away);
        let copies = async {
            if !resident.is_empty() {
                self.copy_by_layer(Resident::new(resident), &layers, &board).await;
            }
        };
        // While the others are copied: a layer waits for what becomes of these, such as a miss.
        let reads = async {
            // Where they are lost, the board says so when it is dropped.
            let mut ended = numbers.into_iter().zip(away.await.unwrap_or_default());
            while ended.len() > 0 {
                for (number, outcome) in ended.by_ref().take((MARKS_PER_TURN / layers.len().max(1)).max(1)) {
                    board.borrow_mut().block_ended(number, outcome);
                }
                yield_now().await;
            }
        };
        join(copies, reads).await;
    }

    /// Pins the blocks that are in host memory, all of them before any other is read: its slot might be that of one of
    /// them. Returns the others, too.
    async fn pin_what_is_resident(&self, jobs: Vec<Job>) -> (Vec<Arrived>, Vec<Numbered>) {
        let (mut resident, mut away) = (Vec::with_capacity(jobs.len()), Vec::new());
        let mut jobs = jobs.into_iter().enumerate();
        while jobs.len() > 0 {
            for _ in 0..BEGUN_PER_TURN / PLANNED_PER_LOCK {
                let part: Vec<Numbered> = jobs.by_ref().take(PLANNED_PER_LOCK).collect();
                if part.is_empty() {
                    break;
                }
                let mut state = self.shared.lock();
                state.index.prefetch_keys(part.iter().map(|(_, job)| &job.key));
                for (number, job) in part {
                    match state.find_open(&job.key).and_then(|id| state.pin_resident(id)) {
                        Some(pin) => resident.push((number, pin, job)),
                        None => away.push((number, job)),
                    }
                }
            }
            if jobs.len() > 0 {
                yield_now().await;
            }
        }
        (resident, away)
    }

    /// Loads blocks that are not in host memory. They come whole, and a layer is not complete before all are there: one
    /// answer is enough. Returns their numbers with it.
    fn load_away(self: &Rc<Self>, away: Vec<Numbered>) -> (Vec<usize>, oneshot::Receiver<Vec<Result<bool>>>) {
        let (numbers, jobs): (Vec<usize>, Vec<Job>) = away.into_iter().unzip();
        let (sender, receiver) = oneshot::channel();
        if !jobs.is_empty() {
            let results = CallResults::new(jobs.len(), Box::new(|outcomes| drop(sender.send(outcomes))));
            self.load(jobs.into_iter().enumerate().collect(), Vec::new(), Arc::new(results));
        }
        (numbers, receiver)
    }

    async fn copy_by_layer(
        self: &Rc<Self>,
        resident: Resident,
        layers: &[Vec<usize>],
        board: &Rc<RefCell<LayerBoard>>,
    ) {
        let direction = self.direction(false, resident.blocks[0].2.memory() == RegionMemory::Device);
        let regions = resident.regions();
        // The processor copies one after the other in any case: side by side all layers would end late. A device's
        // stream has one layer behind the one that it copies, however long they are: it does not wait for the host.
        let (least, most) = match direction {
            Direction::HostToHost => (1, 0),
            _ => (2, IN_FLIGHT_BYTES),
        };
        let (resident, started) = (Arc::new(resident), Instant::now());
        let mut under_way: VecDeque<(u64, JoinHandle<Option<()>>)> = VecDeque::new();
        let mut bytes_under_way = 0;
        for (layer, segments) in layers.iter().enumerate() {
            let ops = self.ops_of(&resident, segments);
            // SAFETY: as of `BlockMemory` of the pins and of `FilledMemory` of the jobs, which travel with the batch.
            let batch = unsafe { OwnedBatch::new(ops, direction, Arc::clone(&resident)) };
            // SAFETY: their owner keeps them mapped until `Cache::unregister` has resolved, which tells the engine.
            let batch = unsafe { batch.within(regions.clone()) }.prompt();
            let bytes = batch.bytes();
            while under_way.len() >= least && bytes_under_way + bytes > most {
                let Some((ended, task)) = under_way.pop_front() else { break };
                drop(task.await);
                bytes_under_way -= ended;
            }
            let (this, board, copied) = (Rc::clone(self), Rc::clone(board), Arc::clone(&resident));
            let task = self.spawn_part(async move {
                let result = this.copied(batch).await.and_then(|(result, _)| result);
                board.borrow_mut().layer_ended(layer, copied.blocks.iter().map(|(at, ..)| *at), &result);
            });
            bytes_under_way += bytes;
            under_way.push_back((bytes, task));
            // Else the first layer would wait until the last one's copies are listed.
            yield_now().await;
        }
        for (_, task) in under_way {
            drop(task.await);
        }
        // Where the copies of a layer were lost, its memory stays with them.
        let Some(Resident { mut blocks, .. }) = Arc::into_inner(resident) else { return };
        while !blocks.is_empty() {
            let turn = blocks.split_off(blocks.len().saturating_sub(BEGUN_PER_TURN));
            let (there, lost): (Vec<_>, Vec<_>) = turn.into_iter().partition(|(at, ..)| board.borrow().is_there(*at));
            self.unpin_loaded(there, Some(started));
            self.unpin_loaded(lost, None);
            yield_now().await;
        }
    }

    /// The copies of the segments of these numbers, of all blocks.
    fn ops_of(&self, resident: &Resident, segments: &[usize]) -> Vec<CopyOp> {
        let mut ops = Vec::with_capacity(resident.blocks.len() * segments.len());
        for ((_, pin, job), starts) in resident.blocks.iter().zip(&resident.starts) {
            let block = self.shared.host_segment(pin.slot()).ptr;
            ops.extend(segments.iter().map(|&at| CopyOp {
                src: block.wrapping_add(starts[at]),
                dst: job.segments[at].ptr,
                len: job.segments[at].len,
            }));
        }
        ops
    }
}

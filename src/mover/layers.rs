//! Loads that complete layer by layer.
//!
//! Blocks in host memory are copied layer by layer: the first layer of all of them, then the second. Blocks that must
//! be read first come whole, as each arrives. A layer is complete when what becomes of it is known of every block.

use std::{cell::RefCell, collections::VecDeque, rc::Rc, sync::Arc};

use tokio::{task::JoinHandle, time::Instant};

use super::{
    Mover,
    caller_memory::in_turns,
    plan::{Read, Step},
    progress::{LayerBoard, LayerJobs},
    region::{Job, RegionMemory},
};
use crate::{
    block::{CopyOp, Direction},
    device::{CopyEngine, CopyRegion, OwnedBatch},
    io::Storage,
    state::Pin,
};

/// Bytes of layers that are under way at once: enough to keep the bus busy, few enough that an early layer does not
/// share it with many later ones.
const IN_FLIGHT_BYTES: u64 = 8 << 20;

/// Blocks that are in host memory, pinned, and where they go.
struct Resident {
    blocks: Vec<(usize, Pin, Job)>,
    /// Of each of them: where in the block every segment begins.
    starts: Vec<Vec<usize>>,
}

impl Resident {
    fn new(blocks: Vec<(usize, Pin, Job)>) -> Self {
        let starts_of = |(_, _, job): &(usize, Pin, Job)| {
            let starts = job.segments.iter().scan(0, |end, segment| {
                *end += segment.len;
                Some(*end - segment.len)
            });
            starts.collect()
        };
        Resident { starts: blocks.iter().map(starts_of).collect(), blocks }
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

    fn numbers(&self) -> impl Iterator<Item = usize> {
        self.blocks.iter().map(|(at, ..)| *at)
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Copies blocks into their segments, and reports each layer when it is complete.
    pub(super) async fn load_layers(self: Rc<Self>, load: LayerJobs) {
        let LayerJobs { jobs, layers, board } = load;
        let board = Rc::new(RefCell::new(board));
        let (mut resident, mut away) = (Vec::new(), Vec::new());
        let sort = |(at, job): (usize, Job)| match self.begin_load(&mut self.shared.lock(), &job, Read::Waits) {
            (_, Ok(Step::Pinned(pin))) => resident.push((at, pin, job)),
            begun => away.push((at, Box::new(job), begun)),
        };
        in_turns(jobs.into_iter().enumerate(), sort).await;
        // Reads go on while what is in host memory is copied.
        let load_away = |(at, job, begun)| {
            let (this, board) = (Rc::clone(&self), Rc::clone(&board));
            self.spawn_part(async move {
                let outcome = this.load_begun(job, begun).await;
                board.borrow_mut().block_ended(at, outcome);
            })
        };
        let away = in_turns(away, load_away).await;
        if !resident.is_empty() {
            self.copy_by_layer(Resident::new(resident), &layers, &board).await;
        }
        for task in away {
            // A task that was lost has marked nothing; the board reports its blocks as lost when it is dropped.
            drop(task.await);
        }
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
                board.borrow_mut().layer_ended(layer, copied.numbers(), &result);
            });
            bytes_under_way += bytes;
            under_way.push_back((bytes, task));
            // Else the first layer would wait until the last one's copies are listed.
            crate::io::yield_now().await;
        }
        for (_, task) in under_way {
            drop(task.await);
        }
        for (at, _, job) in &resident.blocks {
            if board.borrow().is_there(*at) {
                self.loaded(&job.key, started);
            }
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

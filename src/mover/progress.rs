//! How far a load that completes layer by layer has come.

use std::{
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use super::region::Job;
use crate::{
    device::cuda::Gates,
    error::{Error, Result},
};

/// The result of a layer of a load: the number of leading blocks whose bytes of this layer are in place, and the error
/// of the next block, if it has one.
type LayerResult = (usize, Option<Error>);

/// The caller's side of a load.
pub(crate) struct LayerProgress {
    state: Mutex<ProgressState>,
    changed: Notify,
}

struct ProgressState {
    layers: Vec<Option<LayerResult>>,
    blocks: Option<Vec<Result<bool>>>,
    /// Streams wait, or may.
    gates: Option<Arc<Gates>>,
    count: usize,
}

impl LayerProgress {
    /// Of a load of `count` blocks.
    pub(crate) fn new(layers: usize, count: usize) -> Arc<Self> {
        let state = ProgressState { layers: vec![None; layers], blocks: None, gates: None, count };
        Arc::new(LayerProgress { state: Mutex::new(state), changed: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, ProgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The result of a layer, once it is known.
    pub(crate) fn layer(&self, layer: usize) -> Option<LayerResult> {
        self.lock().layers[layer].clone()
    }

    /// The result of every block, once all are known.
    pub(crate) fn blocks(&self) -> Option<Vec<Result<bool>>> {
        self.lock().blocks.clone()
    }

    /// Waits for what `look` looks for.
    pub(crate) async fn wait<T>(&self, look: impl Fn(&Self) -> Option<T>) -> T {
        loop {
            let mut changed = pin!(self.changed.notified());
            // Registered before the look, so that no change between the two is lost.
            changed.as_mut().enable();
            if let Some(found) = look(self) {
                return found;
            }
            changed.await;
        }
    }

    /// The gates of this load, one a layer; `make` takes them where there are none yet.
    pub(crate) fn gates(&self, make: impl FnOnce(usize) -> Result<Gates>) -> Result<Arc<Gates>> {
        let layers = {
            let state = self.lock();
            if let Some(gates) = &state.gates {
                return Ok(Arc::clone(gates));
            }
            state.layers.len()
        };
        // Not under the lock: the reactor takes it, and must not wait for the driver.
        let taken = Arc::new(make(layers)?);
        let mut state = self.lock();
        let gates = match &state.gates {
            Some(gates) => Arc::clone(gates),
            None => Arc::clone(state.gates.insert(taken)),
        };
        // Those that were complete before there were gates; the others are opened when they are.
        for (layer, done) in state.layers.iter().enumerate() {
            if let Some(done) = done {
                gates.open(layer, poison(done.0, state.count));
            }
        }
        Ok(gates)
    }

    pub(super) fn complete(&self, layer: usize, done: LayerResult) {
        let mut state = self.lock();
        if let Some(gates) = &state.gates {
            gates.open(layer, poison(done.0, state.count));
        }
        state.layers[layer] = Some(done);
        drop(state);
        self.changed.notify_waiters();
    }

    pub(super) fn end(&self, blocks: Vec<Result<bool>>) {
        self.lock().blocks = Some(blocks);
        self.changed.notify_waiters();
    }
}

/// The value that a kernel finds: 0, or one more than the leading blocks that are there.
fn poison(leading: usize, count: usize) -> u32 {
    if leading == count { 0 } else { u32::try_from(leading).map_or(u32::MAX, |leading| leading + 1) }
}

/// The reactor's side of a load: what is known of which layer of which block.
///
/// Its drop completes the load: what is not known by then counts as lost.
pub(crate) struct LayerBoard {
    progress: Arc<LayerProgress>,
    blocks: Vec<Option<Result<bool>>>,
    /// By layer, then by block.
    there: Vec<Vec<bool>>,
    /// Of each layer, the first blocks that are there.
    leading: Vec<usize>,
    /// Blocks of which a layer's bytes are not known yet.
    left: Vec<usize>,
}

impl LayerBoard {
    pub(crate) fn new(progress: Arc<LayerProgress>) -> Self {
        let (layers, blocks) = {
            let state = progress.lock();
            (state.layers.len(), state.count)
        };
        let board = LayerBoard {
            progress,
            blocks: vec![None; blocks],
            there: vec![vec![false; blocks]; layers],
            leading: vec![0; layers],
            left: vec![blocks; layers],
        };
        if blocks == 0 {
            (0..layers).for_each(|layer| board.complete(layer));
        }
        board
    }

    /// All layers of a block share its end.
    pub(super) fn block_ended(&mut self, block: usize, outcome: Result<bool>) {
        let is_there = matches!(outcome, Ok(true));
        self.blocks[block] = Some(outcome);
        for layer in 0..self.left.len() {
            self.mark(layer, block, is_there);
        }
    }

    /// A layer of blocks that were copied together.
    pub(super) fn layer_ended(&mut self, layer: usize, blocks: impl Iterator<Item = usize>, result: &Result<()>) {
        for block in blocks {
            // The first error of a block is the one that is reported.
            match (&self.blocks[block], result) {
                (Some(Err(_)), _) => {}
                (_, Ok(())) => self.blocks[block] = Some(Ok(true)),
                (_, Err(error)) => self.blocks[block] = Some(Err(error.clone())),
            }
            self.mark(layer, block, result.is_ok());
        }
    }

    /// True where all that is known of a block is that it is in place.
    pub(super) fn is_there(&self, block: usize) -> bool {
        matches!(self.blocks[block], Some(Ok(true)))
    }

    fn mark(&mut self, layer: usize, block: usize, is_there: bool) {
        self.there[layer][block] = is_there;
        // Here and not when the layer is complete: the last block may complete all layers at once.
        let leading = &mut self.leading[layer];
        *leading += self.there[layer][*leading..].iter().take_while(|&&is_there| is_there).count();
        self.left[layer] -= 1;
        if self.left[layer] == 0 {
            self.complete(layer);
        }
    }

    fn complete(&self, layer: usize) {
        let leading = self.leading[layer];
        let error = match self.blocks.get(leading) {
            Some(Some(Err(error))) => Some(error.clone()),
            _ => None,
        };
        self.progress.complete(layer, (leading, error));
    }
}

impl Drop for LayerBoard {
    fn drop(&mut self) {
        // A block of which only some layers are known to be there is not there.
        let is_cut = self.left.iter().any(|&left| left > 0);
        for (block, outcome) in self.blocks.iter_mut().enumerate() {
            let is_whole = || !is_cut || self.there.iter().all(|layer| layer[block]);
            if outcome.is_none() || (matches!(outcome, Some(Ok(true))) && !is_whole()) {
                *outcome = Some(Err(Error::Closed));
            }
        }
        for layer in 0..self.left.len() {
            if self.left[layer] > 0 {
                self.complete(layer);
            }
        }
        let blocks = std::mem::take(&mut self.blocks);
        self.progress.end(blocks.into_iter().map(|outcome| outcome.expect("just seen to")).collect());
    }
}

/// A load that completes layer by layer.
pub(crate) struct LayerJobs {
    pub(crate) jobs: Vec<Job>,
    /// For each layer the numbers of its segments.
    pub(crate) layers: Vec<Vec<usize>>,
    pub(crate) board: LayerBoard,
}

impl LayerJobs {
    /// Ends it before it has begun.
    pub(super) fn refuse(mut self, error: &Error) {
        // Its layers are complete when the board is dropped.
        self.board.blocks.fill_with(|| Some(Err(error.clone())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy_error() -> Error {
        Error::copy("test", "on purpose")
    }

    #[test]
    fn a_layer_is_complete_when_every_block_is_known() {
        let progress = LayerProgress::new(2, 3);
        let mut board = LayerBoard::new(Arc::clone(&progress));
        board.layer_ended(0, [0, 2].into_iter(), &Ok(()));
        assert!(progress.layer(0).is_none(), "block 1 is not known");
        board.block_ended(1, Ok(true));
        assert_eq!(progress.layer(0).expect("complete").0, 3);
        board.layer_ended(1, [0, 2].into_iter(), &Err(copy_error()));
        let done = progress.layer(1).expect("complete");
        assert!(matches!(done, (0, Some(Error::Copy { .. }))), "{done:?}");
        assert!(progress.blocks().is_none(), "not before the end");
        drop(board);
        let blocks = progress.blocks().expect("the end");
        assert!(matches!(blocks[..], [Err(Error::Copy { .. }), Ok(true), Err(Error::Copy { .. })]), "{blocks:?}");
    }

    #[test]
    fn what_is_lost_is_said_to_be() {
        let progress = LayerProgress::new(3, 2);
        let mut board = LayerBoard::new(Arc::clone(&progress));
        board.layer_ended(0, 0..2, &Ok(()));
        board.layer_ended(1, 0..1, &Ok(()));
        drop(board);
        let leading = [2, 1, 0];
        for (layer, leading) in leading.into_iter().enumerate() {
            let (found, error) = progress.layer(layer).expect("complete");
            assert_eq!((found, error.is_some()), (leading, leading < 2), "layer {layer}: {error:?}");
        }
        let blocks = progress.blocks().expect("the end");
        assert!(matches!(blocks[..], [Err(Error::Closed), Err(Error::Closed)]), "{blocks:?}");
    }

    #[test]
    fn a_load_that_is_refused_ends() {
        let progress = LayerProgress::new(2, 0);
        assert_eq!(LayerBoard::new(Arc::clone(&progress)).left, [0, 0]);
        assert!(matches!(progress.layer(1), Some((0, None))), "of no blocks");
        let progress = LayerProgress::new(1, 1);
        let board = LayerBoard::new(Arc::clone(&progress));
        LayerJobs { jobs: Vec::new(), layers: vec![vec![]], board }.refuse(&copy_error());
        assert!(matches!(progress.layer(0), Some((0, Some(Error::Copy { .. })))));
        assert!(matches!(progress.blocks().expect("the end")[..], [Err(Error::Copy { .. })]));
    }
}

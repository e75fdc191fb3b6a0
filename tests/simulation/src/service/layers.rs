//! Loads of clients that complete layer by layer.

use std::{ops::Range, time::Duration};

use kvhoist::{BlockKey, Error};
use tokio::time::sleep;

use super::calls::{Caller, make};
use crate::{cancel::Cancel, plan::Call, sim::Rng};

/// Layers of a load, at most.
const LAYERS_MAX: u64 = 4;

/// How all blocks of a load are cut.
struct Cut {
    /// Where in a block each segment begins.
    starts: Vec<usize>,
    layer_of: Vec<usize>,
    block_bytes: usize,
}

impl Cut {
    /// Each layer has one segment at least; their order is any.
    fn draw(rng: &mut Rng, block_bytes: usize) -> Self {
        let layers = rng.between(1, LAYERS_MAX) as usize;
        let segments = layers + rng.below(3) as usize;
        let mut starts: Vec<usize> = (1..segments).map(|_| rng.below(block_bytes as u64) as usize).collect();
        starts.push(0);
        starts.sort_unstable();
        let mut layer_of: Vec<usize> = (0..layers).collect();
        layer_of.extend((layers..segments).map(|_| rng.below(layers as u64) as usize));
        for at in 1..layer_of.len() {
            layer_of.swap(at, rng.below(at as u64 + 1) as usize);
        }
        Cut { starts, layer_of, block_bytes }
    }

    /// The ranges of a block that a layer has.
    fn layer(&self, layer: usize) -> impl Iterator<Item = Range<usize>> {
        let ends = self.starts[1..].iter().copied().chain([self.block_bytes]);
        let ranges = self.starts.iter().zip(ends).zip(&self.layer_of);
        ranges.filter(move |(_, of)| **of == layer).map(|((&from, to), _)| from..to)
    }
}

impl Caller {
    /// A load layer by layer, or a call about pins.
    pub(super) async fn by_layer(&mut self) {
        let call = if self.rng.chance(0.7) { Call::Load } else { Call::Hint };
        self.run.report.borrow_mut().calls[call as usize] += 1;
        self.run.mix(self.number << 16 | 0x100 | call as u64);
        let result = match call {
            Call::Load => self.load_by_layer().await,
            _ => self.pin().await,
        };
        if let Err(error) = result {
            self.refused("a load layer by layer, or a pin", &error);
            sleep(Duration::from_millis(self.rng.below(30))).await;
        }
    }

    async fn load_by_layer(&mut self) -> Result<(), Error> {
        let (blocks, keys) = self.draw(false);
        let cut = Cut::draw(&mut self.rng, self.run.plan.spaces[self.space].block_bytes);
        (0..blocks.len()).for_each(|at| self.memory.clear(at));
        self.run.say(|| format!("caller {} loads {blocks:?} by layers {:?}", self.number, cut.layer_of));
        let asked = self.ask(&blocks);
        let pause = self.rng.chance(0.2).then(|| Duration::from_millis(self.rng.below(20)));
        let (cancel, rng) = (Cancel::draw(&mut self.rng, self.run.plan.cancel), self.rng.fork());
        let ended = make(&self.run, self.layers(&blocks, &keys, &cut, pause), cancel, rng).await;
        match ended {
            Some(Ok(results)) => self.loaded(&blocks, &asked, results, |at, data| self.memory.holds(at, data)),
            other => return self.unanswered(other).await,
        }
        Ok(())
    }

    /// What is told of every layer holds at that moment.
    async fn layers(
        &self,
        blocks: &[usize],
        keys: &[BlockKey],
        cut: &Cut,
        pause: Option<Duration>,
    ) -> Result<Vec<Result<bool, Error>>, Error> {
        let segments: Vec<_> = (0..blocks.len()).map(|at| self.memory.cut_at(at, &cut.starts)).collect();
        let load = self.client.load_layers(keys, &segments, &cut.layer_of)?;
        if let Some(pause) = pause {
            sleep(pause).await;
        }
        for layer in 0..load.layers() {
            let (leading, error) = load.layer(layer).await?;
            self.run.mix(leading as u64);
            self.run.report.borrow_mut().layers_told += u64::from(leading > 0);
            if leading > blocks.len() || (leading == blocks.len() && error.is_some()) {
                self.run.fail(format!("{leading} of {} blocks, and {error:?}", blocks.len()));
            }
            for (at, &block) in blocks.iter().enumerate().take(leading) {
                let holds = |range| self.memory.holds_part(at, range, self.payload(block));
                if !cut.layer(layer).all(holds) {
                    self.run.fail(format!("layer {layer} of block {block} is said to be in place and is not"));
                }
            }
        }
        Ok(load.blocks().await)
    }
}

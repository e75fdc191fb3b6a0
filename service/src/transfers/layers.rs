//! Loads that complete layer by layer.

use std::rc::Rc;

use kvhoist::Segment;

use super::{Cancel, ClientTransfers, Moving, PLACES_PER_TURN, canceled, told};
use crate::protocol::{BlockResult, Blocks, Failure, Reply};

impl ClientTransfers {
    /// Loads blocks layer by layer, and tells what each layer came to, in order; a result for each block at the end.
    ///
    /// All blocks are under way at once, in one call of the cache: how much of them is copied at a time is its part.
    ///
    /// # Errors
    /// Before anything moves, for places and layers that are wrong.
    ///
    /// # Cancel safety
    /// The load goes on, and holds its regions until it ends.
    pub(crate) async fn load_layers(
        self: Rc<Self>,
        layer_of: Vec<u16>,
        blocks: Blocks,
        cancel: Cancel,
        tell: impl Fn(Reply),
    ) -> Result<Vec<BlockResult>, Failure> {
        self.check(&blocks).await?;
        let count = blocks.keys.len();
        let _one_of_few = tokio::select! { biased;
            () = cancel.canceled() => return Ok(vec![Err(canceled()); count]),
            permit = self.layered.acquire() => permit.expect("nobody closes it"),
        };
        let layer_of: Vec<usize> = layer_of.into_iter().map(usize::from).collect();
        let segments = self.segments_in_turns(&blocks).await?;
        let guarded = self.regions.guarded(blocks.places.of(0..count));
        let _moving = Moving::new(&self.moving, count as u64);
        // Polled before other tasks of this thread, and the call holds the segments' regions from its first poll on.
        let load = self.cache.load_layers(&blocks.keys, &segments, &layer_of).await;
        let load = load.map_err(|error| Failure::from(&error))?;
        for layer in 0..load.layers() {
            let (leading, error) = load.layer(layer).await.map_err(|error| Failure::from(&error))?;
            tell(Reply::Layer { layer: layer as u32, leading: leading as u32, failed: error.is_some() });
        }
        let results = load.blocks().await;
        match self.settle(guarded, &[]).await {
            Some(failure) => Ok(vec![Err(failure); count]),
            None => Ok(results.into_iter().map(told).collect()),
        }
    }

    /// Where all blocks lie in the service's memory. Good until the next await only, as of
    /// [`Regions::segments`](crate::regions::Regions::segments).
    async fn segments_in_turns(&self, blocks: &Blocks) -> Result<Vec<Vec<Segment>>, Failure> {
        loop {
            let departures = self.regions.departures();
            let mut segments = Vec::with_capacity(blocks.keys.len());
            for block in 0..blocks.keys.len() {
                self.turn(blocks.places.count(block..block + 1).min(PLACES_PER_TURN)).await;
                segments.push(self.regions.segments(blocks.places.of(block..block + 1))?);
            }
            // Else some region has left. One of this load is refused the next time.
            if self.regions.departures() == departures {
                return Ok(segments);
            }
        }
    }
}

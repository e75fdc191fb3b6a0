//! Loads that complete layer by layer.

use std::{collections::BTreeMap, ops::Range, rc::Rc};

use kvhoist::Segment;

use super::{Cancel, ClientTransfers, Lent, Moving, PLACES_PER_TURN, canceled, told};
use crate::{
    error::ServiceFault,
    protocol::{BlockPlaces, BlockResult, Blocks, Failure, Place, Reply},
};

/// Places that are looked up already and shifted before other connections have their turn: some 5 us.
const SHIFTED_PER_TURN: usize = 2048;

/// Where blocks lie, and the guarded ones among their regions.
pub(super) type Found = (Vec<Vec<Segment>>, BTreeMap<u32, Rc<Lent>>);

impl ClientTransfers {
    /// Loads blocks layer by layer, and tells what each layer came to, in order; a result for each block at the end.
    ///
    /// As many blocks as the cache takes in a call are under way at once: how much of them is copied at a time is its
    /// part. The layers of more blocks complete with the last ones.
    ///
    /// # Errors
    /// Before anything moves, for places and layers that are wrong.
    ///
    /// # Cancel safety
    /// What is under way goes on, and holds its regions until it ends.
    pub(crate) async fn load_layers(
        self: Rc<Self>,
        layer_of: Vec<u16>,
        blocks: Blocks,
        cancel: Cancel,
        tell: impl Fn(Reply),
    ) -> Result<Vec<BlockResult>, Failure> {
        let count = blocks.keys.len();
        let _one_of_few = tokio::select! { biased;
            () = cancel.canceled() => return Ok(vec![Err(canceled()); count]),
            permit = self.layered.acquire() => permit.expect("nobody closes it"),
        };
        let layer_of: Vec<usize> = layer_of.into_iter().map(usize::from).collect();
        if count > self.movements_max {
            // What is wrong with any part is found before the first one moves.
            self.segments_in_turns(&blocks).await?;
        }
        // Of each layer the leading blocks in place, and whether the next one failed.
        let (mut layers, mut results) = (Vec::new(), Vec::with_capacity(count));
        for part in blocks.parts(self.movements_max) {
            let first = results.len();
            let is_last = first + part.keys.len() == count;
            let add = |layer: usize, leading: usize, failed: bool| {
                if layer == layers.len() {
                    layers.push((0, false));
                }
                if layers[layer].0 == first {
                    layers[layer] = (first + leading, failed);
                }
                let (leading, failed) = layers[layer];
                if is_last {
                    tell(Reply::Layer { layer: layer as u32, leading: leading as u32, failed });
                }
            };
            let ended = if first > 0 && cancel.is_canceled() {
                Err(canceled())
            } else {
                self.load_part(&part, &layer_of, add).await
            };
            match ended {
                Ok(ended) => results.extend(ended),
                Err(failure) if first == 0 => return Err(failure),
                Err(failure) => {
                    results.resize(count, Err(failure));
                    break;
                }
            }
        }
        Ok(results)
    }

    /// One call of the cache; `add` gets what each layer of it came to, in order: the leading blocks in place, and
    /// whether the next one failed.
    async fn load_part(
        &self,
        part: &Blocks,
        layer_of: &[usize],
        mut add: impl FnMut(usize, usize, bool),
    ) -> Result<Vec<BlockResult>, Failure> {
        let count = part.keys.len();
        let (segments, guarded) = self.segments_in_turns(part).await?;
        let _moving = Moving::new(&self.moving, count as u64);
        // Polled before other tasks of this thread, and the call holds the segments' regions from its first poll on.
        let ended = async {
            let load = self.cache.load_layers(&part.keys, &segments, layer_of).await?;
            for layer in 0..load.layers() {
                let (leading, error) = load.layer(layer).await?;
                add(layer, leading, error.is_some());
            }
            Ok(load.blocks().await)
        };
        let ended: Result<_, kvhoist::Error> = ended.await;
        match self.settle(guarded).await {
            Some(failure) => Ok(vec![Err(failure); count]),
            None => Ok(ended.map_err(|error| Failure::from(&error))?.into_iter().map(told).collect()),
        }
    }

    /// Where all of these blocks lie.
    async fn segments_in_turns(&self, blocks: &Blocks) -> Result<Found, Failure> {
        self.unchanged(async || match blocks.places.as_shifted() {
            Some((places, shifts)) => self.shifted(places, shifts).await,
            None => self.listed(&blocks.places, 0..blocks.keys.len()).await,
        })
        .await
    }

    /// What `find` finds while no region leaves: where blocks lie in the service's memory, each a block long, and the
    /// regions that are guarded. Good until the next await only, as of
    /// [`Regions::segments`](crate::regions::Regions::segments).
    pub(super) async fn unchanged(&self, find: impl AsyncFn() -> Result<Found, Failure>) -> Result<Found, Failure> {
        loop {
            let departures = self.regions.departures();
            let found = find().await?;
            // Else some region of the connection has left. A block that lies there is refused the next time.
            if self.regions.departures() == departures {
                return Ok(found);
            }
        }
    }

    /// Blocks whose places are looked up one by one, in turns.
    pub(super) async fn listed(&self, places: &BlockPlaces, blocks: Range<usize>) -> Result<Found, Failure> {
        let (mut segments, mut guarded) = (Vec::with_capacity(blocks.len()), BTreeMap::new());
        for block in blocks {
            let (count, mut left) = (places.count(block..block + 1), places.of(block..block + 1));
            let mut of_block = Vec::with_capacity(count);
            while of_block.len() < count {
                let turn = (count - of_block.len()).min(PLACES_PER_TURN);
                self.turn(turn).await;
                let some: Vec<Place> = left.by_ref().take(turn).collect();
                of_block.extend(self.regions.segments(some.iter().copied())?);
                guarded.extend(self.regions.guarded(some.into_iter()));
            }
            self.check_length(&of_block)?;
            segments.push(of_block);
        }
        Ok((segments, guarded))
    }

    /// Blocks that lie alike, in the same regions: their places are looked up once.
    async fn shifted(&self, mut places: impl Iterator<Item = Place>, shifts: &[u64]) -> Result<Found, Failure> {
        let signed = || shifts.iter().map(|shift| shift.cast_signed());
        let (Some(least), Some(most)) = (signed().min(), signed().max()) else { return Ok(Found::default()) };
        if most.checked_sub(least).is_none() {
            let text = format!("shifts: found {least} to {most}, expected less than 2^63 bytes between them");
            return Err(Failure::new(ServiceFault::Argument, text));
        }
        let (mut unshifted, mut guarded) = (Vec::new(), BTreeMap::new());
        loop {
            self.turn(PLACES_PER_TURN).await;
            let some: Vec<Place> = places.by_ref().take(PLACES_PER_TURN).collect();
            if some.is_empty() {
                break;
            }
            guarded.extend(self.regions.guarded(some.iter().copied()));
            for place in some {
                unshifted.push(self.regions.unshifted(place, least..=most)?);
            }
        }
        self.check_length(&unshifted)?;
        let mut segments = Vec::with_capacity(shifts.len());
        let mut since = 0;
        for shift in shifts {
            since += unshifted.len();
            if since > SHIFTED_PER_TURN {
                self.turn(PLACES_PER_TURN).await;
                since = 0;
            }
            let shifted = |at: &Segment| Segment { ptr: at.ptr.wrapping_add(*shift as usize), len: at.len };
            segments.push(unshifted.iter().map(shifted).collect());
        }
        Ok((segments, guarded))
    }

    fn check_length(&self, segments: &[Segment]) -> Result<(), Failure> {
        let bytes = segments.iter().map(|segment| segment.len as u64).sum();
        self.check_block(bytes)
    }
}

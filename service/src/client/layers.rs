//! Loads that complete layer by layer.

use std::{collections::BTreeSet, ops::Range, sync::Arc};

use kvhoist::{BlockKey, LayerLoad, Segment, internals::service::LayerReports};

use super::{
    calls::{Client, unexpected},
    moves::runs,
    order::{Answer, What},
    places::{Found, Places},
};
use crate::{
    error::{Error, Result, ServiceFault},
    protocol::{BlockPlaces, Blocks, KEYS_MAX, PLACES_MAX, Place, Reply, Request},
};

/// One request of a load: the part of its blocks that one frame has. Its end, also its drop, ends the part.
pub(super) struct LayersPart {
    report: PartReport,
    /// Whose regions are given up with it.
    places: Arc<Places>,
    regions: BTreeSet<u32>,
}

/// A part of a load, and its report.
#[derive(Clone)]
pub(super) struct PartReport(Arc<LayerReports>, usize);

impl PartReport {
    /// What a layer came to.
    pub(super) fn layer(&self, layer: u32, leading: u32, failed: bool) {
        self.0.layer(self.1, layer as usize, leading as usize, failed);
    }
}

impl LayersPart {
    pub(super) fn report(&self) -> PartReport {
        self.report.clone()
    }

    /// The end of its call.
    pub(super) fn end(&self, result: Result<Reply>) {
        if let Err(Error::Service { fault: ServiceFault::Abandoned, .. }) = &result {
            self.places.give_up(&self.regions);
        }
        let results = match result {
            Ok(Reply::Results(results)) => Ok(results.into_iter().map(|result| result.map_err(Error::from)).collect()),
            Ok(other) => Err(unexpected(&other)),
            Err(error) => Err(error),
        };
        self.report.0.end(self.report.1, results);
    }
}

impl Drop for LayersPart {
    fn drop(&mut self) {
        self.report.0.end(self.report.1, Err(Error::Closed));
    }
}

impl Client {
    /// As [`Cache::load_layers`](kvhoist::Cache::load_layers), into registered memory that the service has. Returns
    /// when the requests are sent, or wait for others to be sent.
    ///
    /// Every layer completes, whatever becomes of the service: where it dies, when the connection has ended, with no
    /// more blocks in place than it had reported. A service that hangs is waited for, until the memory is given up
    /// ([`give_up`](super::ClientOptions::give_up)).
    ///
    /// # Errors
    /// As [`Cache::load_layers`](kvhoist::Cache::load_layers). [`Error::Argument`] for memory that the service does not
    /// have. [`Error::Service`] while it is away. [`Error::Closed`].
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_device_client(async |client| {
    /// use std::sync::Arc;
    /// use kvhoist::{BlockKey, Memory, Segment, SharedMemory};
    ///
    /// let pool = Arc::new(SharedMemory::new(4096)?);
    /// // SAFETY: nobody touches a block of the pool while it is on its way.
    /// let region = client.register_device(unsafe { Memory::shared(pool.clone()) }).await?;
    /// // A model of two layers: half of the block is the first one's.
    /// let halves = [0, 2048].map(|at| Segment { ptr: pool.as_ptr().wrapping_add(at), len: 2048 });
    /// let load = client.load_layers(&[BlockKey::new([1; 32])], &[halves.to_vec()], &[0, 1])?;
    /// let (leading, _) = load.layer(0).await?;
    /// assert_eq!(leading, 0, "the block is nowhere");
    /// assert!(matches!(load.blocks().await[..], [Ok(false)]));
    /// client.unregister(&region).await?;
    /// # Ok(()) });
    /// ```
    pub fn load_layers(&self, keys: &[BlockKey], segments: &[Vec<Segment>], layer_of: &[usize]) -> Result<LayerLoad> {
        if let Some(wrong) = segments.iter().find(|list| list.len() != layer_of.len()) {
            let expected = format!("one for each of the {} numbers of layers", layer_of.len());
            return Err(Error::argument("segments", format!("{} of a block", wrong.len()), expected));
        }
        let parts = self.parts(keys, segments)?;
        let counts: Vec<usize> = parts.iter().map(|(blocks, _)| blocks.keys.len()).collect();
        let (load, reports) = LayerLoad::elsewhere(layer_of, &counts, self.inner.gpu.clone())?;
        let layers: Vec<u16> = layer_of.iter().map(|&layer| layer as u16).collect();
        for (at, (blocks, regions)) in parts.into_iter().enumerate() {
            let request = Request::LoadLayers { layer_of: layers.clone(), blocks };
            let part = LayersPart {
                report: PartReport(Arc::clone(&reports), at),
                places: Arc::clone(&self.inner.places),
                regions,
            };
            // A part whose call does not begin has ended, with the reason; those before it are under way.
            let begun = self.begin_for(Answer::Layers(part), |id| request.encode(id), false, What::Move, None);
            if at == 0 {
                begun?;
            }
        }
        Ok(load)
    }

    /// The requests' blocks, and the regions that each names.
    fn parts(&self, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<Vec<(Blocks, BTreeSet<u32>)>> {
        let alike = if keys.len() == segments.len() { Some(segments) } else { None };
        if let Some((places, shifts)) = alike.and_then(|all| self.places().find_shifted(all, self.block_bytes())) {
            let most = (PLACES_MAX / places.len().max(1)).clamp(1, KEYS_MAX);
            let part = |(keys, shifts): (&[BlockKey], &[u64])| {
                let blocks = Blocks { keys: keys.to_vec(), places: BlockPlaces::shifted(&places, shifts.to_vec()) };
                (blocks, places.iter().map(|place| place.region).collect())
            };
            return Ok(keys.chunks(most).zip(shifts.chunks(most)).map(part).collect());
        }
        let (found, _keeps) = self.places().find(keys.len(), segments, self.block_bytes(), None)?;
        if found.contains(&Found::Copied) {
            let expected = "memory that the service has, for a load layer by layer";
            return Err(Error::argument("segments", "memory that is copied through a bounce buffer", expected));
        }
        let part = |run: Range<usize>| {
            let places: Vec<&[Place]> = found[run.clone()].iter().map(Found::places).collect();
            let regions = places.iter().flat_map(|places| places.iter()).map(|place| place.region).collect();
            (Blocks { keys: keys[run].to_vec(), places: places.into_iter().collect() }, regions)
        };
        Ok(runs(&found, 1).into_iter().map(part).collect())
    }
}

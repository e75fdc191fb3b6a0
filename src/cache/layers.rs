//! Loads that complete layer by layer, and streams that wait for a layer.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::Cache;
use crate::{
    block::{BlockKey, Segment},
    device::cuda::{Gates, Gpu},
    error::{Error, Result},
    fork::HomeBound,
    mover::{Command, LayerBoard, LayerJobs, LayerProgress},
    shield::shield,
};

pub use crate::mover::LayerReports;

/// Layers of a load at most.
const LAYERS_MAX: usize = 1024;

/// A load that completes layer by layer, of [`Cache::load_layers`].
///
/// Dropping it changes nothing: the load goes on, and streams that wait for it are let go when it has ended.
pub struct LayerLoad {
    progress: HomeBound<Arc<LayerProgress>>,
    layers: usize,
    gpu: HomeBound<Option<Arc<Gpu>>>,
}

impl Cache {
    /// Copies blocks into registered memory, layer by layer: a model can begin with the first layer while the last one
    /// is on its way. Resolves when the load has been taken on.
    ///
    /// `segments[i]` are the places of block `i`, in the order of its bytes, one block long in all, as of
    /// [`load_into`](Cache::load_into). `layer_of[s]` is the layer that segment `s` of every block belongs to, counted
    /// from 0; [`BlockGeometry::layer_of_segments`](crate::block::BlockGeometry::layer_of_segments) lists them for
    /// layer-first pools.
    ///
    /// Blocks in host memory are copied in the order of layers. Blocks on disk arrive whole, so that a layer of a load
    /// with such blocks is complete when the last of them is.
    ///
    /// # Errors
    /// [`Error::Argument`] before anything moved, as of [`load_into`](Cache::load_into); also for layers without
    /// segments, and for host and device memory in one load. [`Error::Timeout`] past
    /// [`Config::deadline_ms`](crate::Config::deadline_ms) without room among the commands. [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropped before it resolves, it may have been taken on or not; the load then goes on, and its segments stay in
    /// use until [`unregister`](Cache::unregister) resolves.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// use kvhoist::{Memory, Segment};
    ///
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// # cache.store(&key, None, &[9; 4096]).await?;
    /// let mut pool = vec![7; 16 * 4096];
    /// // SAFETY: the pool lives until `unregister` has resolved, and nobody touches it while a block is on its way.
    /// let memory = unsafe { Memory::host(pool.as_mut_ptr(), pool.len()) };
    /// let region = cache.register(memory).await?;
    /// // A model of two layers: half of the block is the first one's.
    /// let [first, second] = [0, 2048].map(|at| Segment { ptr: pool[at..].as_mut_ptr(), len: 2048 });
    /// let load = cache.load_layers(&[key], &[vec![first, second]], &[0, 1]).await?;
    /// for layer in 0..load.layers() {
    ///     let (leading, _) = load.layer(layer).await?;
    ///     println!("layer {layer} of {leading} blocks is in place");
    /// }
    /// cache.unregister(&region).await?;
    /// # Ok(()) });
    /// ```
    pub async fn load_layers(
        &self,
        keys: &[BlockKey],
        segments: &[Vec<Segment>],
        layer_of: &[usize],
    ) -> Result<LayerLoad> {
        let (sender, load) = oneshot::channel();
        let mut command = Some(Command::LoadLayers(load));
        // First: waking a sleeping reactor takes as long as what follows.
        if let Ok(room) = self.shared().commands.try_take() {
            self.send((command.take().expect("not sent yet"), room));
        }
        // The memory is held before anything is waited for: it might be another's after that.
        let (load, jobs) = self.layer_jobs(keys, segments, layer_of)?;
        if let Some(command) = command {
            let room = self.room().await?;
            self.send((command, room));
        }
        self.want_remote(&jobs.jobs);
        // Where the load was refused, or the reactor has ended, the board says so.
        drop(sender.send(jobs));
        Ok(load)
    }

    /// A load, and what the reactor does of it.
    fn layer_jobs(
        &self,
        keys: &[BlockKey],
        segments: &[Vec<Segment>],
        layer_of: &[usize],
    ) -> Result<(LayerLoad, LayerJobs)> {
        let layers = segments_by_layer(layer_of)?;
        if let Some(at) = segments.iter().position(|list| list.len() != layer_of.len()) {
            return Err(Error::argument(
                "segments",
                format!("{} of block {at}", segments[at].len()),
                format!("one for each of the {} numbers of layers", layer_of.len()),
            ));
        }
        let jobs = self.jobs(keys, None, segments, None)?;
        if jobs.windows(2).any(|pair| pair[0].memory() != pair[1].memory()) {
            return Err(Error::argument("segments", "host and device memory in one load", "one kind of memory"));
        }
        let progress = LayerProgress::new(layers.len(), keys.len());
        let load = LayerLoad {
            progress: HomeBound::new(Arc::clone(&progress)),
            layers: layers.len(),
            gpu: HomeBound::new(self.inner.facts.gpu.clone()),
        };
        Ok((load, LayerJobs { jobs, layers, board: LayerBoard::new(progress) }))
    }
}

/// For each layer the numbers of its segments.
fn segments_by_layer(layer_of: &[usize]) -> Result<Vec<Vec<usize>>> {
    let wrong = |found: String| {
        Error::argument("layer_of", found, format!("layers counted from 0, each with a segment, {LAYERS_MAX} at most"))
    };
    let count = layer_of.iter().max().map_or(0, |&last| last.saturating_add(1));
    if count == 0 || count > LAYERS_MAX {
        return Err(wrong(format!("{count} layers")));
    }
    let mut layers = vec![Vec::new(); count];
    for (segment, &layer) in layer_of.iter().enumerate() {
        layers[layer].push(segment);
    }
    match layers.iter().position(Vec::is_empty) {
        Some(layer) => Err(wrong(format!("no segment of layer {layer}"))),
        None => Ok(layers),
    }
}

impl LayerLoad {
    /// A load that another process makes, and tells of: in parts of so many blocks. Streams of `gpu` can wait for it.
    ///
    /// # Errors
    /// [`Error::Argument`] for layers without segments.
    #[doc(hidden)]
    pub fn elsewhere(layer_of: &[usize], counts: &[usize], gpu: Option<Arc<Gpu>>) -> Result<(Self, Arc<LayerReports>)> {
        let layers = segments_by_layer(layer_of)?.len();
        let (progress, reports) = LayerReports::new(layers, counts);
        Ok((LayerLoad { progress: HomeBound::new(progress), layers, gpu: HomeBound::new(gpu) }, reports))
    }

    /// How many layers it has.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Whether streams can wait for a layer: the cache's device is a CUDA device, not a simulated one.
    pub fn has_streams(&self) -> bool {
        self.gpu.is_some()
    }

    /// Waits until the result of this layer is known for every block. Layers may complete in any order.
    ///
    /// Returns the number of leading blocks whose bytes of this layer are in place, and the error of the next block.
    /// `None`: all blocks are in place, or the next one is resident nowhere.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such layer.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn layer(&self, layer: usize) -> Result<(usize, Option<Error>)> {
        self.check(layer)?;
        Ok(shield(self.progress.wait(|progress| progress.layer(layer))).await)
    }

    /// Waits for the end of the load: one result per block, as of [`Cache::load_into`]. `true`: all layers of it are
    /// in place.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn blocks(&self) -> Vec<Result<bool>> {
        shield(self.progress.wait(LayerProgress::blocks)).await
    }

    /// Makes a CUDA stream wait for a layer, on the device, with no host in between: what is put into `stream` after
    /// this call runs when the layer is complete.
    ///
    /// Complete does not mean right: also a layer of which a block is missing or could not be read lets the stream go.
    /// The host learns that from [`layer`](Self::layer), a kernel from the word at
    /// [`poison_address`](Self::poison_address). The stream goes on in every case: also when the load fails, this
    /// handle or a future is dropped, the cache is closed, or the device tier goes out of service.
    ///
    /// Until then the stream is blocked, and so are calls of CUDA that wait for all streams (`cudaFree`,
    /// `cudaDeviceSynchronize`), the open and the close of a cache and the begin of a file transfer to or from a GPU,
    /// which pin memory, and launches once its queue of some 1000 is full. A thread in such a call holds locks of the
    /// driver that the cache needs to complete the layer, so that neither ends: call such functions while no stream
    /// waits, and await each layer before a stream waits for the next one.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where the device is a simulated one, or the driver refuses. [`Error::Argument`] where
    /// there is no such layer. [`Error::Busy`] past 65536 layers that are waited for. The stream then does not wait.
    ///
    /// # Safety
    /// `stream` is a `CUstream` (or `cudaStream_t`) of the primary context of the cache's device, and is not destroyed
    /// during the call.
    pub unsafe fn stream_wait(&self, layer: usize, stream: usize) -> Result<()> {
        self.check(layer)?;
        let gates = self.gates()?;
        if self.progress.layer(layer).is_some() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { gates.wait(layer, stream) }
    }

    /// Where kernels find what a layer came to: the device's address of a 32-bit word that is 0 where all blocks have
    /// this layer in place, else one more than the number of leading blocks that have. It is written before
    /// streams that wait for the layer are let go, and means nothing before that. Read it while this handle lives.
    ///
    /// # Errors
    /// As [`stream_wait`](Self::stream_wait).
    pub fn poison_address(&self, layer: usize) -> Result<u64> {
        self.check(layer)?;
        Ok(self.gates()?.poison_address(layer))
    }

    fn gates(&self) -> Result<Arc<Gates>> {
        let Some(gpu) = &*self.gpu else {
            let reason = "a stream can wait for a CUDA device only, and there is none; await the layer";
            return Err(Error::unavailable("device", reason));
        };
        self.progress.gates(|count| Gates::take(gpu, count))
    }

    fn check(&self, layer: usize) -> Result<()> {
        if layer < self.layers {
            return Ok(());
        }
        let expected = format!("one of {} layers, counted from 0", self.layers);
        Err(Error::argument("layer", layer.to_string(), expected))
    }
}

debug_fields!(LayerLoad, load => layers: load.layers);

//! Clients whose pools are memory of a GPU, which the service maps by CUDA IPC.
//!
//! Without a GPU the driver's library is a double (`tests/doubles/cuda`): each test runs in a process that finds it,
//! and so does the service that it starts. `KVHOIST_GPU_TESTS=require` runs the tests on a real device instead.

pub mod ends;
mod moves;

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, OnceLock},
    time::Instant,
};

use cudarc::driver::sys::{self, CUresult};
use kvhoist::{
    BlockKey, Config, DeviceKind, DirectIo, LayerLoad, Memory, Segment, block_on,
    internals::{
        gpu::{DeviceBuffer, Gpu},
        memory::DeviceMemory,
    },
};
use kvhoist_service::{Client, ClientOptions, ClientRegion, ServerConfig};
use tempfile::TempDir;

use crate::{
    apart,
    common::{self, key, payload},
    node::{HANG, Process, serve},
};

const BLOCKS: u64 = 32;
const LAYERS: usize = 4;
/// Layers of the segments of a block: all keys, then all values.
const LAYER_OF: [usize; 2 * LAYERS] = [0, 1, 2, 3, 0, 1, 2, 3];

fn is_real() -> bool {
    std::env::var("KVHOIST_GPU_TESTS").is_ok()
}

/// Long enough for a kill in the middle of copies.
fn block_bytes() -> usize {
    if is_real() { 2 << 20 } else { 64 << 10 }
}

fn pool_bytes() -> usize {
    BLOCKS as usize * block_bytes()
}

/// The directory of the double, built once a process.
fn double() -> &'static Path {
    static DOUBLE: OnceLock<TempDir> = OnceLock::new();
    DOUBLE
        .get_or_init(|| {
            let directory = common::directory();
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/doubles/cuda/libcuda.c");
            let mut compiler = Command::new("cc");
            compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(directory.path().join("libcuda.so")).arg(source);
            assert!(compiler.status().expect("Rust links with cc").success(), "the double does not compile");
            directory
        })
        .path()
}

/// Runs the test in a process that has a GPU.
fn with_gpu(name: &str, body: impl FnOnce()) {
    let name = &format!("cuda::{name}");
    if std::env::var("KVHOIST_APART").is_ok_and(|running| running == *name) {
        return apart::apart(name, body);
    }
    let mut command = apart::command(name, "");
    if !is_real() {
        command.env("LD_LIBRARY_PATH", double());
    }
    let output = command.output().expect("this test starts again");
    print!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
}

#[track_caller]
fn succeeded(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

/// The service's process: until its standard input ends.
pub fn run(words: &[&str]) {
    let [socket, path] = words else { panic!("{words:?}") };
    let mut config = ServerConfig::new(*socket);
    config.paths = vec![path.into()];
    config.capacity_bytes = 4 * pool_bytes() as u64;
    config.host_bytes = 4 * pool_bytes() as u64;
    config.cache = Config::default().bypass_host(true).direct_io(DirectIo::Prefer);
    serve(config);
}

/// A service and its store.
struct CudaService {
    store: TempDir,
    place: TempDir,
    process: Process,
}

impl CudaService {
    fn new() -> Self {
        CudaService::with(&[])
    }

    /// With these variables in the service's environment.
    fn with(variables: &[(&str, &str)]) -> Self {
        let (store, place) = (common::directory(), tempfile::tempdir().expect("a directory"));
        let process = CudaService::start(&place.path().join("s"), store.path(), variables);
        CudaService { store, place, process }
    }

    fn start(socket: &Path, store: &Path, variables: &[(&str, &str)]) -> Process {
        let mut service = Process::start_with(&format!("cuda {} {}", socket.display(), store.display()), variables);
        assert_eq!(service.word().as_deref(), Some("ready"));
        service
    }

    fn socket(&self) -> PathBuf {
        self.place.path().join("s")
    }

    fn restart(&mut self) {
        self.process = CudaService::start(&self.socket(), self.store.path(), &[]);
    }
}

fn options() -> ClientOptions {
    let mut options = ClientOptions::new("tests", block_bytes());
    options.capacity_bytes = 3 * pool_bytes() as u64;
    options.host_bytes = 2 * pool_bytes() as u64;
    options.deadline = HANG;
    options.device = Some(DeviceKind::Cuda);
    options
}

/// A client with a layer-first pool on the device, a copy of what a stream found in it, and that stream.
struct Engine {
    gpu: Arc<Gpu>,
    client: Client,
    region: ClientRegion,
    pool: DeviceBuffer,
    seen: DeviceBuffer,
    stream: sys::CUstream,
}

impl Engine {
    fn new(node: &CudaService) -> Self {
        Engine::on(node, 0)
    }

    /// On the device of this ordinal.
    fn on(node: &CudaService, ordinal: u32) -> Self {
        let mut options = options();
        options.device_ordinal = ordinal;
        let client = block_on(Client::connect(node.socket(), options)).expect("a service with the GPU");
        let gpu = Gpu::open(ordinal).expect("a GPU");
        let [pool, seen] = [(); 2].map(|()| DeviceBuffer::new(Arc::clone(&gpu), pool_bytes()).expect("memory"));
        let region = block_on(client.register_device(lent(&pool, 0, pool_bytes()))).expect("registered");
        assert!(region.is_shared());
        gpu.make_current().expect("a context");
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current; a handle is written.
        succeeded(unsafe { sys::cuStreamCreate(&mut stream, 1) });
        Engine { gpu, client, region, pool, seen, stream }
    }

    /// The segments of all blocks: segment `s` of all of them lie together.
    fn places(&self) -> Vec<Vec<Segment>> {
        let len = block_bytes() / LAYER_OF.len();
        let at = |block: usize, s: usize| (s * BLOCKS as usize + block) * len;
        let place = |block, s| Segment { ptr: self.pool.base().as_ptr().wrapping_add(at(block, s)), len };
        (0..BLOCKS as usize).map(|block| (0..LAYER_OF.len()).map(|s| place(block, s)).collect()).collect()
    }

    /// The bytes of a pool in which block `at` is that of number `number(at)`.
    fn image(number: impl Fn(u64) -> u64) -> Vec<u8> {
        let len = block_bytes() / LAYER_OF.len();
        let mut bytes = vec![0; pool_bytes()];
        for at in 0..BLOCKS {
            for (s, part) in payload(number(at), block_bytes()).chunks(len).enumerate() {
                bytes[(s * BLOCKS as usize + at as usize) * len..][..len].copy_from_slice(part);
            }
        }
        bytes
    }

    fn write(&self, bytes: &[u8]) {
        self.gpu.make_current().expect("a context");
        let to = self.pool.base().as_ptr().expose_provenance() as u64;
        // SAFETY: our own memory, to which nothing is on its way, and a slice of that length.
        succeeded(unsafe { sys::cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len()) });
        // SAFETY: the stream of the call before: what it took from pageable memory may still be on its way.
        succeeded(unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) });
    }

    fn fill(&self, byte: u8) {
        self.gpu.make_current().expect("a context");
        let to = self.pool.base().as_ptr().expose_provenance() as u64;
        // SAFETY: our own memory, to which nothing is on its way.
        succeeded(unsafe { sys::cuMemsetD8_v2(to, byte, self.pool.bytes()) });
        // SAFETY: the stream of the call before: it may return before it is done.
        succeeded(unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) });
    }

    fn read(&self, memory: &DeviceBuffer) -> Vec<u8> {
        self.gpu.make_current().expect("a context");
        let (from, mut bytes) = (memory.base().as_ptr().expose_provenance() as u64, vec![0; memory.bytes()]);
        // SAFETY: our own memory, to which nothing is on its way, and a buffer of that length.
        succeeded(unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, bytes.len()) });
        bytes
    }

    /// Stores the blocks from `first` on.
    fn store(&self, first: u64) {
        self.write(&Engine::image(|at| first + at));
        let keys: Vec<BlockKey> = (first..first + BLOCKS).map(key).collect();
        let stored = block_on(self.client.store_from(&keys, None, &self.places())).expect("a service");
        assert!(stored.iter().all(|result| matches!(result, Ok(true))), "{stored:?}");
    }

    /// Loads the blocks from `first` on, in reverse, and compares all bytes.
    fn load(&self, first: u64) {
        self.fill(0x5a);
        let number = |at: u64| first + BLOCKS - 1 - at;
        let keys: Vec<BlockKey> = (0..BLOCKS).map(|at| key(number(at))).collect();
        let loaded = block_on(self.client.load_into(&keys, &self.places())).expect("a service");
        assert!(loaded.iter().all(|result| matches!(result, Ok(true))), "{loaded:?}");
        assert!(self.read(&self.pool) == Engine::image(number), "WRONG BYTES of a load");
    }

    fn begin_layers(&self, first: u64) -> LayerLoad {
        self.fill(0xa5);
        let keys: Vec<BlockKey> = (first..first + BLOCKS).map(key).collect();
        self.client.load_layers(&keys, &self.places(), &LAYER_OF).expect("a service")
    }

    /// Puts behind a layer, in the stream, what a model would do: look at all of it.
    fn look_at(&self, load: &LayerLoad, layer: usize) {
        // SAFETY: our own stream.
        unsafe { load.stream_wait(layer, self.stream.expose_provenance()) }.expect("waits");
        let len = pool_bytes() / LAYER_OF.len();
        for s in (0..LAYER_OF.len()).filter(|&s| LAYER_OF[s] == layer) {
            let [from, to] = [&self.pool, &self.seen].map(|memory| memory.base().as_ptr().wrapping_add(s * len));
            let [from, to] = [from, to].map(|address| address.expose_provenance() as u64);
            self.gpu.make_current().expect("a context");
            // SAFETY: ranges of two buffers that live until the stream has passed the copy.
            succeeded(unsafe { sys::cuMemcpyAsync(to, from, len, self.stream) });
        }
    }

    fn synchronize(&self) {
        self.gpu.make_current().expect("a context");
        // SAFETY: our own stream.
        succeeded(unsafe { sys::cuStreamSynchronize(self.stream) });
    }

    /// Loads layer by layer, and compares what a stream found that waited for each layer.
    fn load_layers(&self, first: u64) {
        let load = self.begin_layers(first);
        for layer in 0..LAYERS {
            if let Some(before) = layer.checked_sub(1) {
                let (leading, error) = block_on(load.layer(before)).expect("there is such a layer");
                assert!(leading == BLOCKS as usize && error.is_none(), "{leading}: {error:?}");
            }
            self.look_at(&load, layer);
        }
        self.synchronize();
        assert!(self.read(&self.seen) == Engine::image(|at| first + at), "WRONG BYTES of layers");
        assert!(block_on(load.blocks()).iter().all(|result| matches!(result, Ok(true))));
    }
}

/// A range of device memory, to be registered.
fn lent(memory: &DeviceBuffer, offset: usize, len: usize) -> Memory {
    // SAFETY: the tests keep the memory for longer than its client, and touch no segment that is on its way.
    unsafe { Memory::device(memory.base().as_ptr().wrapping_add(offset), len) }
}

fn wait_until_connected(client: &Client) {
    let hang = Instant::now() + HANG;
    while !client.is_connected() {
        assert!(Instant::now() < hang);
        std::thread::yield_now();
    }
}

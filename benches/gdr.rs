//! What our own code costs a copy through an RDMA device: CPU a work request, and whether any is paid for with memory.
//!
//! The device is the double of libibverbs of `tests/doubles/gdr`, which completes at once and moves nothing, so that
//! what is measured is the cutting, posting and counting of work requests, with the double's own checks in it.
//!
//!     cargo bench --bench gdr
//!
//! It ends with an error where a 4 KiB work request of a chain of 64 takes more than 150 ns, or allocates.

use std::{
    alloc::{GlobalAlloc, Layout as Memory, System},
    any::Any,
    path::Path,
    process::{Command, ExitCode},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use kvhoist::{
    Layout,
    internals::{
        device::{
            CopyBatch, CopyEngine, CopyOp, DevicePool, Direction,
            gdr::{GdrCopy, GdrMemory, GdrOptions},
        },
        memory::Arena,
    },
};

/// Bytes of a work request.
const REQUEST_BYTES: usize = 4096;
const BLOCKS: u32 = 64;
const BLOCK_BYTES: usize = 1 << 20;
/// Nanoseconds of CPU that a work request may take.
const NANOS_MAX: f64 = 150.0;
/// The best counts; many, for a moment in which nothing else disturbs.
const ROUNDS: usize = 99;

/// The system's, with every call counted.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is the system allocator's, with its own contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, memory: Memory) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(memory) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, memory: Memory) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, memory) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> ExitCode {
    if std::env::var_os("KVHOIST_BENCH_GDR").is_some() {
        return measure();
    }
    let directory = tempfile::tempdir().expect("a directory");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doubles/gdr/libibverbs.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O2", "-pthread", "-o"]).arg(directory.path().join("libibverbs.so.1"));
    assert!(compiler.arg(source).status().expect("Rust links with cc").success(), "the double does not compile");
    let mut again = Command::new(std::env::current_exe().expect("its own path"));
    again.env("KVHOIST_BENCH_GDR", "1").env("LD_LIBRARY_PATH", directory.path()).env("IBV_DOUBLE", "now,depth=4096");
    match again.status().expect("it starts again").success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// CPU time of this thread, in nanoseconds.
fn cpu_nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: one structure is written.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

struct Rig {
    engine: GdrCopy,
    arena: Arc<Arena>,
    pool: Arc<DevicePool>,
}

impl Rig {
    async fn new() -> Self {
        let arena = Arc::new(Arena::new(BLOCKS, BLOCK_BYTES).expect("64 MiB"));
        let layout = Layout::contiguous(BLOCK_BYTES).expect("a layout");
        let pool = Arc::new(DevicePool::simulated(BLOCKS, layout).expect("64 MiB"));
        let memory = GdrMemory { arena: Some(Arc::clone(&arena)), pool: Some(pool.shared_memory()), gpu: None };
        let engine = GdrCopy::open(&GdrOptions::default(), memory).await.expect("the double is a good device");
        // Now that it is proven it need not move the bytes.
        tell("now,idle,depth=4096");
        Rig { engine, arena, pool }
    }

    /// Copies that lie beside one another on neither side.
    fn batch(&self, count: usize) -> CopyBatch {
        let pages = BLOCKS as usize * BLOCK_BYTES / REQUEST_BYTES;
        let (host, device) = (self.arena.slot_ptr(0).as_ptr(), self.pool.memory().base().as_ptr());
        let op = |at: usize| CopyOp {
            src: host.wrapping_add(at * 7919 % pages * REQUEST_BYTES),
            dst: device.wrapping_add(at * 104_729 % pages * REQUEST_BYTES),
            len: REQUEST_BYTES,
        };
        let owners: Vec<Arc<dyn Any + Send + Sync>> = vec![Arc::clone(&self.arena) as _, Arc::clone(&self.pool) as _];
        // SAFETY: ranges of memory that the owners keep; nothing else uses it.
        unsafe { CopyBatch::new((0..count).map(op).collect(), Direction::HostToHost, owners) }
    }

    /// CPU nanoseconds a work request, and allocations in all, of a batch.
    async fn run(&self, requests: usize) -> (f64, u64) {
        let mut best = (f64::INFINITY, u64::MAX);
        for _ in 0..ROUNDS {
            let batch = self.batch(requests);
            let (allocations, cpu) = (ALLOCATIONS.load(Relaxed), cpu_nanos());
            let (result, batch) = self.engine.copy(batch).await;
            let (cpu, allocations) = (cpu_nanos() - cpu, ALLOCATIONS.load(Relaxed) - allocations);
            result.expect("copied");
            drop(batch);
            best = (best.0.min(cpu as f64 / requests as f64), best.1.min(allocations));
        }
        best
    }
}

/// Tells the double how to behave from now on.
fn tell(words: &str) {
    let words = std::ffi::CString::new(words).expect("no zeros");
    // SAFETY: the double is loaded, and has a function of this name, which takes a string and gives nothing.
    unsafe {
        let library = libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "the double is loaded");
        let set = libc::dlsym(library, c"ibv_double_set".as_ptr());
        assert!(!set.is_null(), "the double can be told");
        std::mem::transmute::<*mut libc::c_void, extern "C" fn(*const libc::c_char)>(set)(words.as_ptr());
    }
}

fn measure() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let measured = tokio::task::LocalSet::new().block_on(&runtime, async {
        let rig = Rig::new().await;
        // The rings of the double are touched once, as those of a device are when they are made.
        rig.run(16_384).await;
        let mut measured = Vec::new();
        for requests in [1, 64, 1024, 16_384] {
            measured.push((requests, rig.run(requests).await));
        }
        measured
    });
    println!("work requests of 4 KiB a batch | CPU ns a work request | allocations a batch");
    for (requests, (nanos, allocations)) in &measured {
        println!("{requests:30} | {nanos:21.0} | {allocations:19}");
    }
    let (_, (nanos, chain)) = measured[1];
    let (_, (_, most)) = measured[measured.len() - 1];
    // A batch has an answer of its own; some of the runtime's lists may grow once.
    let (quick, free) = (nanos <= NANOS_MAX, most <= chain + 8);
    println!("at most {NANOS_MAX} ns: {quick}; nothing allocated a work request: {free}");
    if quick && free { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

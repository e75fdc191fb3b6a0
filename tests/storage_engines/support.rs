//! Memory, files and runtimes of the tests.

use std::{
    any::Any,
    fs::{File, OpenOptions},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
    pin::pin,
    ptr::NonNull,
    rc::Rc,
    sync::Arc,
    task::{Context, Waker},
};

use kvhoist::io::{
    AlignedBuf, FileId, Lent,
    blocking::Blocking,
    uring::{self, Uring},
};

/// Opened with `O_DIRECT`.
pub const DIRECT: FileId = FileId(0);
/// Goes through the page cache, and takes any offset and length.
pub const BUFFERED: FileId = FileId(1);
/// Opened for reading only (real engines).
pub const READ_ONLY: FileId = FileId(2);

pub const ARENA_BYTES: usize = 4 << 20;

/// Memory that ranges are lent from, and the registered region 0 of a ring.
pub struct Arena {
    pub ptr: NonNull<u8>,
    _memory: AlignedBuf,
}

// SAFETY: the tests lend each range to one operation at a time and look at it in between only.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    pub fn new() -> Arc<Self> {
        let mut memory = AlignedBuf::zeroed(ARENA_BYTES);
        let ptr = NonNull::new(memory.as_mut_ptr()).expect("allocated");
        Arc::new(Arena { ptr, _memory: memory })
    }

    pub fn lend(self: &Arc<Self>, start: usize, len: usize, fixed: Option<u16>) -> Lent {
        self.lend_owned(start, len, fixed, Arc::clone(self) as Arc<dyn Any + Send + Sync>)
    }

    /// As `lend`; `owner` must keep the arena alive.
    pub fn lend_owned(&self, start: usize, len: usize, fixed: Option<u16>, owner: Arc<dyn Any + Send + Sync>) -> Lent {
        assert!(start + len <= ARENA_BYTES);
        // SAFETY: within the arena, which `owner` keeps; each test lends a range once at a time.
        unsafe { Lent::new(self.ptr.add(start), len, fixed, owner) }
    }

    #[allow(clippy::mut_from_ref)]
    pub fn bytes(&self, start: usize, len: usize) -> &mut [u8] {
        assert!(start + len <= ARENA_BYTES);
        // SAFETY: within the arena; the tests look at ranges only while these are not lent.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().add(start), len) }
    }
}

/// Keeps an arena and calls back when nobody needs the memory any more.
pub struct Owner {
    _arena: Arc<Arena>,
    on_drop: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Owner {
    pub fn lend(arena: &Arc<Arena>, start: usize, len: usize, on_drop: impl FnOnce() + Send + Sync + 'static) -> Lent {
        let owner = Owner { _arena: Arc::clone(arena), on_drop: Some(Box::new(on_drop)) };
        arena.lend_owned(start, len, None, Arc::new(owner))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.on_drop.take().expect("dropped once")();
    }
}

/// Polls once, so that the operation starts, and drops the future.
pub fn start_and_drop(future: impl Future) {
    let polled = pin!(future).poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending(), "nothing completes before the runtime has seen it");
}

/// A small seeded generator; the seed of a failed run is in the assertion messages.
pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// The files of a store, gone with the value.
pub struct Files {
    pub dir: PathBuf,
    pub files: Vec<Arc<File>>,
}

impl Files {
    pub fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder").keep();
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true);
        let buffered = options.open(dir.join("buffered")).expect("a file");
        let direct = options.custom_flags(libc::O_DIRECT).open(dir.join("direct")).expect("a file with O_DIRECT");
        let read_only = File::open(dir.join("buffered")).expect("the same file");
        Files { dir, files: [direct, buffered, read_only].map(Arc::new).into() }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// An engine with `arena` registered.
pub fn ring_engine(files: Vec<Arc<File>>, arena: &Arc<Arena>) -> Uring {
    let keep_alive = Arc::clone(arena) as Arc<dyn Any + Send + Sync>;
    // SAFETY: the arena is mapped while it lives, and the engine keeps it.
    unsafe { Uring::new(files, vec![(arena.ptr, ARENA_BYTES)], keep_alive) }.expect("inside the runtime")
}

/// A ring, unless this system refuses rings; then the test has nothing to show.
pub fn ring_runtime(entries: u32) -> Option<uring::Runtime> {
    match uring::runtime(entries) {
        Ok(runtime) => Some(runtime),
        Err(error) if std::env::var_os("KVHOIST_REQUIRE_URING").is_none() => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

pub fn on_uring(property: impl AsyncFnOnce(Rc<Uring>, Arc<Arena>)) {
    let (files, arena) = (Files::new(), Arena::new());
    // Few entries: hundreds of operations must wait their turn.
    let Some(runtime) = ring_runtime(16) else { return };
    runtime.block_on(async {
        let engine = ring_engine(files.files.clone(), &arena);
        assert!(engine.registered());
        property(Rc::new(engine), arena).await;
    });
}

pub fn on_blocking(property: impl AsyncFnOnce(Rc<Blocking>, Arc<Arena>)) {
    let files = Files::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let engine = Rc::new(Blocking::new(files.files.clone(), 3).expect("threads"));
    tokio::task::LocalSet::new().block_on(&runtime, property(engine, Arena::new()));
}

#[cfg(feature = "sim")]
pub fn on_sim(property: impl AsyncFnOnce(Rc<kvhoist::io::sim::Sim>, Arc<Arena>)) {
    use kvhoist::io::sim::{FaultRates, Sim, SimOptions};
    let rates = FaultRates { short: 0.05, ..FaultRates::default() };
    let options = SimOptions { align_bytes: 1, memory_align_bytes: 1, rates, ..SimOptions::default() };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    let engine = Rc::new(Sim::new(1, vec![Vec::new(); 3], options));
    tokio::task::LocalSet::new().block_on(&runtime, property(engine, Arena::new()));
}

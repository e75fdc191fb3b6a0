//! Files and runtimes of the tests.

use std::{
    any::Any,
    fs::{File, OpenOptions},
    ops::Deref,
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
    pin::pin,
    rc::Rc,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Waker},
    time::{Duration, Instant},
};

use kvhoist::internals::io::{self, Storage, uring};

use crate::memory::{ARENA_BYTES, Arena};

/// Polls once, so that the operation starts, and drops the future.
pub fn start_and_drop(future: impl Future) {
    let polled = pin!(future).poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending(), "nothing completes before the runtime has seen it");
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
pub fn ring_engine(files: Vec<Arc<File>>, arena: &Arc<Arena>) -> io::Files {
    let keep_alive = Arc::clone(arena) as Arc<dyn Any + Send + Sync>;
    // SAFETY: the arena is mapped while it lives, and the engine keeps it.
    unsafe { io::Files::on_ring(files, vec![(arena.ptr, ARENA_BYTES)], keep_alive) }.expect("inside the runtime")
}

/// A ring. There is one at a time: together their arenas would exceed what a user may lock.
pub struct Ring {
    runtime: uring::Runtime,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Ring {
    type Target = uring::Runtime;

    fn deref(&self) -> &uring::Runtime {
        &self.runtime
    }
}

/// A ring, unless this system refuses rings; then the test has nothing to show.
pub fn ring_runtime(entries: u32) -> Option<Ring> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match uring::runtime(entries, None) {
        Ok(runtime) => Some(Ring { runtime, _turn: turn }),
        Err(error) if std::env::var_os("KVHOIST_REQUIRE_URING").is_none() => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A ring with an engine that has `arena` registered. What rings had locked that have ended, also those of other
/// processes of this user, the kernel gives back some time later: until then it refuses, and this tries again.
pub fn registered_ring(entries: u32, files: &Files, arena: &Arc<Arena>) -> Option<(Ring, io::Files)> {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let ring = ring_runtime(entries)?;
        let engine = ring.block_on(async { ring_engine(files.files.clone(), arena) });
        if engine.registered() {
            return Some((ring, engine));
        }
        assert!(
            Instant::now() < until,
            "found no {ARENA_BYTES} bytes that this user may lock (ulimit -l) for a minute"
        );
        ring.block_on(async { drop(engine) });
    }
}

pub fn on_uring(property: impl AsyncFnOnce(Rc<io::Files>, Arc<Arena>)) {
    let (files, arena) = (Files::new(), Arena::new());
    // Few entries: hundreds of operations must wait their turn.
    let Some((ring, engine)) = registered_ring(16, &files, &arena) else { return };
    ring.block_on(property(Rc::new(engine), arena));
}

pub fn on_calls(property: impl AsyncFnOnce(Rc<io::Files>, Arc<Arena>)) {
    let (files, arena) = (Files::new(), Arena::new());
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let engine = io::Files::by_calls(files.files.clone(), 3).expect("threads");
        property(Rc::new(engine), arena).await;
    });
}

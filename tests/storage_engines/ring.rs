//! What only the ring can get wrong. Reads of an empty pipe stay in flight until the test writes.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    os::fd::{AsRawFd, FromRawFd},
    pin::pin,
    ptr::NonNull,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use kvhoist::internals::io::{self as kvhoist_io, AlignedBuf, FileId, IO_ALIGN, Storage, yield_now};

use crate::{memory::*, properties::compare_with_model, support::*};

fn pipe() -> (Arc<File>, File) {
    let mut fds = [0; 2];
    // SAFETY: `fds` has room for the two descriptors.
    let result = unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    // SAFETY: the descriptors are new, and owned by nobody else.
    let [reader, writer] = fds.map(|fd| unsafe { File::from_raw_fd(fd) });
    (Arc::new(reader), writer)
}

/// What the pipe holds now; never blocks.
fn drain(pipe: &File) -> Vec<u8> {
    // SAFETY: the descriptor is open; O_NONBLOCK is a valid flag for it.
    assert_eq!(unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) }, 0);
    let mut held = vec![0; 64];
    let mut reader = pipe;
    let len = match reader.read(&mut held) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        other => other.expect("readable"),
    };
    held.truncate(len);
    held
}

#[test]
fn abandoned_memory_lives_until_the_completion() {
    let Some(runtime) = ring_runtime(8) else { return };
    let (arena, files, (reader, mut writer)) = (Arena::new(), Files::new(), pipe());
    runtime.block_on(async {
        let engine = ring_engine(vec![Arc::clone(&files.files[0]), reader], &arena);
        let (gone, mut is_gone) = tokio::sync::oneshot::channel();
        let buf = Owner::lend(&arena, 0, 64, move || gone.send(()).expect("the test listens"));
        start_and_drop(engine.read(FileId(1), 0, buf));
        // A whole operation goes through the kernel meanwhile, so the read is there too.
        engine.sync(FileId(0)).await.expect("synced");
        assert!(is_gone.try_recv().is_err(), "the kernel still waits to write there");
        writer.write_all(b"hello").expect("written");
        (&mut is_gone).await.expect("given up");
        assert_eq!(arena.bytes(0, 5), b"hello");
    });
}

/// Memory given up by a shutdown writes to the pipe that was being read. Were the read still in
/// flight then, it would take the byte, and into memory that is being freed.
fn memory_outlives_operations_at_shutdown(abandon_first: bool) {
    let Some(runtime) = ring_runtime(8) else { return };
    let (arena, files, (reader, mut writer)) = (Arena::new(), Files::new(), pipe());
    let witness = Arc::clone(&reader);
    runtime.block_on(async {
        let engine = Rc::new(ring_engine(vec![Arc::clone(&files.files[0]), reader], &arena));
        let buf = Owner::lend(&arena, 0, 64, move || writer.write_all(b"X").expect("written"));
        if abandon_first {
            start_and_drop(engine.read(FileId(1), 0, buf));
        } else {
            let engine = Rc::clone(&engine);
            tokio::task::spawn_local(async move { engine.read(FileId(1), 0, buf).await });
            tokio::task::yield_now().await;
        }
        engine.sync(FileId(0)).await.expect("synced");
        assert!(drain(&witness).is_empty(), "the memory is not given up yet");
    });
    drop(runtime);
    assert_eq!(drain(&witness), b"X", "given up once, after the read had ended");
    assert_eq!(Arc::strong_count(&witness), 1, "the file is given up too");
}

#[test]
fn shutdown_waits_for_abandoned_operations() {
    memory_outlives_operations_at_shutdown(true);
}

#[test]
fn shutdown_waits_for_the_operations_of_tasks() {
    memory_outlives_operations_at_shutdown(false);
}

#[test]
fn futures_may_outlive_the_runtime() {
    let Some(runtime) = ring_runtime(8) else { return };
    let (arena, (reader, _writer)) = (Arena::new(), pipe());
    let engine = runtime.block_on(async { ring_engine(vec![reader], &arena) });
    let (gone, is_gone) = std::sync::mpsc::channel();
    let buf = Owner::lend(&arena, 0, 64, move || gone.send(()).expect("the test listens"));
    let mut future = Box::pin(engine.read(FileId(0), 0, buf));
    runtime.block_on(async {
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    });
    drop(runtime);
    assert!(is_gone.try_recv().is_err());
    drop(future);
    is_gone.try_recv().expect("given up with the future");
}

#[test]
fn descriptors_stay_open_until_the_kernel_has_used_them() {
    let Some(runtime) = ring_runtime(8) else { return };
    let (arena, mut files) = (Arena::new(), Files::new());
    arena.bytes(0, IO_ALIGN).fill(0x42);
    runtime.block_on(async {
        let engine = ring_engine(std::mem::take(&mut files.files), &arena);
        let (gone, is_gone) = tokio::sync::oneshot::channel();
        let buf = Owner::lend(&arena, 0, IO_ALIGN, move || gone.send(()).expect("the test listens"));
        start_and_drop(engine.write(BUFFERED, 0, buf));
        // Nothing has been submitted yet: the runtime did not park in between.
        drop(engine);
        is_gone.await.expect("given up");
    });
    assert_eq!(std::fs::read(files.dir.join("buffered")).expect("readable"), vec![0x42; IO_ALIGN]);
}

#[test]
fn use_outside_the_runtime_is_an_error() {
    let Some(runtime) = ring_runtime(8) else { return };
    let (arena, files) = (Arena::new(), Files::new());
    // SAFETY: there are no regions.
    assert!(unsafe { kvhoist_io::Files::on_ring(vec![], vec![], Arc::new(())) }.is_err());
    let engine = runtime.block_on(async { ring_engine(files.files.clone(), &arena) });
    let mut future = pin!(engine.sync(DIRECT));
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Err(error)) => assert!(error.to_string().contains("block_on"), "{error}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_second_engine_on_a_ring_works_unregistered() {
    let (arena, files) = (Arena::new(), Files::new());
    let Some((runtime, first)) = registered_ring(8, &files, &arena) else { return };
    runtime.block_on(async {
        let second = ring_engine(files.files.clone(), &arena);
        assert!(!second.registered());
        for engine in [first, second] {
            compare_with_model(&engine, &arena, DIRECT, IO_ALIGN, 0x5eed_0003).await;
        }
    });
}

#[test]
fn refused_registration_leaves_a_working_engine() {
    // Threads have their own capabilities: without CAP_IPC_LOCK the limit counts.
    let thread = std::thread::spawn(|| {
        let limit_bytes = forgo_ipc_lock();
        let Some(runtime) = ring_runtime(8) else { return };
        if limit_bytes > 1 << 30 {
            eprintln!("skipped: RLIMIT_MEMLOCK is {limit_bytes} bytes, too much to exceed here");
            return;
        }
        let arena = Arena::new();
        let large = AlignedBuf::zeroed((limit_bytes as usize + ARENA_BYTES).next_multiple_of(IO_ALIGN));
        let (ptr, len) = (NonNull::from(&large[0]), large.len());
        let files = Files::new();
        runtime.block_on(async {
            // SAFETY: the engine keeps both allocations.
            let engine = unsafe {
                kvhoist_io::Files::on_ring(
                    files.files.clone(),
                    vec![(arena.ptr, ARENA_BYTES), (ptr, len)],
                    Arc::new((Arc::clone(&arena), large)),
                )
            };
            let engine = engine.expect("an engine");
            assert!(!engine.registered());
            compare_with_model(&engine, &arena, DIRECT, IO_ALIGN, 0x5eed_0004).await;
        });
    });
    thread.join().expect("no panic");
}

/// Gives up CAP_IPC_LOCK for this thread; returns the soft limit of RLIMIT_MEMLOCK.
fn forgo_ipc_lock() -> u64 {
    const VERSION_3: u32 = 0x2008_0522;
    const IPC_LOCK: u32 = 14;
    let header = [VERSION_3, 0];
    // Effective, permitted, inheritable; twice, for capabilities 0 to 31 and the rest.
    let mut sets = [[0_u32; 3]; 2];
    // SAFETY: header and sets are laid out as capget(2) says, and live across the calls.
    let results = unsafe {
        let got = libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr());
        sets[0][0] &= !(1 << IPC_LOCK);
        (got, libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()))
    };
    assert_eq!(results, (0, 0), "{}", io::Error::last_os_error());
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a place for the answer.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) }, 0);
    limit.rlim_cur
}

#[test]
fn waiting_costs_no_cpu() {
    let Some(runtime) = ring_runtime(8) else { return };
    let (arena, (reader, mut writer)) = (Arena::new(), pipe());
    // The pause is what is measured, not something that the test waits for.
    let pause = std::time::Duration::from_millis(300);
    let waker = std::thread::spawn(move || {
        std::thread::sleep(pause);
        writer.write_all(b"wake").expect("written");
    });
    let before = thread_cpu_time();
    runtime.block_on(async {
        let engine = ring_engine(vec![reader], &arena);
        engine.read(FileId(0), 0, arena.lend(0, 4, Some(0))).await.expect("read");
    });
    let used = thread_cpu_time() - before;
    waker.join().expect("no panic");
    assert!(used < pause / 4, "{used:?} of CPU for {pause:?} of waiting");
}

fn thread_cpu_time() -> std::time::Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a place for the answer.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    std::time::Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn busy_tasks_that_yield_do_not_starve_io() {
    let Some(runtime) = ring_runtime(8) else { return };
    let (arena, files) = (Arena::new(), Files::new());
    runtime.block_on(async {
        let engine = ring_engine(files.files.clone(), &arena);
        let sync = tokio::task::spawn_local(async move { engine.sync(DIRECT).await });
        // With tokio's own `yield_now` this would never end: the runtime does not park, and so
        // submits nothing.
        let give_up = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !sync.is_finished() {
            assert!(std::time::Instant::now() < give_up, "the sync was never submitted");
            yield_now().await;
        }
        sync.await.expect("no panic").expect("synced");
    });
}

/// A small store keeps more writes in flight than the ring has entries.
#[test]
fn a_read_waits_for_no_writes_that_would_take_the_whole_ring() {
    let Some(runtime) = ring_runtime(8) else { return };
    let (arena, files, (reader, writer)) = (Arena::new(), Files::new(), pipe());
    runtime.block_on(async {
        let engine = Rc::new(ring_engine(vec![Arc::clone(&files.files[1]), Arc::new(writer)], &arena));
        engine.write(FileId(0), 0, arena.lend(0, 64, None)).await.expect("written");
        // The pipe takes the first few. The others wait for a reader.
        let write = |_| {
            let (engine, buf) = (Rc::clone(&engine), arena.lend(0, 16 << 10, None));
            tokio::task::spawn_local(async move { engine.write(FileId(1), 0, buf).await })
        };
        let writes: Vec<_> = (0..64).map(write).collect();
        for _ in 0..64 {
            yield_now().await;
        }
        let read = engine.read(FileId(0), 0, arena.lend(32 << 10, 64, None));
        let read = tokio::time::timeout(std::time::Duration::from_secs(20), read).await;
        drop(reader);
        for write in writes {
            _ = write.await.expect("no panic");
        }
        read.expect("it is not behind the writes").expect("read");
    });
}

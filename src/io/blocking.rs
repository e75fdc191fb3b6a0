//! The storage engine over a pool of threads that call `pread`, `pwrite` and `fdatasync`.
//!
//! Works on every kernel and in every runtime; the fallback where io_uring is unavailable. A job owns its memory and
//! its file: the worker sends both back, or drops them if the caller is gone.

use std::{
    fs::File,
    io,
    os::fd::AsRawFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{self, JoinHandle},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::{Storage, TRANSFER_BYTES_MAX, check_offset, file_at, queue::Queue};
use crate::{
    block::{FileId, OpKind},
    memory::Lent,
};

/// Operations queued or running per thread; further callers wait.
pub const IN_FLIGHT_PER_THREAD_MAX: usize = 64;

/// A bounded pool of threads doing blocking I/O.
///
/// Dropping it completes all queued operations and joins the threads, and blocks for that long.
pub struct Blocking {
    files: Vec<Arc<File>>,
    queue: Arc<Queue<Job>>,
    permits: Arc<Semaphore>,
    threads: Vec<JoinHandle<()>>,
}

impl Blocking {
    /// Starts `threads` threads (1 at least) that serve `files`.
    ///
    /// # Errors
    /// The error of a thread that could not be started; threads already started are joined.
    pub fn new(files: Vec<Arc<File>>, threads: usize) -> io::Result<Self> {
        let count = threads.max(1);
        let permits = Arc::new(Semaphore::new(count.saturating_mul(IN_FLIGHT_PER_THREAD_MAX).min(1 << 20)));
        let mut pool = Blocking { files, queue: Arc::default(), permits, threads: Vec::with_capacity(count) };
        for index in 0..count {
            let queue = Arc::clone(&pool.queue);
            let thread = thread::Builder::new().name(format!("kvhoist-io-{index}")).spawn(move || work(&queue))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    async fn run(&self, kind: OpKind, file: FileId, offset: u64, buf: Option<Lent>) -> Done {
        let len = buf.as_ref().map_or(0, Lent::len);
        let file = match check_offset(offset, len).and_then(|()| file_at(&self.files, file)) {
            Ok(file) => Arc::clone(file),
            Err(error) => return (Err(error), buf),
        };
        let permit = Arc::clone(&self.permits).acquire_owned().await.expect("the semaphore is never closed");
        let (answer, answered) = oneshot::channel();
        self.push(Job { kind, file, offset, buf, answer, permit });
        answered.await.expect("workers answer every job before they end, and end after the queue is empty")
    }

    fn push(&self, job: Job) {
        assert!(self.queue.push(job).is_ok(), "a future borrows its engine, so none outlives the pool");
    }
}

impl Storage for Blocking {
    fn name(&self) -> &'static str {
        "blocking"
    }

    async fn read(&self, file: FileId, offset: u64, buf: Lent) -> (io::Result<usize>, Lent) {
        let (result, buf) = self.run(OpKind::Read, file, offset, Some(buf)).await;
        (result, buf.expect("a job gives back the memory it took"))
    }

    async fn write(&self, file: FileId, offset: u64, buf: Lent) -> (io::Result<usize>, Lent) {
        let (result, buf) = self.run(OpKind::Write, file, offset, Some(buf)).await;
        (result, buf.expect("a job gives back the memory it took"))
    }

    async fn sync(&self, file: FileId) -> io::Result<()> {
        self.run(OpKind::Sync, file, 0, None).await.0.map(|_| ())
    }
}

impl Drop for Blocking {
    fn drop(&mut self) {
        self.queue.close();
        for thread in self.threads.drain(..) {
            // The last owner of the pool may be memory that a worker just dropped: a thread that joins itself would
            // never return.
            if thread.thread().id() != thread::current().id() && thread.join().is_err() {
                tracing::error!("a storage thread panicked; its operations were answered nevertheless");
            }
        }
    }
}

type Done = (io::Result<usize>, Option<Lent>);

struct Job {
    kind: OpKind,
    file: Arc<File>,
    offset: u64,
    /// The memory; `None` for a sync.
    buf: Option<Lent>,
    answer: oneshot::Sender<Done>,
    permit: OwnedSemaphorePermit,
}

impl Job {
    fn run(self) {
        let Job { kind, file, offset, buf, answer, permit } = self;
        let result = call(kind, &file, offset, buf.as_ref());
        drop(file);
        drop(permit);
        // If the caller is gone, this drops the memory.
        drop(answer.send((result, buf)));
    }
}

/// Reads, writes or flushes by one system call. `offset` has been checked by [`check_offset`].
pub(super) fn call(kind: OpKind, file: &File, offset: u64, buf: Option<&Lent>) -> io::Result<usize> {
    let fd = file.as_raw_fd();
    let (ptr, len) = buf.map_or((std::ptr::null_mut(), 0), |buf| (buf.as_ptr(), buf.len().min(TRANSFER_BYTES_MAX)));
    let offset = libc::off_t::try_from(offset).expect("checked by `check_offset`");
    let result = match kind {
        // SAFETY: the descriptor is open while `file` lives; by the contract of `Lent`, `len` bytes at `ptr` are mapped
        // and ours alone to write.
        OpKind::Read => unsafe { libc::pread(fd, ptr.cast(), len, offset) },
        // SAFETY: the descriptor is open while `file` lives; by the contract of `Lent`, `len` bytes at `ptr` are mapped
        // and nothing else writes to them.
        OpKind::Write => unsafe { libc::pwrite(fd, ptr.cast(), len, offset) },
        // SAFETY: the descriptor is open while `file` lives.
        OpKind::Sync => unsafe { libc::fdatasync(fd) as isize },
    };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn work(queue: &Queue<Job>) {
    while let Some(job) = queue.pop() {
        // The job is answered before any code of the caller runs; only the drop of abandoned memory can panic.
        if catch_unwind(AssertUnwindSafe(|| job.run())).is_err() {
            tracing::error!("the owner of abandoned memory panicked while it was dropped");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        any::Any,
        ptr::NonNull,
        sync::{Mutex, mpsc},
    };

    use futures_util::FutureExt;

    use super::*;

    /// Memory whose drop is under the test's control.
    struct Owner(Box<dyn Fn() + Send + Sync>);

    impl Drop for Owner {
        fn drop(&mut self) {
            (self.0)();
        }
    }

    fn lend(on_drop: impl Fn() + Send + Sync + 'static) -> Lent {
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(Owner(Box::new(on_drop)));
        let bytes = Box::leak(vec![0_u8; 512].into_boxed_slice());
        // SAFETY: the bytes are leaked, so they live forever, and are reachable only through here.
        unsafe { Lent::new(NonNull::from(bytes).cast(), 512, None, owner) }
    }

    fn pool(threads: usize) -> Blocking {
        let file = tempfile::tempfile().expect("a temporary file");
        Blocking::new(vec![Arc::new(file)], threads).expect("threads")
    }

    /// Starts the operation and drops its future.
    fn start_and_drop(pool: &Blocking, buf: Lent) {
        drop(pool.write(FileId(0), 0, buf).now_or_never());
    }

    /// Queues an operation whose future is already dropped: a worker must drop its memory.
    fn abandon(pool: &Blocking, buf: Lent) {
        let (answer, _) = oneshot::channel();
        let permit = Arc::clone(&pool.permits).try_acquire_owned().expect("below the limit");
        let (file, buf) = (Arc::clone(&pool.files[0]), Some(buf));
        pool.push(Job { kind: OpKind::Write, file, offset: 0, buf, answer, permit });
    }

    #[test]
    fn abandoned_memory_lives_until_its_operation_has_run() {
        let pool = pool(1);
        let (entered, has_entered) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        let (gone, is_gone) = mpsc::channel();
        let may_go = Mutex::new(may_go);
        // The only worker blocks in the drop of the first operation's memory.
        abandon(
            &pool,
            lend(move || {
                let _ = entered.send(());
                let _ = may_go.lock().expect("locked once").recv();
            }),
        );
        has_entered.recv().expect("the worker dropped the memory");
        // The second operation cannot have run, so its memory must still live.
        start_and_drop(&pool, lend(move || gone.send(()).expect("the test listens")));
        assert!(is_gone.try_recv().is_err());
        go.send(()).expect("the worker waits");
        is_gone.recv().expect("the second operation ran and its memory was dropped");
    }

    #[test]
    fn a_panic_of_an_owner_affects_no_other_operation() {
        let pool = pool(1);
        abandon(&pool, lend(|| panic!("an owner that panics, on purpose")));
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let (result, _) = runtime.block_on(pool.write(FileId(0), 0, lend(|| ())));
        assert_eq!(result.expect("the pool still works"), 512);
    }

    #[test]
    fn dropping_the_pool_runs_the_queued_operations() {
        let pool = pool(2);
        let (gone, is_gone) = mpsc::channel();
        for _ in 0..100 {
            let gone = gone.clone();
            start_and_drop(&pool, lend(move || gone.send(()).expect("the test listens")));
        }
        drop(pool);
        assert_eq!(is_gone.try_iter().count(), 100, "all ran before drop returned");
    }

    #[test]
    fn the_pool_may_be_dropped_by_its_own_worker() {
        let pool = Arc::new(pool(1));
        let (gone, is_gone) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        let may_go = Mutex::new(may_go);
        let inner = Mutex::new(Some(Arc::clone(&pool)));
        abandon(
            &pool,
            lend(move || {
                let _ = may_go.lock().expect("locked once").recv();
                drop(inner.lock().expect("locked once").take());
                gone.send(()).expect("the test listens");
            }),
        );
        drop(pool);
        go.send(()).expect("the worker waits");
        is_gone.recv().expect("no deadlock");
    }

    #[test]
    fn callers_past_the_limit_wait() {
        let pool = pool(1);
        let (go, may_go) = mpsc::channel::<()>();
        let may_go = Mutex::new(may_go);
        abandon(
            &pool,
            lend(move || {
                let _ = may_go.lock().expect("locked once").recv();
            }),
        );
        let mut futures: Vec<_> =
            (0..2 * IN_FLIGHT_PER_THREAD_MAX).map(|_| Box::pin(pool.write(FileId(0), 0, lend(|| ())))).collect();
        for future in &mut futures {
            assert!(future.as_mut().now_or_never().is_none(), "the only worker is held");
        }
        assert_eq!(pool.permits.available_permits(), 0, "as many are queued as may be");
        go.send(()).expect("the worker waits");
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        for future in futures {
            assert_eq!(runtime.block_on(future).0.expect("written"), 512);
        }
    }
}

#[path = "../../../tests/common/on_event.rs"]
mod on_event;
mod transfers;

use std::{
    sync::mpsc,
    task::{Context, Waker},
};

use on_event::OnEvent;
use tokio::task::LocalSet;

use super::*;

/// Runs a test inside a reactor.
fn on_reactor(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    LocalSet::new().block_on(&runtime, test);
}

fn start(plan: ThreadPlan) -> Rc<Workers> {
    Workers::start(plan, Arc::new(Count::unexported())).expect("threads")
}

fn workers(workers: u32) -> Rc<Workers> {
    start(ThreadPlan { workers, ..ThreadPlan::default() })
}

/// Workers of which the first `rings` transfer.
fn with_rings(workers: u32, rings: u32) -> Rc<Workers> {
    start(ThreadPlan { workers, rings, ..ThreadPlan::default() })
}

fn pool(workers: &Workers) -> &Arc<Pool> {
    workers.pool.as_ref().expect("there are threads")
}

/// Waits until so many threads are asleep.
fn falls_asleep(workers: &Workers, threads: usize) {
    while pool(workers).asleep() < threads {
        thread::yield_now();
    }
}

/// Queues work that answers nobody.
fn queue(workers: &Workers, work: impl FnOnce() + Send + 'static) {
    pool(workers).push_work(0, Box::new(work));
}

/// Panics without a message on the terminal.
fn panics() -> ! {
    std::panic::resume_unwind(Box::new("on purpose"))
}

#[test]
fn work_runs_on_another_thread_and_its_result_comes_back() {
    on_reactor(async {
        let workers = workers(2);
        let there = workers.run(1, || thread::current().id()).await.expect("done");
        assert_ne!(thread::current().id(), there);
        assert_eq!(workers.done.get(), 1);
    });
}

#[test]
fn a_worker_that_is_asleep_is_woken_for_the_smallest_work() {
    on_reactor(async {
        let workers = workers(1);
        falls_asleep(&workers, 1);
        assert_eq!(workers.run(0, || 7).await, Some(7));
    });
}

#[test]
fn without_workers_nothing_is_run() {
    on_reactor(async {
        let run = workers(0).run(1, || unreachable!("there is no worker")).await;
        assert_eq!(run, None::<()>);
    });
}

#[test]
fn work_that_panics_is_lost_with_what_it_owned_and_the_worker_goes_on() {
    on_reactor(async {
        let workers = workers(1);
        let owned = Arc::new(());
        let keep = Arc::clone(&owned);
        let loses = move || {
            let _keep = keep;
            panics()
        };
        assert_eq!(workers.run(1, loses).await, None::<()>);
        assert_eq!(Arc::strong_count(&owned), 1, "nothing of it runs any longer");
        assert_eq!(workers.run(1, || 7).await, Some(7));
        assert_eq!(workers.done.get(), 1);
    });
}

#[test]
fn a_worker_that_dies_is_replaced_although_the_log_panics() {
    on_reactor(async {
        let workers = workers(1);
        let dies = || {
            std::mem::forget(tracing::subscriber::set_default(OnEvent(|_: &tracing::Event<'_>| panics())));
            panics()
        };
        pool(&workers).push_work(0, Box::new(dies));
        let (tell, told) = mpsc::channel();
        queue(&workers, move || tell.send(()).expect("the test waits for it"));
        // Waits for the thread, and with it for its queued work.
        drop(workers);
        told.try_recv().expect("the thread did the work that was queued behind");
    });
}

#[test]
fn a_worker_that_died_asleep_is_listed_once() {
    let pool = Pool::new(1, 1, WAKE_BYTES);
    for _ in 0..3 {
        let mut dies_asleep = ThreadDriver::that_sleeps(|| panics());
        assert!(catch_unwind(AssertUnwindSafe(|| pool.run(0, &mut dies_asleep))).is_err());
        assert_eq!(pool.asleep(), 1, "its successor would not be woken");
    }
}

#[test]
fn a_dropped_future_leaves_its_work_the_memory_and_the_end_waits_for_it() {
    on_reactor(async {
        let workers = workers(1);
        let (go, wait) = mpsc::channel::<()>();
        let memory = Arc::new([1_u8; 64]);
        let keep = Arc::clone(&memory);
        {
            let mut running = std::pin::pin!(workers.run(1, move || {
                // Blocks until the test releases it.
                let _ = wait.recv();
                keep.iter().map(|&byte| u32::from(byte)).sum::<u32>()
            }));
            assert!(running.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        assert_eq!(Arc::strong_count(&memory), 2, "the work still has it");
        drop(go);
        drop(workers);
        assert_eq!(Arc::strong_count(&memory), 1, "the work has ended");
    });
}

#[test]
fn workers_run_on_the_processors_near_the_drives_and_anywhere_if_none_of_them_is_allowed() {
    /// The processors that this thread may use.
    fn allowed() -> Vec<usize> {
        // SAFETY: a set of processors is plain data, and all zeros is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` is writable and has this size; 0 is the calling thread.
        let result = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        // SAFETY: the number is below the size of the set.
        (0..libc::CPU_SETSIZE as usize).filter(|&processor| unsafe { libc::CPU_ISSET(processor, &set) }).collect()
    }
    on_reactor(async {
        let there = async |near: &[usize]| {
            let workers = start(ThreadPlan { workers: 1, near: near.to_vec(), ..ThreadPlan::default() });
            workers.run(1, allowed).await.expect("ran")
        };
        let all = allowed();
        assert_eq!(there(&[]).await, all);
        let nowhere = (0..libc::CPU_SETSIZE as usize).find(|processor| !all.contains(processor));
        assert_eq!(there(&[1 << 20, nowhere.expect("no machine has as many")]).await, all);
        assert_eq!(there(&[all[0], 1 << 20]).await, all[..1]);
    });
}

//! System calls of this process, over all of its threads, counted by tracepoints of the kernel: the process runs at its
//! own speed, where `strace` would stop it at each call.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::fd::FromRawFd,
    sync::mpsc::{Sender, channel},
    thread::{self, JoinHandle},
};

use crate::drive::other;

/// The calls that are counted one by one as well.
const NAMES: [&str; 6] = ["futex", "io_uring_enter", "epoll_wait", "write", "read", "sched_yield"];

/// A running count. A thread of its own begins and ends it, whose calls are not counted.
pub struct Counter {
    stop: Sender<()>,
    counter: JoinHandle<io::Result<Calls>>,
}

/// How many calls were made.
pub struct Calls {
    /// All calls, also those without a name here.
    pub all: u64,
    /// Names and numbers, the most frequent first.
    pub by_name: Vec<(&'static str, u64)>,
}

impl Counter {
    /// Counts the calls of all threads of this process, and of those that they start, from now on.
    ///
    /// # Errors
    /// The kernel has no tracepoints of system calls, or this process may not count them: it needs root and a mounted
    /// tracefs.
    pub fn start() -> io::Result<Counter> {
        let ((stop, stopped), (begun, begins)) = (channel(), channel());
        let counter = thread::spawn(move || {
            let named = |name| Ok((name, of_other_threads(&format!("syscalls/sys_enter_{name}"))?));
            let by_name = NAMES.into_iter().map(named).collect::<io::Result<Vec<_>>>()?;
            let all = of_other_threads("raw_syscalls/sys_enter")?;
            // Both ends live until this thread has ended.
            let _ = begun.send(());
            let _ = stopped.recv();
            let sums = by_name.into_iter().map(|(name, counts)| Ok((name, sum(&counts)?)));
            let mut by_name = sums.collect::<io::Result<Vec<_>>>()?;
            by_name.sort_by_key(|(_, calls)| std::cmp::Reverse(*calls));
            Ok(Calls { all: sum(&all)?, by_name })
        });
        match begins.recv() {
            Ok(()) => Ok(Counter { stop, counter }),
            // It has ended, with an error.
            Err(_) => Err(Counter { stop, counter }.stop().err().unwrap_or_else(|| other("nothing was counted"))),
        }
    }

    /// The calls so far.
    ///
    /// # Errors
    /// The system's.
    pub fn stop(self) -> io::Result<Calls> {
        drop(self.stop);
        self.counter.join().map_err(|_| other("the counting thread panicked"))?
    }
}

fn sum(counts: &[File]) -> io::Result<u64> {
    counts.iter().try_fold(0, |sum, mut count| {
        let mut number = [0; 8];
        count.read_exact(&mut number)?;
        Ok(sum + u64::from_ne_bytes(number))
    })
}

/// A count of a tracepoint for each thread of this process but the calling one.
fn of_other_threads(tracepoint: &str) -> io::Result<Vec<File>> {
    let path = format!("/sys/kernel/tracing/events/{tracepoint}/id");
    let id = fs::read_to_string(&path).map_err(|error| other(format!("{path}: {error}; it needs root")))?;
    let id = id.trim().parse().map_err(other)?;
    // SAFETY: takes no arguments.
    let own = unsafe { libc::gettid() };
    let mut counts = Vec::new();
    for thread in fs::read_dir("/proc/self/task")? {
        let thread = thread?.file_name().into_string().ok().and_then(|name| name.parse().ok());
        let thread = thread.ok_or_else(|| other("/proc/self/task: found no number"))?;
        if thread == own {
            continue;
        }
        match open(id, thread) {
            // It has ended meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            count => counts.push(count?),
        }
    }
    Ok(counts)
}

/// `struct perf_event_attr` in its first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    breakpoint_address: u64,
}

/// Counts a tracepoint on one thread and on those that it starts.
fn open(tracepoint: u64, thread: libc::pid_t) -> io::Result<File> {
    const TRACEPOINT: u32 = 2;
    const INHERIT: u64 = 2;
    let size = size_of::<Attributes>() as u32;
    let attributes = Attributes { kind: TRACEPOINT, size, config: tracepoint, flags: INHERIT, ..Attributes::default() };
    let (any_processor, no_group) = (-1, -1);
    let close_on_exec = 8;
    // SAFETY: `attributes` is readable and has the size that it names; the other arguments are numbers.
    let fd = unsafe {
        libc::syscall(libc::SYS_perf_event_open, &raw const attributes, thread, any_processor, no_group, close_on_exec)
    };
    match fd {
        // SAFETY: a new descriptor that nothing else owns.
        0.. => Ok(unsafe { File::from_raw_fd(fd as i32) }),
        _ => Err(io::Error::last_os_error()),
    }
}

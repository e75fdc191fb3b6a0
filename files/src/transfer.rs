//! A transfer, as its caller sees it.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll},
    thread::JoinHandle,
    time::Duration,
};

use crate::{
    Error, Memory, Progress, Range, Report, Result, SourceFile,
    cufile::Routes,
    plan,
    queues::Queues,
    shared::Shared,
    worker::{self, Carry, Reads},
};

/// How the bytes of a drive come into device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// As [`Cufile`](Self::Cufile) where the kernel module nvidia-fs is loaded, else as [`Bounce`](Self::Bounce):
    /// opening libcufile takes long.
    #[default]
    Auto,
    /// Through pinned bounce buffers.
    Bounce,
    /// By libcufile, where its counters prove that it moves them from this drive straight into the device. What it does
    /// not, and a request that it refuses, goes through bounce buffers.
    Cufile,
}

/// How a transfer is carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// Threads, each with one request at a time, 1 to 256. `None`: four for each processor, 32 at most; out of memory
    /// that a service holds three for each four processors, since only they move bytes then.
    pub threads: Option<usize>,
    /// Longest request in bytes: a multiple of 4096, 4 KiB to 1 GiB. Each thread has two bounce buffers of this length.
    /// `None`: 512 KiB; 2 MiB out of memory that a service holds.
    pub piece_bytes: Option<usize>,
    /// Take what the page cache has from there.
    pub page_cache: bool,
    /// How reads come into device memory.
    pub mode: Mode,
}

impl Default for Options {
    fn default() -> Self {
        Options { threads: None, piece_bytes: None, page_cache: true, mode: Mode::Auto }
    }
}

impl Options {
    pub(crate) fn check(&self) -> Result<()> {
        let argument = |text| Err(Error::Argument(text));
        match (self.threads, self.piece_bytes) {
            (Some(threads), _) if !(1..=256).contains(&threads) => {
                argument(format!("threads: found {threads}, expected 1 to 256"))
            }
            (_, Some(bytes)) if !(4096..=1 << 30).contains(&bytes) || bytes % 4096 != 0 => argument(format!(
                "piece_bytes: found {bytes}, expected a multiple of 4096 from 4096 to {}",
                1_u64 << 30
            )),
            _ => Ok(()),
        }
    }

    /// Threads, and bytes of a request, for files that a service holds or for others.
    pub(crate) fn chosen(&self, are_held: bool) -> Result<(usize, usize)> {
        self.check()?;
        let processors = std::thread::available_parallelism().map_or(4, usize::from);
        // Requests under way to drives fit the processors' caches: beyond some 32 MiB bytes go to memory before they
        // are copied. Out of memory a copy to the device takes long enough only if it is a long one.
        let (threads, piece_bytes) =
            if are_held { ((3 * processors / 4).clamp(1, 32), 2 << 20) } else { (32.min(4 * processors), 512 << 10) };
        Ok((self.threads.unwrap_or(threads), self.piece_bytes.unwrap_or(piece_bytes)))
    }
}

/// Ranges on their way. It can be awaited. When it is dropped it is cancelled, and the drop waits for its threads.
#[must_use = "it is cancelled when it is dropped"]
pub struct Transfer {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// The process that the threads are in.
    process: u32,
}

/// Cancels a transfer, also while another thread waits for it.
#[derive(Clone)]
pub struct Canceller(Arc<Shared>);

impl Canceller {
    /// Begins no more requests. Those under way end as they would.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Canceller {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Canceller").finish_non_exhaustive()
    }
}

impl Transfer {
    /// Starts the threads for ranges that have been checked.
    pub(crate) fn start(
        ranges: &[Range],
        memory: Memory,
        (align, drives): (u64, &[u64]),
        (threads, piece_bytes): (usize, usize),
        carry: Arc<dyn Carry>,
    ) -> Self {
        // Requests are as long as buffers, from one multiple of the alignment to another.
        let piece_bytes = piece_bytes.next_multiple_of(align as usize);
        let pieces = plan::by_drive(plan::plan(ranges, piece_bytes as u64, align), drives);
        let queues = Queues::new(pieces, threads);
        let wanted = queues.threads();
        let shared = Shared::new(ranges, queues, memory, piece_bytes);
        let mut transfer = Transfer { shared: Arc::new(shared), threads: Vec::new(), process: std::process::id() };
        for n in 0..wanted {
            let (shared, carrying) = (Arc::clone(&transfer.shared), Arc::clone(&carry));
            transfer.shared.begin_thread();
            let run = move || worker::run(&shared, n, &*carrying);
            match std::thread::Builder::new().name(format!("kvhoist-files-{n}")).spawn(run) {
                Ok(thread) => transfer.threads.push(thread),
                Err(error) => {
                    // Those that there are do its work.
                    if transfer.threads.is_empty() {
                        transfer.shared.fail(Error::io("start", "a thread", error));
                    }
                    transfer.shared.end_thread(|| carry.finish());
                    break;
                }
            }
        }
        transfer.shared.end_thread(|| carry.finish());
        transfer
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// The first error; [`Error::Cancelled`]. What the ranges' memory holds then is not defined.
    pub fn wait(self) -> Result<Report> {
        self.check_process()?;
        self.shared.wait()
    }

    /// Waits for ranges of which all bytes have arrived, and returns their numbers in the caller's list: each once,
    /// about in the order of the files. `None` after the last, or at an error, which [`wait`](Self::wait) returns; an
    /// empty list if none arrived within `timeout`.
    pub fn next_ranges(&self, timeout: Duration) -> Option<Vec<usize>> {
        // A lock that another thread held at a fork stays locked in the child.
        self.check_process().ok()?;
        self.shared.next_ranges(timeout)
    }

    /// Refuses a forked child, which nothing would wake.
    fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(Error::Argument("found a transfer of the process that forked this one, expected one of its own".into()))
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.shared.progress(|| self.check_process().is_err())
    }

    /// Begins no more requests. Those under way end as they would.
    pub fn cancel(&self) {
        self.canceller().cancel();
    }

    /// What cancels it from elsewhere.
    pub fn canceller(&self) -> Canceller {
        Canceller(Arc::clone(&self.shared))
    }
}

impl Future for Transfer {
    type Output = Result<Report>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.check_process() {
            Ok(()) => self.shared.poll(context),
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            // A forked child has no such threads to wait for; its memory is a copy.
            return std::mem::take(&mut self.threads).into_iter().for_each(std::mem::forget);
        }
        self.cancel();
        for thread in self.threads.drain(..) {
            // A thread that panicked has been counted as an error.
            _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Transfer").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

/// Reads ranges of these files into `memory`.
///
/// Each drive's files are read in their order, each from front to back; drives work at once. A file that is changed
/// meanwhile is an error at the end.
///
/// # Safety
/// Each range's memory must be writable, and nothing else may read or write it, until the transfer has ended (by
/// [`wait`](Transfer::wait), an await, or its drop) or [`next_ranges`](Transfer::next_ranges) has named the range. A
/// transfer must not be leaked before.
///
/// # Errors
/// [`Error::OutOfFile`] and [`Error::Argument`] before anything is read.
///
/// # Cancel safety
/// Dropping the transfer cancels it: the drop waits for the requests under way.
pub unsafe fn read(files: Vec<SourceFile>, ranges: Vec<Range>, memory: Memory, options: &Options) -> Result<Transfer> {
    plan::check(&ranges, &files)?;
    let chosen = options.chosen(!files.is_empty() && files.iter().all(SourceFile::is_held))?;
    let align = files.iter().filter_map(SourceFile::direct_align).fold(4096, u64::max);
    let drives: Vec<u64> = files.iter().map(SourceFile::drive).collect();
    let ordinal = match memory {
        Memory::Host => None,
        Memory::Cuda(ordinal) => Some(ordinal),
    };
    let cufile = ordinal.and_then(|ordinal| Routes::new(files.len(), ordinal, options.mode));
    let reads = Reads { files, page_cache: options.page_cache, cufile };
    Ok(Transfer::start(&ranges, memory, (align, &drives), chosen, Arc::new(reads)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Where no process has memory.
    const NOWHERE: u64 = 0x7fff_ffff_0000_0000;

    proptest! {
        /// Ranges of a drive that fails at some of them: none of those arrives, those that arrive are right, and the
        /// end is the system's error.
        #[test]
        fn a_drive_that_fails_in_the_middle_is_an_error_and_no_range_looks_read(
            lens in prop::collection::vec(1..60_000_usize, 1..20),
            (bad, bad_len, threads) in (0..20_usize, 1..20_000_usize, 1..5_usize),
        ) {
            let source: Vec<u8> = (0..1_200_000_u32).map(|n| (n % 251) as u8).collect();
            let mut target = vec![0xEE_u8; source.len() + 20_000];
            let (from, to) = (source.as_ptr() as u64, target.as_mut_ptr() as usize);
            let mut at = 0;
            let place = |&len: &usize| {
                at += len;
                Range { file: 0, offset: from + (at - len) as u64, len, address: to + at - len }
            };
            let mut ranges: Vec<Range> = lens.iter().map(place).collect();
            let bad = bad % (ranges.len() + 1);
            ranges.insert(bad, Range { file: 0, offset: NOWHERE, len: bad_len, address: to + source.len() });
            let mut options = Options::default();
            (options.threads, options.piece_bytes) = (Some(threads), Some(16 << 10));
            let files = vec![SourceFile::of_memory(i64::MAX as u64)];
            // SAFETY: the target is looked at where ranges have arrived, and after the end.
            let transfer = unsafe { read(files, ranges.clone(), Memory::Host, &options) };
            let transfer = transfer.expect("they are in the file");
            let mut arrived = Vec::new();
            while let Some(ranges) = transfer.next_ranges(Duration::MAX) {
                arrived.extend(ranges);
            }
            let ended = transfer.wait();
            match ended {
                Err(Error::Io { op: "read", source, .. }) => {
                    prop_assert_eq!(source.raw_os_error(), Some(libc::EIO));
                }
                other => prop_assert!(false, "{:?}", other),
            }
            prop_assert!(!arrived.contains(&bad), "the range that failed arrived");
            for range in arrived {
                let range = ranges[range];
                let (at, begin) = (range.address - to, (range.offset - from) as usize);
                prop_assert!(target[at..at + range.len] == source[begin..begin + range.len]);
            }
            prop_assert!(target[source.len()..].iter().all(|&byte| byte == 0xEE));
        }
    }
}

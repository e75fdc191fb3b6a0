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
    Error, Memory, Progress, Range, Report, Result, SourceFile, plan,
    shared::Shared,
    worker::{self, Carry, Reads},
};

/// How a transfer is carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// Threads, each with one request at a time, 1 to 256. `None`: four for each processor, 32 at most.
    pub threads: Option<usize>,
    /// Longest request in bytes: a multiple of 4096, 4 KiB to 1 GiB. Each thread has a bounce buffer of this length.
    pub piece_bytes: usize,
    /// Take what the page cache has from there.
    pub page_cache: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { threads: None, piece_bytes: 4 << 20, page_cache: true }
    }
}

impl Options {
    pub(crate) fn check(&self) -> Result<()> {
        let argument = |text| Err(Error::Argument(text));
        match (self.threads, self.piece_bytes) {
            (Some(threads), _) if !(1..=256).contains(&threads) => {
                argument(format!("threads: found {threads}, expected 1 to 256"))
            }
            (_, bytes) if !(4096..=1 << 30).contains(&bytes) || bytes % 4096 != 0 => argument(format!(
                "piece_bytes: found {bytes}, expected a multiple of 4096 from 4096 to {}",
                1_u64 << 30
            )),
            _ => Ok(()),
        }
    }

    fn threads(&self) -> usize {
        self.threads.unwrap_or_else(|| 32.min(4 * std::thread::available_parallelism().map_or(4, usize::from)))
    }
}

/// Ranges on their way. It can be awaited. When it is dropped it is cancelled, and the drop waits for its threads.
#[must_use = "it is cancelled when it is dropped"]
pub struct Transfer {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Transfer {
    /// Starts the threads for ranges that have been checked.
    pub(crate) fn start(
        ranges: &[Range],
        memory: Memory,
        (align, drives): (u64, &[u64]),
        options: &Options,
        carry: Arc<dyn Carry>,
    ) -> Result<Self> {
        options.check()?;
        // Requests are as long as buffers, from one multiple of the alignment to another.
        let piece_bytes = options.piece_bytes.next_multiple_of(align as usize);
        let pieces = plan::spread(plan::plan(ranges, piece_bytes as u64, align), drives);
        let wanted = options.threads().min(pieces.len()).max(1);
        let shared = Shared::new(ranges, pieces, memory, piece_bytes);
        let mut transfer = Transfer { shared: Arc::new(shared), threads: Vec::new() };
        for n in 0..wanted {
            let (shared, carrying) = (Arc::clone(&transfer.shared), Arc::clone(&carry));
            transfer.shared.begin_thread();
            let run = move || worker::run(&shared, &*carrying);
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
        Ok(transfer)
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// The first error; [`Error::Cancelled`]. What the ranges' memory holds then is not defined.
    pub fn wait(self) -> Result<Report> {
        self.shared.wait()
    }

    /// The next range of which all bytes have arrived, by its number in the caller's list: each once, about in the
    /// order of the files. `None` after the last, or at an error, which [`wait`](Self::wait) returns; `Some(None)` if
    /// none arrived within `timeout`.
    pub fn next(&self, timeout: Duration) -> Option<Option<usize>> {
        self.shared.next_range(timeout)
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.shared.progress()
    }

    /// Begins no more requests. Those under way end as they would.
    pub fn cancel(&self) {
        self.shared.cancelled.store(true, Ordering::Relaxed);
    }
}

impl Future for Transfer {
    type Output = Result<Report>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.shared.poll(context)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
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
/// [`wait`](Transfer::wait), an await, or its drop) or [`next`](Transfer::next) has named the range. A transfer must
/// not be leaked before.
///
/// # Errors
/// [`Error::OutOfFile`] and [`Error::Argument`] before anything is read.
///
/// # Cancel safety
/// Dropping the transfer cancels it: the drop waits for the requests under way.
pub unsafe fn read(files: Vec<SourceFile>, ranges: Vec<Range>, memory: Memory, options: &Options) -> Result<Transfer> {
    plan::check(&ranges, &files)?;
    let align = files.iter().filter_map(SourceFile::direct_align).fold(4096, u64::max);
    let drives: Vec<u64> = files.iter().map(SourceFile::drive).collect();
    let reads = Reads { files, page_cache: options.page_cache };
    Transfer::start(&ranges, memory, (align, &drives), options, Arc::new(reads))
}

//! What the threads of a transfer share.

use std::{
    mem,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use crate::{Error, Memory, Range, Result, file::Way, plan::Piece, queues::Queues};

/// What a transfer moved, and which way the bytes took.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct Report {
    /// Bytes of all ranges.
    pub bytes: u64,
    /// From the first request to the end.
    pub seconds: f64,
    /// Bytes that the page cache had.
    pub page_cache_bytes: u64,
    /// Bytes read or written past the page cache; gaps between ranges count.
    pub direct_bytes: u64,
    /// Bytes read or written through the page cache for want of direct I/O, or of alignment.
    pub buffered_bytes: u64,
    /// Bytes read from a copy that a service holds in memory.
    pub held_bytes: u64,
    /// Bytes that libcufile moved from the drive into device memory.
    pub cufile_bytes: u64,
    /// Bytes copied from or to bounce buffers.
    pub bounced_bytes: u64,
}

/// How far a transfer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that have arrived.
    pub bytes: u64,
    /// Bytes of all ranges.
    pub bytes_total: u64,
    /// No thread works on it any more.
    pub is_over: bool,
}

/// What the threads of a transfer share.
pub(crate) struct Shared {
    pub(crate) queues: Queues,
    pub(crate) memory: Memory,
    pub(crate) buffer_bytes: usize,
    pub(crate) cancelled: AtomicBool,
    /// Bytes of each range that have not arrived.
    left: Vec<AtomicU64>,
    pub(crate) counts: Counts,
    bytes_total: u64,
    begun: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

/// Bytes so far.
#[derive(Default)]
pub(crate) struct Counts {
    arrived: AtomicU64,
    ways: [AtomicU64; Way::COUNT],
    bounced: AtomicU64,
}

impl Counts {
    pub(crate) fn read(&self, way: Way, bytes: usize) {
        self.ways[way as usize].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn bounced(&self, bytes: usize) {
        self.bounced.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct State {
    /// Ranges that have arrived, and were not asked for yet.
    done: Vec<usize>,
    threads: usize,
    error: Option<Error>,
    result: Option<Result<Report>>,
    waker: Option<Waker>,
}

impl Shared {
    /// For ranges in these queues. One thread counts as begun: the one that begins the others.
    pub(crate) fn new(ranges: &[Range], queues: Queues, memory: Memory, buffer_bytes: usize) -> Self {
        let empty = ranges.iter().enumerate().filter(|(_, range)| range.len == 0).map(|(n, _)| n);
        Shared {
            queues,
            memory,
            buffer_bytes,
            cancelled: AtomicBool::new(false),
            left: ranges.iter().map(|range| AtomicU64::new(range.len as u64)).collect(),
            counts: Counts::default(),
            bytes_total: ranges.iter().map(|range| range.len as u64).sum(),
            begun: Instant::now(),
            state: Mutex::new(State { done: empty.collect(), threads: 1, ..State::default() }),
            changed: Condvar::new(),
        }
    }

    /// Waits for the result.
    pub(crate) fn wait(&self) -> Result<Report> {
        let mut state = self.lock();
        loop {
            if let Some(result) = &state.result {
                return result.clone();
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// As of [`Transfer::next_ranges`](crate::Transfer::next_ranges).
    pub(crate) fn next_ranges(&self, timeout: Duration) -> Option<Vec<usize>> {
        // Without an end where it is too far away to be a time.
        let until = Instant::now().checked_add(timeout);
        let mut state = self.lock();
        loop {
            if !state.done.is_empty() {
                return Some(mem::take(&mut state.done));
            }
            if state.result.is_some() {
                return None;
            }
            let left = until.map_or(Duration::from_secs(3600), |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Some(Vec::new());
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The result; without one the task is woken when there is.
    pub(crate) fn poll(&self, context: &mut Context<'_>) -> Poll<Result<Report>> {
        let mut state = self.lock();
        if let Some(result) = &state.result {
            return Poll::Ready(result.clone());
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }

    /// `is_forked`: no thread came along into this process.
    pub(crate) fn progress(&self, is_forked: impl FnOnce() -> bool) -> Progress {
        let is_over = is_forked() || self.lock().result.is_some();
        Progress { bytes: self.counts.arrived.load(Ordering::Relaxed), bytes_total: self.bytes_total, is_over }
    }

    /// Counts a thread that is about to begin.
    pub(crate) fn begin_thread(&self) {
        self.lock().threads += 1;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics under it; if something did, the counts are still right.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a piece that has arrived.
    pub(crate) fn arrived(&self, piece: &Piece) {
        let mut whole = Vec::new();
        for part in &piece.parts {
            self.counts.arrived.fetch_add(part.len as u64, Ordering::Relaxed);
            // The last one to arrive has seen the bytes of all.
            if self.left[part.range].fetch_sub(part.len as u64, Ordering::AcqRel) == part.len as u64 {
                whole.push(part.range);
            }
        }
        if !whole.is_empty() {
            self.lock().done.extend(whole);
            self.changed.notify_all();
        }
    }

    /// Notes the first error; the threads stop at their next piece.
    pub(crate) fn fail(&self, error: Error) {
        self.lock().error.get_or_insert(error);
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Ends a thread, the last of which ends the transfer by `finish`.
    pub(crate) fn end_thread(&self, finish: impl FnOnce() -> Result<()>) {
        let mut state = self.lock();
        state.threads -= 1;
        if state.threads > 0 {
            return;
        }
        let error = state.error.take();
        drop(state);
        let result = match error {
            Some(error) => Err(error),
            None if self.cancelled.load(Ordering::Relaxed) => Err(Error::Cancelled),
            None => finish(),
        };
        let result = result.map(|()| self.report());
        let mut state = self.lock();
        state.result = Some(result);
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_all();
        waker.into_iter().for_each(Waker::wake);
    }

    fn report(&self) -> Report {
        let [page_cache_bytes, direct_bytes, buffered_bytes, held_bytes, cufile_bytes] =
            self.counts.ways.each_ref().map(|count| count.load(Ordering::Relaxed));
        Report {
            bytes: self.bytes_total,
            seconds: self.begun.elapsed().as_secs_f64(),
            page_cache_bytes,
            direct_bytes,
            buffered_bytes,
            held_bytes,
            cufile_bytes,
            bounced_bytes: self.counts.bounced.load(Ordering::Relaxed),
        }
    }
}

//! The worker thread, which makes all calls of libcufile.

use std::{collections::VecDeque, sync::Arc, thread, time::Duration};

use slab::Slab;

use kvhoist_base::{block::IO_ALIGN, panics::log};

use super::{
    Buffer, Part,
    queue::{Queue, Wait},
    request::Request,
};
use crate::{
    cuda::Gpu,
    cufile::sys::{Batch, BatchEntry, BatchEvent, CufileError, Driver, Handle, Registration},
};

/// How long the worker waits for new requests before it polls for completions again: a poll takes 1 to 20 us.
const POLL: Duration = Duration::from_micros(30);

/// Empty polls at that interval; then it grows to `POLL_MAX`, so that a stuck transfer does not occupy a core.
const POLLS_EAGER: u32 = 256;
const POLL_MAX: Duration = Duration::from_millis(10);

/// Largest number of transfers in a row without progress on a piece.
const NO_PROGRESS_MAX: u32 = 8;

/// Largest number of failed polls in a row.
const UNANSWERED_MAX: u32 = 3;

/// How pieces are submitted.
pub(super) enum Submission {
    /// Many at once, if the path is direct.
    Batch(Batch),
    /// One at a time: in compat mode batches are slow, and large ones hang.
    OneByOne,
}

/// Ranges of device memory, registered with libcufile on first use.
pub(super) struct Ranges {
    /// Start and length, sorted by start.
    pub(super) all: Vec<(usize, usize)>,
    pub(super) registered: Vec<Option<Registration>>,
    /// libcufile refused a range; the others are not registered either, and go through its own buffers.
    pub(super) refused: bool,
}

/// A request of which libcufile holds pieces.
struct Active {
    request: Request,
    /// Unfinished pieces.
    left: usize,
    fault: Option<String>,
}

/// A contiguous range to be transferred.
#[derive(Clone, Copy)]
struct Piece {
    active: usize,
    part: Part,
    no_progress: u32,
}

/// The worker's state. Fields drop in order of declaration: batches before files and memory.
pub(super) struct Worker {
    pub(super) submission: Option<Submission>,
    pub(super) ranges: Ranges,
    pub(super) handles: Vec<Handle>,
    pub(super) driver: &'static Driver,
    pub(super) gpu: Arc<Gpu>,
    pub(super) capacity: usize,
    pub(super) queue: Arc<Queue<Request>>,
    pub(super) state: Transfers,
}

/// Pieces and requests of the worker.
#[derive(Default)]
pub(super) struct Transfers {
    actives: Slab<Active>,
    /// Pieces not submitted yet.
    backlog: VecDeque<Piece>,
    /// Submitted pieces; slab indices are the cookies.
    in_flight: Slab<Piece>,
    unanswered: u32,
    /// Why the worker is out of service.
    lost: Option<String>,
    /// Number of empty polls in a row.
    quiet: u32,
}

impl Worker {
    /// Serves requests until the queue is closed and all of them have completed.
    pub(super) fn serve(&mut self) {
        loop {
            // Requests beyond the capacity stay in the queue, where `Cufile::retire` can still take them back.
            let room = self.capacity.saturating_sub(self.state.in_flight.len() + self.state.backlog.len());
            let wait = match (self.state.in_flight.is_empty(), self.state.backlog.is_empty()) {
                (true, true) => Wait::ForEver,
                (false, _) if room > 0 => Wait::For(self.state.poll_delay()),
                _ => Wait::No,
            };
            let (requests, closed) = self.queue.take(room, wait);
            if requests.is_empty() && !self.state.in_flight.is_empty() && (closed || room == 0) {
                thread::sleep(self.state.poll_delay());
            }
            let idle = requests.is_empty() && self.state.actives.is_empty();
            if closed && idle {
                return;
            }
            requests.into_iter().for_each(|request| self.admit(request));
            if closed {
                self.state.fail_backlog();
            }
            match &self.submission {
                Some(Submission::Batch(_)) => {
                    self.submit();
                    self.reap();
                }
                Some(Submission::OneByOne) => self.transfer_one(),
                None => self.refuse_all(),
            }
        }
    }

    fn admit(&mut self, mut request: Request) {
        if let Some(reason) = &self.state.lost {
            return request.fail(reason.clone());
        }
        if request.file >= self.handles.len() {
            return request.fail(format!("file {} of {}", request.file, self.handles.len()));
        }
        for part in &request.parts {
            self.ranges.register(self.driver, part);
        }
        let parts = std::mem::take(&mut request.parts);
        if parts.is_empty() {
            return request.end(None);
        }
        let active = self.state.actives.insert(Active { request, left: parts.len(), fault: None });
        self.state.backlog.extend(parts.into_iter().map(|part| Piece { active, part, no_progress: 0 }));
    }

    /// Submits as many pieces as the capacity allows.
    fn submit(&mut self) {
        let room = self.capacity.saturating_sub(self.state.in_flight.len()).min(self.state.backlog.len());
        if room == 0 {
            return;
        }
        let pieces: Vec<Piece> = self.state.backlog.drain(..room).collect();
        let Err(fault) = self.submit_pieces(&pieces) else { return };
        if let [piece] = pieces[..] {
            return self.state.finish(piece, Err(fault.to_string()));
        }
        // A submission is all or nothing: one refused piece must not fail the others.
        for piece in pieces {
            if let Err(fault) = self.submit_pieces(&[piece]) {
                self.state.finish(piece, Err(fault.to_string()));
            }
        }
    }

    fn submit_pieces(&mut self, pieces: &[Piece]) -> Result<(), CufileError> {
        let Some(Submission::Batch(batch)) = &mut self.submission else { return Ok(()) };
        let cookies: Vec<usize> = pieces.iter().map(|piece| self.state.in_flight.insert(*piece)).collect();
        let (handles, actives) = (&self.handles, &self.state.actives);
        let entries = pieces.iter().zip(&cookies).map(|(piece, &cookie)| {
            let Request { kind, file, .. } = actives[piece.active].request;
            let Part { ptr, len, offset } = piece.part;
            (BatchEntry { kind, ptr, len, offset, cookie }, &raw const handles[file])
        });
        // SAFETY: by the contract of `Cufile::transfer` the memory stays ours until the request's owner is dropped,
        // which happens when its last piece is finished. The worker outlives all pieces and keeps the handles. Pieces
        // in flight never exceed the capacity.
        let submitted = unsafe { batch.submit(entries) };
        if submitted.is_err() {
            for cookie in cookies {
                self.state.in_flight.remove(cookie);
            }
        }
        submitted
    }

    /// Polls for completions and finishes their pieces.
    fn reap(&mut self) {
        let Some(Submission::Batch(batch)) = &mut self.submission else { return };
        if self.state.in_flight.is_empty() {
            return;
        }
        let polled = batch.poll().map(Iterator::collect::<Vec<BatchEvent>>);
        let events = match polled {
            Ok(events) => events,
            Err(fault) => {
                self.state.unanswered += 1;
                if self.state.unanswered >= UNANSWERED_MAX {
                    self.lose_all(&fault.to_string());
                }
                return;
            }
        };
        self.state.unanswered = 0;
        self.state.quiet = if events.is_empty() { self.state.quiet.saturating_add(1) } else { 0 };
        for BatchEvent { cookie, result } in events {
            let Some(piece) = self.state.in_flight.try_remove(cookie) else {
                return self.lose_all("libcufile reported the completion of a transfer that is not in flight");
            };
            self.state.finish(piece, result.map_err(|fault| fault.to_string()));
        }
    }

    /// Transfers one piece synchronously.
    fn transfer_one(&mut self) {
        let Some(piece) = self.state.backlog.pop_front() else { return };
        let Request { kind, file, .. } = self.state.actives[piece.active].request;
        let Part { ptr, len, offset } = piece.part;
        // Counts as in flight, so that its memory stays reserved if this call never returns.
        let cookie = self.state.in_flight.insert(piece);
        // SAFETY: by the contract of `Cufile::transfer`, while the request's owner lives.
        let moved = unsafe { self.handles[file].transfer(kind, ptr, len, offset) };
        self.state.in_flight.remove(cookie);
        self.state.finish(piece, moved.map_err(|fault| fault.to_string()));
    }

    /// Takes the worker out of service because libcufile no longer reports completions. The memory of its transfers is
    /// never freed.
    fn lose_all(&mut self, reason: &str) {
        let pieces = self.state.in_flight.len();
        // Destroying the batch would wait for transfers that never end.
        std::mem::forget(self.submission.take());
        for piece in std::mem::take(&mut self.state.in_flight) {
            if let Some(active) = self.state.actives.get_mut(piece.1.active) {
                active.request.lose(reason);
            }
        }
        self.state.lost = Some(format!("libcufile is out of service: {reason}"));
        // Lost transfers still use the handles and registrations.
        std::mem::take(&mut self.handles).into_iter().for_each(std::mem::forget);
        std::mem::take(&mut self.ranges.registered).into_iter().for_each(std::mem::forget);
        self.refuse_all();
        log(|| tracing::error!(reason, pieces, "libcufile keeps the memory of its transfers"));
    }

    /// Fails all requests that libcufile does not hold.
    fn refuse_all(&mut self) {
        self.state.backlog.clear();
        let reason = self.state.lost.as_deref().unwrap_or("libcufile is out of service");
        for mut active in self.state.actives.drain() {
            active.request.fail(reason.to_owned());
        }
    }

    /// Makes the CUDA context current, which every call of libcufile needs.
    pub(super) fn bind(&self) -> Result<(), String> {
        self.gpu.bind().map_err(|fault| fault.to_string())
    }
}

impl Transfers {
    /// How long to wait before the next poll.
    fn poll_delay(&self) -> Duration {
        let doublings = (self.quiet.saturating_sub(POLLS_EAGER) / 16).min(16);
        (POLL * (1 << doublings)).min(POLL_MAX)
    }

    /// Fails all pieces not submitted yet.
    fn fail_backlog(&mut self) {
        for piece in std::mem::take(&mut self.backlog) {
            self.finish(piece, Err("the cuFile route was retired".into()));
        }
    }

    /// Finishes a transfer of a piece; a short transfer is resumed.
    fn finish(&mut self, mut piece: Piece, result: Result<usize, String>) {
        let part = &mut piece.part;
        let fault = match result {
            Err(fault) => Some(fault),
            Ok(moved) if moved > part.len => {
                Some(format!("libcufile reported {moved} bytes for {} requested", part.len))
            }
            Ok(moved) if moved == part.len => None,
            Ok(moved) => {
                // Resumes at a multiple of the alignment of direct I/O.
                let moved_for_good = moved - moved % IO_ALIGN;
                piece.no_progress = if moved_for_good > 0 { 0 } else { piece.no_progress + 1 };
                if moved > 0 && piece.no_progress < NO_PROGRESS_MAX {
                    part.ptr = part.ptr.wrapping_add(moved_for_good);
                    part.offset += moved_for_good as u64;
                    part.len -= moved_for_good;
                    return self.backlog.push_front(piece);
                }
                Some(format!("{moved} bytes of {} at {} were moved, then no more", part.len, part.offset))
            }
        };
        let active = &mut self.actives[piece.active];
        active.left -= 1;
        active.fault = active.fault.take().or(fault);
        if active.left == 0 {
            let Active { mut request, fault, .. } = self.actives.remove(piece.active);
            request.end(fault);
        }
    }
}

impl Ranges {
    /// An empty set.
    pub(super) fn none() -> Self {
        Ranges { all: Vec::new(), registered: Vec::new(), refused: false }
    }

    /// Cuts `buffers` into ranges of whole segments, each short enough for one direct transfer.
    pub(super) fn of(buffers: &[Buffer], bytes_max: usize) -> Self {
        let mut all: Vec<(usize, usize)> = Vec::new();
        for Buffer { segment, count } in buffers {
            let (start, at_once) = (segment.ptr.expose_provenance(), bytes_max / segment.len);
            // Segments longer than `bytes_max` go through libcufile's own buffers, registered or not.
            let firsts = (0..*count).step_by(at_once.max(1)).filter(|_| at_once > 0);
            all.extend(firsts.map(|first| (start + first * segment.len, at_once.min(count - first) * segment.len)));
        }
        all.sort_unstable();
        let registered = all.iter().map(|_| None).collect();
        Ranges { all, registered, refused: false }
    }

    /// Registers the range around `part`, if there is one and it is not registered yet.
    fn register(&mut self, driver: &'static Driver, part: &Part) {
        if self.refused || self.registered.is_empty() {
            return;
        }
        let at = self.all.partition_point(|&(start, _)| start <= part.ptr.addr());
        let Some(at) = at.checked_sub(1) else { return };
        let (start, bytes) = self.all[at];
        if part.ptr.addr() + part.len > start + bytes || self.registered[at].is_some() {
            return;
        }
        // SAFETY: a range of the pool, which the worker keeps longer than its registrations.
        match unsafe { Registration::new(driver, std::ptr::with_exposed_provenance_mut(start), bytes) } {
            Ok(registration) => self.registered[at] = Some(registration),
            Err(fault) => {
                self.refused = true;
                let registered = self.registered.iter().flatten().count();
                log(|| {
                    tracing::warn!(%fault, registered, "libcufile goes through its own buffers for the other slots");
                });
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.state.in_flight.is_empty() {
            return;
        }
        // Only a panic drops a worker with transfers in flight: libcufile still uses their memory.
        self.lose_all("its worker thread panicked");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvhoist_base::block::Segment;

    #[test]
    fn ranges_consist_of_whole_segments_and_respect_the_limit() {
        let buffer = |start: usize, len, count| Buffer {
            segment: Segment { ptr: std::ptr::without_provenance_mut(start), len },
            count,
        };
        let ranges =
            Ranges::of(&[buffer(0x9000, 0x1000, 1), buffer(0x1000, 0x1000, 3), buffer(0x10000, 0x4000, 2)], 0x2800);
        assert_eq!(ranges.all, [(0x1000, 0x2000), (0x3000, 0x1000), (0x9000, 0x1000)]);
    }
}

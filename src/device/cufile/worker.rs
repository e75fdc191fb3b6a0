//! The thread that calls the library.

use std::{collections::VecDeque, sync::Arc, thread, time::Duration};

use slab::Slab;

use super::{
    Buffer, Part,
    queue::{Queue, Request, Wait},
};
use crate::{
    block::IO_ALIGN,
    device::{
        cuda::Gpu,
        cufile::sys::{Batch, BatchEntry, BatchEvent, Driver, Handle, Registration},
    },
};

/// How long it looks for new requests before it asks again for completions: asking takes 1 to 20 us.
const POLL: Duration = Duration::from_micros(30);

/// So often it asks at that pace; then more and more slowly, for what may never end must not take a processor.
const POLLS_EAGER: u32 = 256;
const POLL_MAX: Duration = Duration::from_millis(10);

/// How often in a row a transfer may bring a piece no further.
const FRUITLESS_MAX: u32 = 8;

/// How often in a row the library may refuse to say what has ended.
const UNANSWERED_MAX: u32 = 3;

/// How bytes are moved.
pub(super) enum Way {
    /// Many at once, where the path is direct.
    Batch(Batch),
    /// One after the other: in compat mode batches are slow, and larger ones hang.
    OneByOne,
}

/// Ranges of device memory, registered when the first request touches them.
pub(super) struct Ranges {
    /// Start and length, by start.
    pub(super) all: Vec<(usize, usize)>,
    pub(super) registered: Vec<Option<Registration>>,
    /// The library refused one: the others go unregistered too, through buffers of its own.
    pub(super) refused: bool,
}

/// A request that the library has, in whole or in part.
struct Active {
    request: Request,
    /// Pieces that have not ended.
    left: usize,
    fault: Option<String>,
}

/// A contiguous range that is being moved, or is to be.
#[derive(Clone, Copy)]
struct Piece {
    active: usize,
    part: Part,
    fruitless: u32,
}

/// Dropped in this order: batches before files and memory.
pub(super) struct Worker {
    pub(super) way: Option<Way>,
    pub(super) ranges: Ranges,
    pub(super) handles: Vec<Handle>,
    pub(super) driver: &'static Driver,
    pub(super) gpu: Arc<Gpu>,
    pub(super) capacity: usize,
    pub(super) queue: Arc<Queue>,
    pub(super) state: Moving,
}

/// What is being moved.
#[derive(Default)]
pub(super) struct Moving {
    actives: Slab<Active>,
    /// Pieces that the library does not have.
    backlog: VecDeque<Piece>,
    /// Pieces that it has; their places are the cookies.
    in_flight: Slab<Piece>,
    unanswered: u32,
    /// Why nothing can be moved any more.
    lost: Option<String>,
    /// How often in a row nothing had ended.
    quiet: u32,
}

impl Worker {
    /// Serves requests until there will be no more and all have ended.
    pub(super) fn serve(&mut self) {
        loop {
            // What the library cannot take yet stays where it can be taken back from.
            let room = self.capacity.saturating_sub(self.state.in_flight.len() + self.state.backlog.len());
            let wait = match (self.state.in_flight.is_empty(), self.state.backlog.is_empty()) {
                (true, true) => Wait::ForEver,
                (false, _) if room > 0 => Wait::For(self.state.patience()),
                _ => Wait::No,
            };
            let (requests, closed) = self.queue.take(room, wait);
            if requests.is_empty() && !self.state.in_flight.is_empty() && (closed || room == 0) {
                thread::sleep(self.state.patience());
            }
            let idle = requests.is_empty() && self.state.actives.is_empty();
            if closed && idle {
                return;
            }
            requests.into_iter().for_each(|request| self.admit(request));
            if closed {
                self.state.give_back_backlog();
            }
            match &self.way {
                Some(Way::Batch(_)) => {
                    self.submit();
                    self.reap();
                }
                Some(Way::OneByOne) => self.move_one(),
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
        self.state.backlog.extend(parts.into_iter().map(|part| Piece { active, part, fruitless: 0 }));
    }

    /// Hands the library as much as it may have.
    fn submit(&mut self) {
        let room = self.capacity.saturating_sub(self.state.in_flight.len()).min(self.state.backlog.len());
        if room == 0 {
            return;
        }
        let pieces: Vec<Piece> = self.state.backlog.drain(..room).collect();
        let Err(fault) = self.submit_pieces(&pieces) else { return };
        if let [piece] = pieces[..] {
            return self.state.settle(piece, Err(fault.to_string()));
        }
        // It takes all of them or none: one that it does not like must not fail the others.
        for piece in pieces {
            if let Err(fault) = self.submit_pieces(&[piece]) {
                self.state.settle(piece, Err(fault.to_string()));
            }
        }
    }

    fn submit_pieces(&mut self, pieces: &[Piece]) -> Result<(), crate::device::cufile::sys::CufileFault> {
        let Some(Way::Batch(batch)) = &mut self.way else { return Ok(()) };
        let cookies: Vec<usize> = pieces.iter().map(|piece| self.state.in_flight.insert(*piece)).collect();
        let (handles, actives) = (&self.handles, &self.state.actives);
        let entries = pieces.iter().zip(&cookies).map(|(piece, &cookie)| {
            let Request { kind, file, .. } = actives[piece.active].request;
            let Part { ptr, len, offset } = piece.part;
            (BatchEntry { kind, ptr, len, offset, cookie }, &raw const handles[file])
        });
        // SAFETY: by the contract of `Cufile::transfer` the memory stays ours until the request's owner is dropped,
        // which happens when its last piece has ended; handles live as long as the worker, which outlives all pieces;
        // pieces in flight are never more than the capacity.
        let submitted = unsafe { batch.submit(entries) };
        if submitted.is_err() {
            for cookie in cookies {
                self.state.in_flight.remove(cookie);
            }
        }
        submitted
    }

    /// Takes up what has ended.
    fn reap(&mut self) {
        let Some(Way::Batch(batch)) = &mut self.way else { return };
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
                return self.lose_all("libcufile reported the end of a transfer that is not under way");
            };
            self.state.settle(piece, result.map_err(|fault| fault.to_string()));
        }
    }

    /// Moves one piece, and waits for it.
    fn move_one(&mut self) {
        let Some(piece) = self.state.backlog.pop_front() else { return };
        let Request { kind, file, .. } = self.state.actives[piece.active].request;
        let Part { ptr, len, offset } = piece.part;
        // So that nobody takes it for ended, should this thread not come back.
        let cookie = self.state.in_flight.insert(piece);
        // SAFETY: by the contract of `Cufile::transfer`, for as long as the request's owner lives.
        let moved = unsafe { self.handles[file].transfer(kind, ptr, len, offset) };
        self.state.in_flight.remove(cookie);
        self.state.settle(piece, moved.map_err(|fault| fault.to_string()));
    }

    /// The library does not say any more what has ended: what it has stays with it for good.
    fn lose_all(&mut self, reason: &str) {
        tracing::error!(reason, pieces = self.state.in_flight.len(), "libcufile keeps what it was given");
        // Destroying it would wait for what never ends.
        std::mem::forget(self.way.take());
        for piece in std::mem::take(&mut self.state.in_flight) {
            if let Some(active) = self.state.actives.get_mut(piece.1.active) {
                active.request.lose(reason);
            }
        }
        self.state.lost = Some(format!("libcufile is out of service: {reason}"));
        // Handles and registrations are in use by what was lost.
        std::mem::take(&mut self.handles).into_iter().for_each(std::mem::forget);
        std::mem::take(&mut self.ranges.registered).into_iter().for_each(std::mem::forget);
        self.refuse_all();
    }

    /// Nothing can be moved any more.
    fn refuse_all(&mut self) {
        self.state.backlog.clear();
        let reason = self.state.lost.as_deref().unwrap_or("libcufile is out of service");
        for mut active in self.state.actives.drain() {
            active.request.fail(reason.to_owned());
        }
    }

    /// The context that every call of the library needs.
    pub(super) fn bind(&self) -> Result<(), String> {
        self.gpu.bind().map_err(|fault| fault.to_string())
    }
}

impl Moving {
    /// How long to wait before asking again.
    fn patience(&self) -> Duration {
        let doublings = (self.quiet.saturating_sub(POLLS_EAGER) / 16).min(16);
        (POLL * (1 << doublings)).min(POLL_MAX)
    }

    /// Ends, as failed, all pieces that the library does not have.
    fn give_back_backlog(&mut self) {
        for piece in std::mem::take(&mut self.backlog) {
            self.settle(piece, Err("the route was given up".into()));
        }
    }

    /// Ends a transfer of a piece: a short one goes on where it stopped.
    fn settle(&mut self, mut piece: Piece, result: Result<usize, String>) {
        let part = &mut piece.part;
        let fault = match result {
            Err(fault) => Some(fault),
            Ok(moved) if moved > part.len => Some(format!("{moved} bytes were reported for {} asked", part.len)),
            Ok(moved) if moved == part.len => None,
            Ok(moved) => {
                // On from a multiple of what direct I/O works in.
                let moved_for_good = moved - moved % IO_ALIGN;
                piece.fruitless = if moved_for_good > 0 { 0 } else { piece.fruitless + 1 };
                if moved > 0 && piece.fruitless < FRUITLESS_MAX {
                    part.ptr = part.ptr.wrapping_add(moved_for_good);
                    part.offset += moved_for_good as u64;
                    part.len -= moved_for_good;
                    return self.backlog.push_front(piece);
                }
                Some(format!("{moved} bytes of {} at {} were moved, and then no more", part.len, part.offset))
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
    /// None.
    pub(super) fn none() -> Self {
        Ranges { all: Vec::new(), registered: Vec::new(), refused: false }
    }

    /// Ranges of `buffers`, each as long as the library can use in one piece and made of whole segments.
    pub(super) fn of(buffers: &[Buffer], bytes_max: usize) -> Self {
        let mut all: Vec<(usize, usize)> = Vec::new();
        for Buffer { segment, count } in buffers {
            let (start, at_once) = (segment.ptr.expose_provenance(), bytes_max / segment.len);
            // Longer ones go through buffers of the library's own in any case.
            let firsts = (0..*count).step_by(at_once.max(1)).filter(|_| at_once > 0);
            all.extend(firsts.map(|first| (start + first * segment.len, at_once.min(count - first) * segment.len)));
        }
        all.sort_unstable();
        let registered = all.iter().map(|_| None).collect();
        Ranges { all, registered, refused: false }
    }

    /// Registers what `part` lies in, if that is known and was not yet.
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
        // SAFETY: a range of the pool, which the worker keeps for longer than its registrations.
        match unsafe { Registration::new(driver, std::ptr::with_exposed_provenance_mut(start), bytes) } {
            Ok(registration) => self.registered[at] = Some(registration),
            Err(fault) => {
                let registered = self.registered.iter().flatten().count();
                tracing::warn!(%fault, registered, "libcufile goes through its own buffers for the other slots");
                self.refused = true;
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.state.in_flight.is_empty() {
            return;
        }
        // Only a panic comes here: what the library has is never given back.
        self.lose_all("its thread has panicked");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Segment;

    #[test]
    fn ranges_are_of_whole_segments_and_no_longer_than_allowed() {
        let buffer = |start: usize, len, count| Buffer {
            segment: Segment { ptr: std::ptr::without_provenance_mut(start), len },
            count,
        };
        let ranges =
            Ranges::of(&[buffer(0x9000, 0x1000, 1), buffer(0x1000, 0x1000, 3), buffer(0x10000, 0x4000, 2)], 0x2800);
        assert_eq!(ranges.all, [(0x1000, 0x2000), (0x3000, 0x1000), (0x9000, 0x1000)]);
    }
}

//! The queue of work requests: batches are cut into RDMA WRITEs, posted in chains, and known to be done by counting.
//!
//! Work requests are numbered from 0 on, and the connection completes them in that order. A completion of number n, of
//! which only every [`SIGNAL_EVERY`]th makes one, means that all up to n are done; a batch is done when its last one
//! is.

use std::{
    collections::VecDeque,
    rc::Rc,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

use super::regions::{Holds, Regions, Side};
use crate::{
    device::{
        CopyBatch,
        cuda::StreamMark,
        rdma::{Completion, Path, Piece, QueuePair, SIGNALLED, WorkRequest, status_text},
    },
    error::{Error, Result},
};

/// Work requests of one post.
const CHAIN: usize = 64;

/// Chains posted in one turn of the reactor: about 20 us.
const CHAINS_PER_TURN: usize = 4;

/// Every one of so many makes a completion, and the last of each chain.
const SIGNAL_EVERY: u64 = 16;

/// ... and whichever ends so many bytes without one: a slow device is to be told from one that does nothing.
const SIGNAL_BYTES: usize = 1 << 20;

/// Bytes of one work request at most: more gain nothing, and a completion would come late.
const REQUEST_BYTES_MAX: usize = 1 << 20;

pub(super) type Answer = oneshot::Sender<(Result<()>, CopyBatch)>;

/// What a stream of batches waits for, before its next one may begin.
pub trait Hold {
    /// True once it is over.
    ///
    /// # Errors
    /// Why it never will be; the batch is answered with it.
    fn is_over(&self) -> Result<bool>;
}

impl Hold for StreamMark {
    fn is_over(&self) -> Result<bool> {
        self.is_passed()
    }
}

/// A batch that was accepted: every range of it is registered.
pub(super) struct Accepted {
    pub(super) batch: CopyBatch,
    pub(super) holds: Holds,
    pub(super) answer: Answer,
    /// What it waits for.
    pub(super) after: Option<Rc<dyn Hold>>,
}

/// A batch of which some work requests are posted.
struct Entering {
    accepted: Accepted,
    op: usize,
    offset: usize,
}

/// A batch all of whose work requests are numbered.
struct Flight {
    accepted: Accepted,
    /// One more than the number of the last.
    end: u64,
    /// Why it failed, where it is known already.
    fault: Option<String>,
}

/// Batches of one stream, in order.
struct Line {
    stream: u64,
    waiting: VecDeque<Accepted>,
}

/// Batches that are done, and with what.
pub(super) type Landed = Vec<(Accepted, Result<()>)>;

pub(super) struct Queue {
    qp: QueuePair,
    path: Path,
    request_bytes_max: usize,
    chain: Box<[WorkRequest]>,
    pieces: Box<[Piece]>,
    pieces_max: usize,
    /// Part of `chain` that is built and not posted.
    unposted: std::ops::Range<usize>,
    /// Work requests that were posted, ever.
    posted: u64,
    /// Those of them that are done.
    done: u64,
    /// One more than the number of the last that makes a completion.
    signalled: u64,
    /// Completions of smaller numbers are of before the last reset.
    generation: u64,
    /// After a failure: one more than the largest number that has come back.
    flushed: u64,
    flying: VecDeque<Flight>,
    entering: Option<Entering>,
    lines: Vec<Line>,
    /// The line to be asked first.
    turn: usize,
    completions: Box<[Completion]>,
    /// A failure was seen.
    failed: bool,
    /// When the first work request was posted behind which none was under way.
    busy_since: Instant,
    /// A bad completion was seen: those after it say nothing of what was done.
    bad: bool,
}

impl Queue {
    pub(super) fn new(qp: QueuePair, path: Path) -> Self {
        let pieces_max = qp.pieces() as usize;
        Queue {
            request_bytes_max: REQUEST_BYTES_MAX.min(path.message_bytes_max as usize),
            chain: vec![WorkRequest::WRITE; CHAIN].into(),
            pieces: vec![Piece::default(); CHAIN * pieces_max].into(),
            pieces_max,
            unposted: 0..0,
            posted: 0,
            done: 0,
            signalled: 0,
            generation: 0,
            flushed: 0,
            flying: VecDeque::with_capacity(CHAIN),
            entering: None,
            lines: vec![Line { stream: 0, waiting: VecDeque::with_capacity(CHAIN) }],
            turn: 0,
            completions: vec![Completion::NONE; CHAIN].into(),
            failed: false,
            busy_since: Instant::now(),
            bad: false,
            qp,
            path,
        }
    }

    pub(super) fn qp(&self) -> &QueuePair {
        &self.qp
    }

    /// Takes a batch in; [`pump`](Self::pump) starts it.
    pub(super) fn accept(&mut self, stream: u64, accepted: Accepted) {
        match self.lines.iter_mut().find(|line| line.stream == stream) {
            Some(line) => line.waiting.push_back(accepted),
            None => self.lines.push(Line { stream, waiting: VecDeque::from([accepted]) }),
        }
    }

    /// No batch is anywhere in it.
    pub(super) fn is_idle(&self) -> bool {
        self.flying.is_empty() && !self.has_more()
    }

    /// Work requests are under way, or batches that wait for their last one to be known as done.
    pub(super) fn is_flying(&self) -> bool {
        self.posted > self.done || !self.flying.is_empty()
    }

    /// How long work has been under way without a pause.
    pub(super) fn busy_for(&self) -> Duration {
        self.busy_since.elapsed()
    }

    /// Batches wait for room, or for what holds their stream.
    pub(super) fn has_more(&self) -> bool {
        self.entering.is_some() || !self.unposted.is_empty() || self.lines.iter().any(|line| !line.waiting.is_empty())
    }

    /// A stream waits for something that tells nobody when it is over.
    pub(super) fn is_held(&self) -> bool {
        self.lines.iter().any(|line| line.waiting.front().is_some_and(|front| front.after.is_some()))
    }

    /// Posts as much as there is room for, up to what one turn of the reactor may take; true if there is more.
    ///
    /// # Errors
    /// Why the queue is of no use any more.
    pub(super) fn pump(&mut self, regions: &Regions, landed: &mut Landed) -> Result<bool, String> {
        for _ in 0..CHAINS_PER_TURN {
            if self.unposted.is_empty() {
                let count = self.build(regions, landed);
                self.unposted = 0..count;
            }
            if self.unposted.is_empty() || !self.post()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Posts what is built; false where the device has no room now.
    fn post(&mut self) -> Result<bool, String> {
        let first = &raw mut self.chain[self.unposted.start];
        // SAFETY: `build` linked these work requests to one another and to pieces within arrays of `self`, which stay.
        // The memory belongs to batches in `entering` or `flying`, which hold it and its regions until the work is
        // done, or the queue pair is reset or destroyed.
        let (taken, fault) = match unsafe { self.qp.post(first) } {
            Ok(()) => (self.unposted.len(), None),
            Err(refused) => {
                let bytes = refused.first.addr().saturating_sub(first.addr());
                (usize::min(bytes / size_of::<WorkRequest>(), self.unposted.len()), Some(refused.fault))
            }
        };
        let taken_to = self.unposted.start + taken;
        let signals = |request: &&WorkRequest| request.flags & SIGNALLED != 0;
        if let Some(last) = self.chain[self.unposted.start..taken_to].iter().rev().find(signals) {
            self.signalled = last.id + 1;
        }
        if self.posted == self.done && taken > 0 {
            self.busy_since = Instant::now();
        }
        self.posted += taken as u64;
        self.unposted.start = taken_to;
        match fault {
            None => Ok(true),
            // A completion will come, and make room.
            Some(fault) if fault.errno() == libc::ENOMEM && self.signalled > self.done => Ok(false),
            Some(fault) => Err(fault.to_string()),
        }
    }

    /// Builds a chain from what waits; its length.
    fn build(&mut self, regions: &Regions, landed: &mut Landed) -> usize {
        let under_way = usize::try_from(self.posted - self.done).unwrap_or(usize::MAX);
        let room = (self.qp.depth() as usize).saturating_sub(under_way).min(CHAIN);
        let mut count = 0;
        while count < room {
            let Some(mut entering) = self.entering.take().or_else(|| self.next(landed)) else { break };
            let first = count;
            let fault = self.cut(&mut entering, regions, first, &mut count, room).err();
            if fault.is_none() && entering.op < entering.accepted.batch.ops().len() {
                self.entering = Some(entering);
                break;
            }
            let end = self.posted + count as u64;
            self.flying.push_back(Flight { accepted: entering.accepted, end, fault });
        }
        let mut silent_bytes = 0;
        for at in 0..count {
            let id = self.posted + at as u64;
            let (last, pieces) = (at + 1 == count, &raw mut self.pieces[at * self.pieces_max]);
            let next = if last { std::ptr::null_mut() } else { &raw mut self.chain[at + 1] };
            let request = &mut self.chain[at];
            request.id = id;
            request.next = next;
            request.pieces = pieces;
            let pieces = &self.pieces[at * self.pieces_max..][..request.piece_count as usize];
            silent_bytes += pieces.iter().map(|piece| piece.bytes as usize).sum::<usize>();
            let signals = last || (id + 1).is_multiple_of(SIGNAL_EVERY) || silent_bytes >= SIGNAL_BYTES;
            request.flags = if signals { SIGNALLED } else { 0 };
            silent_bytes = if signals { 0 } else { silent_bytes };
        }
        count
    }

    /// Cuts a batch into work requests from number `count` of the chain on, until it ends or there is no room. Those
    /// before `first` are another batch's.
    fn cut(
        &mut self,
        entering: &mut Entering,
        regions: &Regions,
        first: usize,
        count: &mut usize,
        room: usize,
    ) -> Result<(), String> {
        // Bytes of the request that was built last, which may gather more.
        let mut gathered = 0;
        while let Some(op) = entering.accepted.batch.ops().get(entering.op) {
            if entering.offset == op.len {
                (entering.op, entering.offset) = (entering.op + 1, 0);
                continue;
            }
            let (src, dst) = (op.src.addr() + entering.offset, op.dst.addr() + entering.offset);
            let gone = || "a region was given back before the copy in it had begun".to_owned();
            let (from, to) =
                (regions.find(Side::Source, src).ok_or_else(gone)?, regions.find(Side::Target, dst).ok_or_else(gone)?);
            let left = op.len - entering.offset;
            let len = left.min(from.end - src).min(to.end - dst).min(self.request_bytes_max);
            let piece = Piece { address: src as u64, bytes: len as u32, lkey: from.lkey };
            let joined = *count > first && {
                let request = &mut self.chain[*count - 1];
                let pieces = request.piece_count as usize;
                let joins = request.rkey == to.rkey
                    && request.remote_address + gathered as u64 == dst as u64
                    && pieces < self.pieces_max
                    && gathered + len <= self.request_bytes_max;
                if joins {
                    self.pieces[(*count - 1) * self.pieces_max + pieces] = piece;
                    request.piece_count += 1;
                    gathered += len;
                }
                joins
            };
            if !joined {
                if *count == room {
                    return Ok(());
                }
                let request = &mut self.chain[*count];
                request.piece_count = 1;
                request.remote_address = dst as u64;
                request.rkey = to.rkey;
                self.pieces[*count * self.pieces_max] = piece;
                gathered = len;
                *count += 1;
            }
            entering.offset += len;
        }
        Ok(())
    }

    /// The next batch whose stream is not held; streams take turns.
    fn next(&mut self, landed: &mut Landed) -> Option<Entering> {
        for _ in 0..self.lines.len() {
            let at = self.turn % self.lines.len();
            self.turn = at + 1;
            let line = &mut self.lines[at];
            let Some(front) = line.waiting.front() else { continue };
            let over = front.after.as_ref().map_or(Ok(true), |hold| hold.is_over());
            if matches!(over, Ok(false)) {
                continue;
            }
            let accepted = line.waiting.pop_front().expect("it has a front");
            if line.waiting.is_empty() && line.stream != 0 {
                self.lines.remove(at);
            }
            match over {
                Ok(_) => return Some(Entering { accepted, op: 0, offset: 0 }),
                Err(error) => landed.push((accepted, Err(error))),
            }
        }
        None
    }

    /// Takes completions and the batches that they end; true if there was one.
    ///
    /// # Errors
    /// What the first bad completion says.
    pub(super) fn harvest(&mut self, landed: &mut Landed) -> Result<bool, String> {
        let mut any = false;
        let mut result = Ok(());
        loop {
            let polled = self.qp.completions().poll(&mut self.completions);
            let count = match polled {
                Ok(count) => count,
                Err(fault) => {
                    result = result.and(Err(fault.to_string()));
                    0
                }
            };
            for at in 0..count {
                let completion = self.completions[at];
                result = result.and(self.completed(&completion));
            }
            any |= count > 0;
            if count < self.completions.len() {
                break;
            }
        }
        self.land(landed);
        result.map(|()| any)
    }

    fn completed(&mut self, completion: &Completion) -> Result<(), String> {
        let Completion { id, status, vendor_error, .. } = *completion;
        if id < self.generation || id >= self.posted {
            // Of before a reset. A number that was never given means nothing that could be trusted.
            return if id < self.generation { Ok(()) } else { Err(format!("a completion of nothing ({id})")) };
        }
        self.flushed = self.flushed.max(id + 1);
        if self.failed || self.bad {
            return Ok(());
        }
        if status == 0 {
            self.done = self.done.max(id + 1);
            return Ok(());
        }
        // All before it are done; itself and what came after is not.
        self.done = self.done.max(id);
        self.bad = true;
        Err(format!("{} (status {status}, vendor error {vendor_error:#x})", status_text(status)))
    }

    fn land(&mut self, landed: &mut Landed) {
        while self.flying.front().is_some_and(|flight| flight.end <= self.done) {
            let Flight { accepted, fault, .. } = self.flying.pop_front().expect("it is in front");
            let result = fault.map_or(Ok(()), |reason| Err(failure(reason)));
            landed.push((accepted, result));
        }
    }

    /// After a failure: ends all work. What waits is answered; what was posted stays until [`drained`](Self::drained).
    pub(super) fn fail(&mut self, reason: &str, landed: &mut Landed) {
        self.failed = true;
        if let Err(fault) = self.qp.fail() {
            tracing::debug!(%fault, "the queue pair did not go to its error state");
        }
        self.unposted = 0..0;
        if let Some(entering) = self.entering.take() {
            self.flying.push_back(Flight { accepted: entering.accepted, end: self.posted, fault: None });
        }
        for flight in &mut self.flying {
            flight.end = flight.end.min(self.posted);
            flight.fault = Some(reason.to_owned());
        }
        for line in &mut self.lines {
            let refused = |accepted| (accepted, Err(failure(reason.to_owned())));
            landed.extend(line.waiting.drain(..).map(refused));
        }
        self.lines.truncate(1);
    }

    /// All that was posted has come back.
    pub(super) fn drained(&self) -> bool {
        self.flushed == self.posted || self.done == self.posted
    }

    /// Whether [`fail`](Self::fail) was called since the last [`reset`](Self::reset).
    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    /// Takes the queue pair out of use: nothing that was posted touches memory any more. All batches are given back.
    ///
    /// # Errors
    /// The device did not do so; the batches stay.
    pub(super) fn reset(&mut self, landed: &mut Landed) -> Result<(), String> {
        self.qp.reset().map_err(|fault| fault.to_string())?;
        self.emptied(landed);
        Ok(())
    }

    /// The same by destroying the queue pair: it is gone then.
    pub(super) fn destroy(&mut self, landed: &mut Landed) -> Result<(), String> {
        self.qp.destroy().map_err(|fault| fault.to_string())?;
        self.emptied(landed);
        Ok(())
    }

    fn emptied(&mut self, landed: &mut Landed) {
        self.generation = self.posted;
        (self.done, self.flushed, self.signalled) = (self.posted, self.posted, self.posted);
        self.land(landed);
    }

    /// Takes a queue pair that was reset into use again.
    pub(super) fn connect(&mut self) -> Result<(), String> {
        self.qp.connect(&self.path).map_err(|fault| fault.to_string())?;
        (self.failed, self.bad) = (false, false);
        Ok(())
    }

    /// Leaves what is in flight to nobody: for a device that does not give it back.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.flying));
    }
}

pub(super) fn failure(reason: String) -> Error {
    Error::Copy { engine: "gdr", reason }
}

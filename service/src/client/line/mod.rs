//! The state of a connection that callers and the client's thread share.
//!
//! A caller sends its own request under the lock: handing it to the thread would cost a wake-up more. The thread
//! receives the replies, connects again, and does what has to wait: requests beyond the service's limits, bytes that
//! the socket does not take, deadlines.

#[cfg(test)]
mod tests;
mod thread;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Mutex, MutexGuard},
};

use tokio::{
    sync::{Notify, oneshot},
    time::{Duration, Instant},
};

use super::{
    order::{Answer, Call, Keeps, What},
    places::Lent,
};
use crate::{
    error::{Error, Result},
    link::Sender,
    protocol::{Reply, Request},
};

/// A call without its reply.
struct Pending {
    what: What,
    /// `None` once the caller is answered, or is gone: the service's reply is still awaited.
    reply: Option<Answer>,
    /// Until it is sent.
    frame: Option<Vec<u8>>,
    frame_bytes: usize,
    is_write: bool,
    /// When it is late, and for memory that the service has, when that is given up; `None` after that.
    deadline: Option<Instant>,
    /// It was canceled by its deadline.
    late: bool,
    /// `None` if it has no caller.
    _keeps: Option<Keeps>,
}

/// Answers to callers, and what their calls held. Both run code of callers, so they are sent without the lock.
#[derive(Default)]
#[must_use]
struct Answers(Vec<(Option<Answer>, Result<Reply>, Option<Pending>)>);

impl Answers {
    fn add(&mut self, mut pending: Pending, result: Result<Reply>) {
        self.0.push((pending.reply.take(), result, Some(pending)));
    }

    fn send(self) {
        for (answer, result, _pending) in self.0 {
            if let Some(answer) = answer {
                answer.send(result);
            }
        }
    }
}

/// Where the connection stands.
enum Phase {
    /// The thread connects, for the first time or to a service that is getting all memory that is lent, so memory that
    /// is taken back waits.
    Connecting,
    Up(Sender),
    /// The service has said goodbye, and will hang up.
    Parting(Sender),
    /// No service has any memory.
    Down,
    /// Closed: the thread has ended.
    Closed,
}

/// Calls, and the bytes of their frames.
#[derive(Clone, Copy)]
struct Amount {
    calls: usize,
    bytes: usize,
}

impl Amount {
    const NONE: Self = Amount { calls: 0, bytes: 0 };

    fn half(self) -> Self {
        Amount { calls: self.calls.div_ceil(2), bytes: self.bytes / 2 }
    }

    /// Whether a call with so many bytes goes beside these. One goes, whatever its size.
    fn has_room(self, bytes: usize, most: Self) -> bool {
        self.calls == 0 || (self.calls < most.calls && self.bytes + bytes <= most.bytes)
    }

    fn add(&mut self, bytes: usize) {
        *self = Amount { calls: self.calls + 1, bytes: self.bytes + bytes };
    }

    fn remove(&mut self, bytes: usize) {
        *self = Amount { calls: self.calls.saturating_sub(1), bytes: self.bytes.saturating_sub(bytes) };
    }
}

struct State {
    phase: Phase,
    /// Why the service cannot be reached; `None` while it can.
    away: Option<Error>,
    /// Regions that the service has, or gets when it is back.
    lent: BTreeMap<u32, Lent>,
    pending: BTreeMap<u64, Pending>,
    /// Calls that are not sent yet, in order.
    waiting: VecDeque<u64>,
    /// Writes, in order, that were first in line while writes had their half: they are older than what waits.
    overtaken: VecDeque<u64>,
    /// When each call without a reply is late.
    deadlines: BTreeSet<(Instant, u64)>,
    /// When the thread wakes up by itself.
    timer: Option<Instant>,
    /// What the service has, and the writes among it: half of `sent_max` at most, as no load waits for writes.
    sent: Amount,
    sent_writes: Amount,
    sent_max: Amount,
    /// The id of the last request that no caller has made. Callers' ids are even.
    own_id: u64,
    /// Who waits for the close, once it has begun.
    closing: Option<Vec<oneshot::Sender<Result<()>>>>,
    /// When the service is to have hung up.
    closed_by: Option<Instant>,
    /// It has not: it may have this process's memory for as long as it lives, and nobody is told when it has not.
    abandoned: bool,
}

impl State {
    /// Takes a call out, with its deadline.
    fn take(&mut self, id: u64) -> Option<Pending> {
        let pending = self.pending.remove(&id)?;
        if let Some(late) = pending.deadline {
            self.deadlines.remove(&(late, id));
        }
        Some(pending)
    }

    /// Has a call wait to be sent. Calls that were dropped meanwhile leave the line once they are most of it.
    fn wait(&mut self, id: u64) {
        let State { waiting, overtaken, pending, .. } = self;
        if waiting.len() + overtaken.len() > 2 * pending.len() {
            [&mut *waiting, overtaken].into_iter().for_each(|line| line.retain(|id| pending.contains_key(id)));
        }
        waiting.push_back(id);
    }

    /// Whether the service was offered a region again, and has not answered.
    fn is_offered(&self, number: u32) -> bool {
        self.pending.values().any(|pending| matches!(&pending.what, What::Offer(lent) if lent.number == number))
    }

    /// Takes the next call out of the line that the service has room for. Calls pass no others, but for writes beyond
    /// their half.
    fn next(&mut self) -> Option<&mut Pending> {
        let State { waiting, overtaken, pending, sent, sent_writes, sent_max, .. } = self;
        let mut writes_wait = false;
        loop {
            let line = if writes_wait || overtaken.is_empty() { &mut *waiting } else { &mut *overtaken };
            let id = *line.front()?;
            let found = pending.get(&id).filter(|pending| pending.frame.is_some());
            let Some((bytes, is_write)) = found.map(|pending| (pending.frame_bytes, pending.is_write)) else {
                line.pop_front();
                continue;
            };
            if is_write && (writes_wait || !sent_writes.has_room(bytes, sent_max.half())) {
                if writes_wait || overtaken.is_empty() {
                    waiting.pop_front();
                    overtaken.push_back(id);
                }
                writes_wait = true;
                continue;
            }
            if !sent.has_room(bytes, *sent_max) {
                return None;
            }
            line.pop_front();
            sent.add(bytes);
            if is_write {
                sent_writes.add(bytes);
            }
            return pending.get_mut(&id);
        }
    }

    /// The service has answered a call.
    fn ended(&mut self, pending: &Pending) {
        self.sent.remove(pending.frame_bytes);
        if pending.is_write {
            self.sent_writes.remove(pending.frame_bytes);
        }
    }

    /// Sends bytes; true if the socket does not take all of them now. The thread finds out that a socket is broken: it
    /// reads all that has come.
    fn flush(&mut self) -> bool {
        let Phase::Up(sender) = &mut self.phase else { return false };
        sender.flush().is_ok() && sender.bytes() > 0
    }
}

/// A connection's state, with its lock.
pub(super) struct Line {
    state: Mutex<State>,
    /// Wakes the client's thread.
    pub(super) woken: Notify,
    /// The service's socket, for messages.
    name: String,
    deadline: Duration,
    /// From the deadline until memory of a call is given up.
    give_up: Option<Duration>,
}

impl Line {
    pub(super) fn new(name: String, deadline: Duration, give_up: Option<Duration>) -> Self {
        let state = State {
            phase: Phase::Connecting,
            away: None,
            lent: BTreeMap::new(),
            pending: BTreeMap::new(),
            waiting: VecDeque::new(),
            overtaken: VecDeque::new(),
            deadlines: BTreeSet::new(),
            timer: None,
            sent: Amount::NONE,
            sent_writes: Amount::NONE,
            sent_max: Amount { calls: 1, bytes: 0 },
            own_id: 1,
            closing: None,
            closed_by: None,
            abandoned: false,
        };
        Line { state: Mutex::new(state), woken: Notify::new(), name, deadline, give_up }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics under it")
    }

    /// Whether the service can be reached now.
    pub(super) fn is_up(&self) -> bool {
        matches!(self.lock().phase, Phase::Up(_))
    }

    /// Sends a call, or queues it. Fails at once while the service is away, which its answer is told, too.
    pub(super) fn begin(&self, call: Call) -> Result<()> {
        // Before the lock, and so dropped after it: `keeps` may wake a caller.
        let Call { id, frame, is_write, what, reply, keeps } = call;
        let mut state = self.lock();
        let taken_back = match what {
            What::Unregister(number) => Some(number),
            _ => None,
        };
        let refused = match taken_back {
            None => state.away.clone(),
            Some(_) => state.abandoned.then(|| self.lateness(true)),
        };
        let is_closed = matches!(state.phase, Phase::Closed) || (taken_back.is_none() && state.closing.is_some());
        if let Some(error) = refused.or_else(|| is_closed.then_some(Error::Closed)) {
            drop(state);
            reply.send(Err(error.clone()));
            return Err(error);
        }
        let late = Instant::now() + self.deadline;
        let deadline = if let Some(number) = taken_back {
            // Not given to a service that comes after this one.
            state.lent.remove(&number);
            self.give_up.map(|patience| late + patience)
        } else {
            Some(late)
        };
        let (frame_bytes, keeps) = (frame.len(), Some(keeps));
        let (reply, frame) = (Some(reply), Some(frame));
        let mut pending = Pending { what, reply, frame, frame_bytes, is_write, deadline, late: false, _keeps: keeps };
        match state.phase {
            // The service has none of this process's memory.
            Phase::Down => {
                drop(state);
                let mut answers = Answers::default();
                answers.add(pending, Ok(Reply::Done));
                answers.send();
                return Ok(());
            }
            // Else the service might answer this first, and take the memory after it.
            Phase::Up(_) if taken_back.is_some_and(|number| state.is_offered(number)) => {}
            // The memory is the caller's again at the hang-up.
            Phase::Parting(_) => pending.frame = None,
            Phase::Up(_) if state.closing.is_some() => pending.frame = None,
            _ if matches!(pending.what, What::Wait) => {}
            Phase::Connecting | Phase::Up(_) | Phase::Closed => state.wait(id),
        }
        state.pending.insert(id, pending);
        if let Some(late) = deadline {
            state.deadlines.insert((late, id));
            if state.timer.is_none_or(|timer| timer > late) {
                self.woken.notify_one();
            }
        }
        self.send(&mut state);
        Ok(())
    }

    /// Sends calls that wait, as far as the service takes them, and wakes the thread for bytes that are left.
    fn send(&self, state: &mut State) {
        if !matches!(state.phase, Phase::Up(_)) {
            return;
        }
        while let Some(pending) = state.next() {
            let frame = pending.frame.take().expect("it waits to be sent");
            let fd = match &pending.what {
                What::Register(lent) | What::Offer(lent) => lent.fd(),
                _ => None,
            };
            if let Phase::Up(sender) = &mut state.phase {
                sender.push(frame, fd);
            }
        }
        self.flush(state);
    }

    /// Sends bytes that are left, and wakes the thread for those that the socket does not take.
    fn flush(&self, state: &mut State) {
        if state.flush() {
            self.woken.notify_one();
        }
    }

    /// Cancels a call that was dropped: the service begins no more of its blocks.
    pub(super) fn forget(&self, id: u64) {
        let mut state = self.lock();
        let forgotten = self.cancel(&mut state, id);
        drop(state);
        drop(forgotten);
    }

    fn cancel(&self, state: &mut State, id: u64) -> Option<Pending> {
        let pending = state.pending.get_mut(&id)?;
        if pending.frame.is_some() {
            return state.take(id);
        }
        if let Phase::Up(sender) = &mut state.phase {
            sender.push(Request::Cancel { request: id }.encode(0), None);
            self.flush(state);
        }
        None
    }

    /// Sends what has no reply, while the service can be reached.
    pub(super) fn say(&self, request: &Request) {
        let mut state = self.lock();
        if let Phase::Up(sender) = &mut state.phase {
            sender.push(request.encode(0), None);
            self.flush(&mut state);
        }
    }

    /// Says that nothing more comes. The service hangs up when it has let go of this process's memory.
    pub(super) fn close(&self, waits: Option<oneshot::Sender<Result<()>>>) -> Result<()> {
        let mut state = self.lock();
        if matches!(state.phase, Phase::Closed) {
            return Err(if state.abandoned { self.lateness(true) } else { Error::Closed });
        }
        state.closing.get_or_insert_default().extend(waits);
        let by = self.give_up.map(|patience| Instant::now() + self.deadline + patience);
        state.closed_by = state.closed_by.or(by);
        if let Phase::Up(sender) | Phase::Parting(sender) = &state.phase {
            sender.end();
        }
        drop(state);
        self.woken.notify_one();
        Ok(())
    }
}

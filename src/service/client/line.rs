//! The state of a connection that callers and the client's thread share.
//!
//! A caller sends its own request under the lock: handing it to the thread would cost a wake-up more. The thread
//! receives the replies, connects again, and does what has to wait: requests beyond the service's limits, bytes that
//! the socket does not take, deadlines.

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    sync::{Arc, Mutex, MutexGuard},
};

use tokio::{
    sync::{Notify, oneshot},
    time::{Duration, Instant},
};

use super::{
    order::{Call, Keeps, What},
    places::Lent,
};
use crate::{
    error::{Error, Result, ServiceFault},
    service::{
        link::Sender,
        protocol::{Failure, Limits, Reply, Request},
    },
};

/// A call without its reply.
struct Pending {
    what: What,
    /// `None` once the caller is answered, or is gone: the service's reply is still awaited.
    reply: Option<Answer>,
    /// Until it is sent.
    frame: Option<Vec<u8>>,
    frame_bytes: usize,
    _keeps: Keeps,
}

type Answer = oneshot::Sender<Result<Reply>>;

/// Answers to callers, and what their calls held. Both run code of callers, so they are sent without the lock.
#[derive(Default)]
#[must_use]
pub(super) struct Answers(Vec<(Option<Answer>, Result<Reply>, Option<Pending>)>);

impl Answers {
    fn add(&mut self, mut pending: Pending, result: Result<Reply>) {
        self.0.push((pending.reply.take(), result, Some(pending)));
    }

    pub(super) fn send(self) {
        for (answer, result, _pending) in self.0 {
            drop(answer.map(|answer| answer.send(result)));
        }
    }
}

/// Where the connection stands.
enum Phase {
    /// The thread connects. The service may get all memory that is lent, so memory that is taken back waits.
    Connecting,
    Up(Sender),
    /// The service has said goodbye, and will hang up.
    Parting(Sender),
    /// Between two attempts to connect.
    Down,
    /// Closed: the thread has ended.
    Closed,
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
    /// When each call is late, in order of time.
    deadlines: VecDeque<(Instant, u64)>,
    /// When the thread wakes up by itself.
    timer: Option<Instant>,
    /// Calls that the service has, and the bytes of their frames.
    sent: usize,
    sent_bytes: usize,
    requests_max: usize,
    request_bytes_max: usize,
    /// The id of the last request that no caller has made. Callers' ids are even.
    own_id: u64,
    /// Who waits for the close, once it has begun.
    closing: Option<Vec<oneshot::Sender<()>>>,
}

/// A connection's state, with its lock.
pub(super) struct Line {
    state: Mutex<State>,
    /// Wakes the client's thread.
    pub(super) woken: Notify,
    /// The service's socket, for messages.
    name: String,
    deadline: Duration,
}

/// What the thread waits for beside replies.
pub(super) struct Wait {
    /// Bytes are left that the socket did not take.
    pub(super) to_send: bool,
    pub(super) until: Option<Instant>,
}

impl Line {
    pub(super) fn new(name: String, deadline: Duration) -> Self {
        let state = State {
            phase: Phase::Connecting,
            away: None,
            lent: BTreeMap::new(),
            pending: BTreeMap::new(),
            waiting: VecDeque::new(),
            deadlines: VecDeque::new(),
            timer: None,
            sent: 0,
            sent_bytes: 0,
            requests_max: 1,
            request_bytes_max: 0,
            own_id: 1,
            closing: None,
        };
        Line { state: Mutex::new(state), woken: Notify::new(), name, deadline }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics under it")
    }

    /// Whether the service can be reached now.
    pub(super) fn is_up(&self) -> bool {
        matches!(self.lock().phase, Phase::Up(_))
    }

    /// Sends a call, or queues it. Fails at once while the service is away.
    pub(super) fn begin(&self, call: Call) -> Result<()> {
        let mut state = self.lock();
        let Call { id, frame, what, reply, keeps } = call;
        let taken_back = match what {
            What::Unregister(number) => Some(number),
            _ => None,
        };
        if taken_back.is_none()
            && let Some(away) = &state.away
        {
            return Err(away.clone());
        }
        if matches!(state.phase, Phase::Closed) || (taken_back.is_none() && state.closing.is_some()) {
            return Err(Error::Closed);
        }
        if let Some(number) = taken_back {
            // Not given to a service that comes after this one.
            state.lent.remove(&number);
        } else {
            let late = Instant::now() + self.deadline;
            state.deadlines.push_back((late, id));
            if state.timer.is_none_or(|timer| timer > late) {
                self.woken.notify_one();
            }
        }
        let frame_bytes = frame.len();
        let mut pending = Pending { what, reply: Some(reply), frame: Some(frame), frame_bytes, _keeps: keeps };
        match state.phase {
            // The service has none of this process's memory.
            Phase::Down => {
                drop(state);
                let mut answers = Answers::default();
                answers.add(pending, Ok(Reply::Done));
                answers.send();
                return Ok(());
            }
            // The memory is the caller's again at the hang-up.
            Phase::Parting(_) => pending.frame = None,
            Phase::Up(_) if state.closing.is_some() => pending.frame = None,
            Phase::Connecting | Phase::Up(_) | Phase::Closed => state.waiting.push_back(id),
        }
        state.pending.insert(id, pending);
        self.send(&mut state);
        Ok(())
    }

    /// Sends calls that wait, as far as the service takes them, and wakes the thread for bytes that are left.
    fn send(&self, state: &mut State) {
        let Phase::Up(sender) = &mut state.phase else { return };
        while let Some(id) = state.waiting.front()
            && state.sent < state.requests_max
        {
            let next = state.pending.get_mut(id).filter(|pending| pending.frame.is_some());
            let bytes = next.as_ref().map_or(0, |pending| pending.frame_bytes);
            // One goes, whatever its size.
            if state.sent > 0 && state.sent_bytes + bytes > state.request_bytes_max {
                break;
            }
            state.waiting.pop_front();
            let Some(pending) = next else { continue };
            let Some(frame) = pending.frame.take() else { continue };
            let fd = match &pending.what {
                What::Register(lent) => Some(Arc::clone(&lent.fd)),
                _ => None,
            };
            sender.push(frame, fd);
            state.sent += 1;
            state.sent_bytes += bytes;
        }
        self.flush(state);
    }

    /// Sends bytes that are left. A socket that is broken is found out by the thread, which reads all that has come.
    fn flush(&self, state: &mut State) -> bool {
        let Phase::Up(sender) = &mut state.phase else { return false };
        let left = sender.flush().is_ok() && sender.bytes() > 0;
        if left {
            self.woken.notify_one();
        }
        left
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
            return state.pending.remove(&id);
        }
        if let Phase::Up(sender) = &mut state.phase {
            sender.push(Request::Cancel { request: id }.encode(0), None);
            self.flush(state);
        }
        None
    }

    /// Says that nothing more comes. The service hangs up when it has let go of this process's memory.
    pub(super) fn close(&self, waits: Option<oneshot::Sender<()>>) -> Result<()> {
        let mut state = self.lock();
        if matches!(state.phase, Phase::Closed) {
            return Err(Error::Closed);
        }
        state.closing.get_or_insert_default().extend(waits);
        if let Phase::Up(sender) | Phase::Parting(sender) = &state.phase {
            sender.end();
        }
        drop(state);
        self.woken.notify_one();
        Ok(())
    }
}

/// The thread's part.
impl Line {
    /// The thread begins to connect; regions that the service is to get. `None` if the client is being closed.
    pub(super) fn connect(&self) -> Option<Vec<Lent>> {
        let mut state = self.lock();
        if state.closing.is_some() {
            return None;
        }
        state.phase = Phase::Connecting;
        Some(state.lent.values().cloned().collect())
    }

    /// The service has admitted the client, and has all of its regions.
    pub(super) fn connected(&self, sender: Sender, limits: &Limits) {
        let mut state = self.lock();
        state.requests_max = (limits.requests as usize).max(1);
        state.request_bytes_max = limits.request_bytes as usize;
        if state.closing.is_some() {
            sender.end();
        }
        state.phase = Phase::Up(sender);
        state.away = None;
        self.send(&mut state);
    }

    /// A reply has come.
    pub(super) fn answered(&self, id: u64, reply: Reply) {
        let mut state = self.lock();
        // Requests of the thread itself have no caller.
        let Some(mut pending) = state.pending.remove(&id) else { return };
        state.sent = state.sent.saturating_sub(1);
        state.sent_bytes = state.sent_bytes.saturating_sub(pending.frame_bytes);
        let result = match reply {
            Reply::Failed(Failure { fault, text }) => Err(Error::service(fault, text)),
            reply => Ok(reply),
        };
        let registered = match &pending.what {
            What::Register(lent) if result.is_ok() => Some(lent.number),
            _ => None,
        };
        if let What::Register(lent) = &pending.what
            && registered.is_some()
        {
            // Before the caller knows, who may take it back at once.
            state.lent.insert(lent.number, lent.clone());
        }
        if !state.waiting.is_empty() {
            self.send(&mut state);
        }
        drop(state);
        let told = pending.reply.take().is_some_and(|answer| answer.send(result).is_ok());
        if let Some(number) = registered.filter(|_| !told) {
            self.take_back(number);
        }
    }

    /// Takes back memory whose caller does not wait for it any more.
    fn take_back(&self, number: u32) {
        let mut state = self.lock();
        state.lent.remove(&number);
        state.own_id += 2;
        let frame = Request::Unregister { region: number }.encode(state.own_id);
        if let Phase::Up(sender) = &mut state.phase {
            sender.push(frame, None);
            self.flush(&mut state);
        }
    }

    /// The service has said goodbye.
    pub(super) fn parting(&self, why: Error) {
        let mut state = self.lock();
        state.away = Some(why);
        state.phase = match mem::replace(&mut state.phase, Phase::Down) {
            Phase::Up(sender) => Phase::Parting(sender),
            other => other,
        };
    }

    /// Before the thread waits for replies.
    pub(super) fn wait(&self) -> Wait {
        let mut state = self.lock();
        let to_send = self.flush(&mut state);
        while let Some((_, id)) = state.deadlines.front()
            && !state.pending.contains_key(id)
        {
            state.deadlines.pop_front();
        }
        let now = Instant::now();
        // A timer that is set stays: the next call then need not wake the thread for its own.
        let set = state.timer.filter(|timer| *timer > now);
        state.timer = state.deadlines.front().map(|(late, _)| *late).into_iter().chain(set).min();
        Wait { to_send, until: state.timer }
    }

    /// Answers the calls that are late.
    pub(super) fn late(&self) {
        let (now, mut answers) = (Instant::now(), Answers::default());
        let mut state = self.lock();
        state.timer = None;
        while let Some((_, id)) = state.deadlines.pop_front_if(|(late, _)| *late <= now) {
            let Some(pending) = state.pending.get_mut(&id) else { continue };
            let text = format!(
                "{}: no reply within {:?}; what was begun goes on, and memory is in use until it is unregistered",
                self.name, self.deadline
            );
            let answer = pending.reply.take();
            let forgotten = self.cancel(&mut state, id);
            answers.0.push((answer, Err(Error::service(ServiceFault::Timeout, text)), forgotten));
        }
        drop(state);
        answers.send();
    }

    /// The connection is lost, or could not be made, and with it the service's hold on this process's memory: answers
    /// all calls. True if the client is being closed.
    pub(super) fn lost(&self, why: &Error) -> bool {
        let mut answers = Answers::default();
        let mut state = self.lock();
        let sender = mem::replace(&mut state.phase, Phase::Down);
        state.away = Some(why.clone());
        for (_, pending) in mem::take(&mut state.pending) {
            let result = match pending.what {
                What::Unregister(_) => Ok(Reply::Done),
                _ => Err(why.clone()),
            };
            answers.add(pending, result);
        }
        state.waiting.clear();
        state.deadlines.clear();
        (state.sent, state.sent_bytes, state.timer) = (0, 0, None);
        let closing = state.closing.is_some();
        drop(state);
        drop(sender);
        answers.send();
        closing
    }

    /// Whether the client is being closed.
    pub(super) fn is_closing(&self) -> bool {
        self.lock().closing.is_some()
    }

    /// The thread ends: calls fail with [`Error::Closed`] from now on.
    pub(super) fn closed(&self) {
        let mut state = self.lock();
        state.phase = Phase::Closed;
        state.away = None;
        state.lent.clear();
        let closing = state.closing.take();
        drop(state);
        for waits in closing.into_iter().flatten() {
            let _nobody_waits = waits.send(());
        }
    }
}

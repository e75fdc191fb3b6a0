//! The client's thread: it connects, receives replies, and ends calls that are late or lost.

use std::mem;

use tokio::{sync::oneshot, time::Instant};

use super::{Amount, Answers, Line, Pending, Phase, State};
use crate::{
    client::{
        order::{Answer, What},
        places::Lent,
    },
    error::{Error, Result, ServiceFault},
    link::Sender,
    protocol::{BlockResult, Failure, Limits, Reply, Request},
};

/// What the thread waits for beside replies.
pub(in crate::client) struct Wait {
    /// Bytes are left that the socket did not take.
    pub(in crate::client) to_send: bool,
    pub(in crate::client) until: Option<Instant>,
}

impl Line {
    /// A service has admitted the client; regions that it is to get. `None` if the client is being closed.
    pub(in crate::client) fn connect(&self) -> Option<Vec<Lent>> {
        let mut state = self.lock();
        if state.closing.is_some() {
            return None;
        }
        state.phase = Phase::Connecting;
        Some(state.lent.values().cloned().collect())
    }

    /// The service has all regions, but for those that it refused.
    pub(in crate::client) fn connected(&self, sender: Sender, limits: &Limits) {
        let mut state = self.lock();
        state.sent_max = Amount { calls: (limits.requests as usize).max(1), bytes: limits.request_bytes as usize };
        if state.closing.is_some() {
            sender.end();
        }
        state.phase = Phase::Up(sender);
        state.away = None;
        self.send(&mut state);
    }

    /// A reply has come.
    pub(in crate::client) fn answered(&self, id: u64, reply: Reply) {
        let mut state = self.lock();
        if let Reply::Layer { layer, leading, failed } = reply {
            let report = match state.pending.get(&id).map(|pending| &pending.reply) {
                Some(Some(Answer::Layers(part))) => Some(part.report()),
                _ => None,
            };
            drop(state);
            // Without the lock: it wakes callers.
            return report.iter().for_each(|part| part.layer(layer, leading, failed));
        }
        let Some(mut pending) = state.take(id) else { return };
        state.ended(&pending);
        let result = match reply {
            Reply::Failed(Failure { fault, text }) => Err(Error::service(fault, text)),
            Reply::Results(results) if pending.late => {
                let told = |result: BlockResult| result.map_err(|failure| self.late_block(failure));
                Ok(Reply::Results(results.into_iter().map(told).collect()))
            }
            reply => Ok(reply),
        };
        let registered = match &pending.what {
            What::Register(lent) | What::Offer(lent) if result.is_ok() => Some(lent.number),
            _ => None,
        };
        if let What::Register(lent) = &pending.what
            && registered.is_some()
        {
            // Before the caller knows, who may take it back at once.
            state.lent.insert(lent.number, lent.clone());
        }
        if let What::Offer(lent) = &pending.what {
            let takes_back =
                |pending: &Pending| matches!(pending.what, What::Unregister(number) if number == lent.number);
            let held_back: Vec<_> =
                state.pending.iter().filter(|(_, pending)| takes_back(pending)).map(|(id, _)| *id).collect();
            held_back.into_iter().for_each(|id| state.wait(id));
        }
        let is_gone = registered.is_some_and(|number| !state.lent.contains_key(&number));
        if !(state.waiting.is_empty() && state.overtaken.is_empty()) {
            self.send(&mut state);
        }
        drop(state);
        let told = pending.reply.take().is_some_and(|answer| answer.send(result));
        if let Some(number) = registered.filter(|_| !told || is_gone) {
            self.take_back(number);
        }
    }

    /// Takes back memory whose caller does not wait for it any more.
    fn take_back(&self, number: u32) {
        let mut state = self.lock();
        state.lent.remove(&number);
        if !matches!(state.phase, Phase::Up(_)) {
            return;
        }
        self.send_own(&mut state, &Request::Unregister { region: number }, What::Unregister(number), None);
    }

    /// Offers the service a region that it refused; what it says to that. `None` if the client has taken it back.
    pub(in crate::client) fn offer(&self, number: u32) -> Option<oneshot::Receiver<Result<Reply>>> {
        let mut state = self.lock();
        let lent = state.lent.get(&number)?.clone();
        let ((answer, told), request) = (oneshot::channel(), lent.request());
        self.send_own(&mut state, &request, What::Offer(lent), Some(Answer::Caller(answer)));
        Some(told)
    }

    /// Sends a request of the thread's own.
    fn send_own(&self, state: &mut State, request: &Request, what: What, reply: Option<Answer>) {
        state.own_id += 2;
        let (id, is_write) = (state.own_id, request.is_write());
        let frame = request.encode(id);
        let (frame_bytes, frame) = (frame.len(), Some(frame));
        let pending = Pending { what, reply, frame, frame_bytes, is_write, deadline: None, late: false, _keeps: None };
        state.pending.insert(id, pending);
        state.waiting.push_back(id);
        self.send(state);
    }

    /// The failure of a block whose call was canceled by its deadline, not by its caller.
    fn late_block(&self, failure: Failure) -> Failure {
        match failure.fault {
            ServiceFault::Canceled => {
                let text = format!("{}: not begun within {:?}", self.name, self.deadline);
                Failure::new(ServiceFault::Timeout, text)
            }
            _ => failure,
        }
    }

    /// The service has said goodbye.
    pub(in crate::client) fn parting(&self, why: Error) {
        let mut state = self.lock();
        state.away = Some(why);
        state.phase = match mem::replace(&mut state.phase, Phase::Down) {
            Phase::Up(sender) => Phase::Parting(sender),
            other => other,
        };
    }

    /// This process sends nothing more. Its memory may be in use yet.
    pub(in crate::client) fn hung_up(&self, why: Error) {
        self.parting(why);
        if let Phase::Parting(sender) = &self.lock().phase {
            sender.end();
        }
    }

    /// Before the thread waits for replies.
    pub(in crate::client) fn wait(&self) -> Wait {
        let mut state = self.lock();
        // Without waking the thread, which is this one: it would not wait.
        let to_send = state.flush();
        let now = Instant::now();
        // A timer that is set stays: the next call then need not wake the thread for its own.
        let set = state.timer.filter(|timer| *timer > now);
        let first = state.deadlines.first().map(|(late, _)| *late);
        state.timer = first.into_iter().chain(set).chain(state.closed_by).min();
        Wait { to_send, until: state.timer }
    }

    /// Cancels the calls that are late, and answers those whose caller may go on. Those whose memory the service may
    /// still read or write are answered when that is given up. True if the client was to be closed by now.
    pub(in crate::client) fn late(&self) -> bool {
        let (now, mut answers) = (Instant::now(), Answers::default());
        let mut state = self.lock();
        state.timer = None;
        while let Some(&(late, id)) = state.deadlines.first()
            && late <= now
        {
            state.deadlines.pop_first();
            let Some(pending) = state.pending.get_mut(&id) else { continue };
            let was_late = mem::replace(&mut pending.late, true);
            let is_moving = matches!(pending.what, What::Move) && pending.frame.is_none();
            pending.deadline = self.give_up.filter(|_| is_moving && !was_late).map(|patience| now + patience);
            let keeps_memory = is_moving || matches!(pending.what, What::Unregister(_));
            let answer = if is_moving && !was_late { None } else { pending.reply.take() };
            let wait = pending.deadline.map(|given_up| (given_up, id));
            // Memory is taken back also where nobody waits for it.
            let goes_on = was_late || matches!(pending.what, What::Unregister(_));
            let forgotten = if goes_on { None } else { self.cancel(&mut state, id) };
            state.deadlines.extend(wait);
            answers.0.push((answer, Err(self.lateness(keeps_memory)), forgotten));
        }
        let is_over = state.closed_by.is_some_and(|by| by <= now);
        state.abandoned |= is_over;
        drop(state);
        answers.send();
        is_over
    }

    pub(super) fn lateness(&self, keeps_memory: bool) -> Error {
        let Line { name, deadline, .. } = self;
        if !keeps_memory {
            let text = format!("{name}: no reply within {deadline:?}; what was begun goes on");
            return Error::service(ServiceFault::Timeout, text);
        }
        let text = format!(
            "{name}: the service hangs and has not let go of memory within {deadline:?} and more; it may still read \
             and write it: do not use what is there until it is unregistered"
        );
        Error::service(ServiceFault::Abandoned, text)
    }

    /// The connection is lost, or could not be made, and with it the service's hold on this process's memory, unless
    /// the close was abandoned: answers all calls. True if the client is being closed.
    pub(in crate::client) fn lost(&self, why: &Error) -> bool {
        let mut answers = Answers::default();
        let mut state = self.lock();
        let sender = mem::replace(&mut state.phase, Phase::Down);
        state.away = Some(why.clone());
        for (_, pending) in mem::take(&mut state.pending) {
            let result = match pending.what {
                What::Unregister(_) | What::Move if state.abandoned => Err(self.lateness(true)),
                What::Unregister(_) => Ok(Reply::Done),
                _ => Err(why.clone()),
            };
            answers.add(pending, result);
        }
        state.waiting.clear();
        state.overtaken.clear();
        state.deadlines.clear();
        (state.sent, state.sent_writes, state.timer) = (Amount::NONE, Amount::NONE, None);
        let closing = state.closing.is_some();
        drop(state);
        drop(sender);
        answers.send();
        closing
    }

    /// Whether the client is being closed.
    pub(in crate::client) fn is_closing(&self) -> bool {
        self.lock().closing.is_some()
    }

    /// The thread ends: calls fail with [`Error::Closed`] from now on.
    pub(in crate::client) fn closed(&self) {
        let mut state = self.lock();
        state.phase = Phase::Closed;
        state.away = None;
        state.lent.clear();
        let (closing, abandoned) = (state.closing.take(), state.abandoned);
        drop(state);
        for waits in closing.into_iter().flatten() {
            let _nobody_waits = waits.send(if abandoned { Err(self.lateness(true)) } else { Ok(()) });
        }
    }
}

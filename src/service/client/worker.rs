//! A client's thread: it connects, attaches and registers, sends calls and answers them, and begins anew when the
//! service is gone.

use std::{
    collections::{BTreeMap, VecDeque},
    future::pending,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};

use super::{
    options::ClientOptions,
    order::{Call, Keeps, Order, What},
    places::Lent,
};
use crate::{
    error::{Error, Result, ServiceFault},
    service::{
        link::{Link, LinkError},
        protocol::{Failure, Reply, Request},
    },
};

/// How long to wait before the first new attempt to connect; each further one waits twice as long.
const BACKOFF_MIN: Duration = Duration::from_millis(10);

/// A call that is sent, or waits to be.
struct Pending {
    what: What,
    /// `None` once it is answered: the service's reply is still awaited.
    reply: Option<oneshot::Sender<Result<Reply>>>,
    /// Where it was not sent yet.
    frame: Option<Vec<u8>>,
    frame_bytes: usize,
    _keeps: Keeps,
}

/// Why there is no connection, or `None` while there is one.
pub(super) type Away = Arc<Mutex<Option<Error>>>;

pub(super) struct Worker {
    pub(super) socket: PathBuf,
    pub(super) options: ClientOptions,
    pub(super) orders: mpsc::UnboundedReceiver<Order>,
    pub(super) away: Away,
    /// Regions that the service has, or gets when it is back.
    pub(super) lent: BTreeMap<u32, Lent>,
    pending: BTreeMap<u64, Pending>,
    /// Calls that wait for others' replies, in order.
    waiting: VecDeque<u64>,
    /// When each call is late, in order of time.
    deadlines: VecDeque<(Instant, u64)>,
    /// Calls that the service has.
    sent: usize,
    /// Bytes of their frames.
    sent_bytes: usize,
    pub(super) requests_max: usize,
    pub(super) request_bytes_max: usize,
    pub(super) next_own_id: u64,
    closing: Option<Vec<oneshot::Sender<()>>>,
}

/// The result of a turn: an error is the reason why the connection is lost.
type Turn = std::result::Result<(), String>;

impl Worker {
    pub(super) fn new(
        socket: PathBuf,
        options: ClientOptions,
        orders: mpsc::UnboundedReceiver<Order>,
        away: Away,
    ) -> Self {
        Worker {
            socket,
            options,
            orders,
            away,
            lent: BTreeMap::new(),
            pending: BTreeMap::new(),
            waiting: VecDeque::new(),
            deadlines: VecDeque::new(),
            sent: 0,
            sent_bytes: 0,
            requests_max: 1,
            request_bytes_max: 0,
            // Callers' ids are even.
            next_own_id: 1,
            closing: None,
        }
    }

    /// Runs until the client is closed. `first` gets the result of the first attempt to connect; a failure ends it.
    pub(super) async fn run(mut self, first: oneshot::Sender<Result<()>>) {
        let mut first = Some(first);
        let mut backoff = BACKOFF_MIN;
        loop {
            let connected = self.connect().await;
            match connected {
                Ok(mut link) => {
                    *self.away.lock().expect("nothing panics under it") = None;
                    if first.take().is_some_and(|first| first.send(Ok(())).is_err()) {
                        return;
                    }
                    backoff = BACKOFF_MIN;
                    let why = self.serve(&mut link).await;
                    self.lost(&away(&self.socket, why));
                }
                Err(error) => match first.take() {
                    Some(first) => return drop(first.send(Err(error))),
                    None => self.lost(&error),
                },
            }
            if self.closing.is_none() {
                self.wait(Instant::now() + backoff).await;
                backoff = (backoff * 2).min(self.options.backoff_max);
            }
            if let Some(closing) = self.closing.take() {
                // From now on calls fail with `Error::Closed`.
                *self.away.lock().expect("nothing panics under it") = None;
                drop(self.orders);
                for waits in closing {
                    let _nobody_waits = waits.send(());
                }
                return;
            }
        }
    }

    /// Answers all calls: the connection is lost, and with it the service's hold on this process's memory.
    fn lost(&mut self, why: &Error) {
        *self.away.lock().expect("nothing panics under it") = Some(why.clone());
        for (_, pending) in std::mem::take(&mut self.pending) {
            let answer = match pending.what {
                What::Unregister(_) => Ok(Reply::Done),
                _ => Err(why.clone()),
            };
            drop(pending.reply.map(|reply| reply.send(answer)));
        }
        self.waiting.clear();
        self.deadlines.clear();
        (self.sent, self.sent_bytes) = (0, 0);
    }

    /// Waits for the time of the next attempt. Calls fail meanwhile.
    async fn wait(&mut self, until: Instant) {
        loop {
            tokio::select! { biased;
                order = self.orders.recv() => match order {
                    Some(Order::Call(call)) => self.refuse(call),
                    Some(Order::Forget(_)) => {}
                    Some(Order::Close(waits)) => return self.closing = Some(waits.into_iter().collect()),
                    None => return self.closing = Some(Vec::new()),
                },
                () = sleep_until(until) => return,
            }
        }
    }

    /// Answers a call without a service.
    fn refuse(&mut self, call: Call) {
        let answer = match call.what {
            What::Unregister(number) => {
                self.lent.remove(&number);
                Ok(Reply::Done)
            }
            _ => {
                let why = self.away.lock().expect("nothing panics under it").clone();
                Err(why.unwrap_or(Error::Closed))
            }
        };
        drop(call.reply.send(answer));
    }

    /// Serves calls until the connection is lost; why it was.
    async fn serve(&mut self, link: &mut Link) -> String {
        let mut goodbye = None;
        loop {
            match self.turn(link, &mut goodbye).await {
                Ok(()) => {}
                Err(why) => return goodbye.unwrap_or(why),
            }
        }
    }

    async fn turn(&mut self, link: &mut Link, goodbye: &mut Option<String>) -> Turn {
        let gone = |error| match error {
            LinkError::Gone(error) => format!("the connection was lost ({error})"),
            LinkError::Nonsense(text) => format!("the service sent nonsense: {text}"),
        };
        while let Some((id, reply)) = link.next_frame(|header, body| Reply::decode(header.kind, body)).map_err(gone)? {
            match reply {
                // The hang-up follows, when the service has let go of this process's memory.
                Reply::Goodbye(failure) => {
                    let why = away(&self.socket, failure.text.clone());
                    *self.away.lock().expect("nothing panics under it") = Some(why);
                    *goodbye = Some(failure.text);
                }
                reply => self.answered(link, id, reply),
            }
        }
        link.flush().map_err(gone)?;
        // Nothing wakes up for calls that are answered.
        while self.deadlines.pop_front_if(|(_, id)| !self.pending.contains_key(id)).is_some() {}
        let late = self.deadlines.front().map(|(late, _)| *late);
        let deadline = async {
            match late {
                Some(late) => sleep_until(late).await,
                None => pending().await,
            }
        };
        tokio::select! { biased;
            ready = link.ready(true) => {
                ready.map_err(gone)?;
                link.receive().map(drop).map_err(gone)
            }
            order = self.orders.recv(), if self.closing.is_none() => {
                match order {
                    Some(Order::Call(call)) if goodbye.is_some() => self.refuse_after_goodbye(call),
                    Some(Order::Call(call)) => self.begin(link, call),
                    Some(Order::Forget(id)) => self.forget(link, id),
                    Some(Order::Close(waits)) => self.close(link, waits),
                    None => self.close(link, None),
                }
                Ok(())
            }
            () = deadline => {
                self.late(link);
                Ok(())
            }
        }
    }

    /// After a goodbye the service takes no more calls. Memory that is given back is the caller's at the hang-up.
    fn refuse_after_goodbye(&mut self, call: Call) {
        let Call { id, what, reply, keeps, .. } = call;
        match what {
            What::Unregister(number) => {
                self.lent.remove(&number);
                let pending = Pending { what, reply: Some(reply), frame: None, frame_bytes: 0, _keeps: keeps };
                self.pending.insert(id, pending);
            }
            what => self.refuse(Call { id, frame: Vec::new(), what, reply, keeps }),
        }
    }

    /// Says that nothing more comes. The service hangs up when it has let go of this process's memory.
    fn close(&mut self, link: &mut Link, waits: Option<oneshot::Sender<()>>) {
        self.closing = Some(waits.into_iter().collect());
        link.end_output();
    }

    fn begin(&mut self, link: &mut Link, call: Call) {
        let Call { id, frame, what, reply, keeps } = call;
        match &what {
            // Not given to a service that comes after this one.
            What::Unregister(number) => drop(self.lent.remove(number)),
            _ => self.deadlines.push_back((Instant::now() + self.options.deadline, id)),
        }
        let frame_bytes = frame.len();
        let pending = Pending { what, reply: Some(reply), frame: Some(frame), frame_bytes, _keeps: keeps };
        self.pending.insert(id, pending);
        self.waiting.push_back(id);
        self.send_waiting(link);
    }

    /// Sends calls that wait, as far as the service takes them.
    fn send_waiting(&mut self, link: &mut Link) {
        while let Some(id) = self.waiting.front()
            && self.sent < self.requests_max
        {
            let next = self.pending.get_mut(id).filter(|pending| pending.frame.is_some());
            let bytes = next.as_ref().map_or(0, |pending| pending.frame_bytes);
            // One goes, whatever its size.
            if self.sent > 0 && self.sent_bytes + bytes > self.request_bytes_max {
                return;
            }
            self.waiting.pop_front();
            let Some(pending) = next else { continue };
            let Some(frame) = pending.frame.take() else { continue };
            let fd = match &pending.what {
                What::Register(lent) => Some(Arc::clone(&lent.fd)),
                _ => None,
            };
            link.push(frame, fd);
            self.sent += 1;
            self.sent_bytes += bytes;
        }
    }

    /// A call's reply has come.
    fn answered(&mut self, link: &mut Link, id: u64, reply: Reply) {
        // Requests of the thread itself have no waiter.
        let Some(pending) = self.pending.remove(&id) else { return };
        self.sent = self.sent.saturating_sub(1);
        self.sent_bytes = self.sent_bytes.saturating_sub(pending.frame_bytes);
        let answer = match reply {
            Reply::Failed(Failure { fault, text }) => Err(Error::Service { fault, text }),
            reply => Ok(reply),
        };
        let done = answer.is_ok();
        let told = pending.reply.is_some_and(|waits| waits.send(answer).is_ok());
        if let What::Register(lent) = pending.what
            && done
        {
            if told {
                self.lent.insert(lent.number, lent);
            } else {
                let request = Request::Unregister { region: lent.number };
                link.push(request.encode(self.own_id()), None);
            }
        }
        self.send_waiting(link);
    }

    /// Cancels a call that was dropped: the service begins no more of its blocks.
    fn forget(&mut self, link: &mut Link, id: u64) {
        let Some(pending) = self.pending.get_mut(&id) else { return };
        pending.reply = None;
        if pending.frame.is_some() {
            self.pending.remove(&id);
        } else {
            link.push(Request::Cancel { request: id }.encode(0), None);
        }
    }

    /// Answers the calls that are late.
    fn late(&mut self, link: &mut Link) {
        let now = Instant::now();
        while let Some((_, id)) = self.deadlines.pop_front_if(|(late, _)| *late <= now) {
            let Some(pending) = self.pending.get_mut(&id) else { continue };
            if let Some(reply) = pending.reply.take() {
                let text = format!(
                    "{}: no reply within {:?}; what was begun goes on, and memory is in use until it is unregistered",
                    self.socket.display(),
                    self.options.deadline
                );
                drop(reply.send(Err(Error::Service { fault: ServiceFault::Timeout, text })));
            }
            self.forget(link, id);
        }
    }
}

pub(super) fn away(socket: &std::path::Path, why: impl std::fmt::Display) -> Error {
    let text = format!("{}: {why}; start `kvhoist serve`, or try later: the client connects again", socket.display());
    Error::Service { fault: ServiceFault::Away, text }
}

pub(super) fn nonsense(text: &str) -> Error {
    Error::Service { fault: ServiceFault::Protocol, text: text.to_owned() }
}

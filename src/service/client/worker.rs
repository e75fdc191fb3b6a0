//! A client's thread: it connects, attaches and registers, sends calls and answers them, and begins anew when the
//! service is gone.

use std::{
    collections::{BTreeMap, VecDeque},
    future::pending,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    net::UnixStream,
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until, timeout},
};

use super::{bounce::Taken, options::ClientOptions, places::Lent};
use crate::{
    error::{Error, Result, ServiceFault},
    service::{
        link::{Link, LinkError},
        protocol::{Failure, Hello, Reply, Request, Welcome},
        query::check,
    },
};

/// How long to wait before the first new attempt to connect; each further one waits twice as long.
const BACKOFF_MIN: Duration = Duration::from_millis(10);

/// What callers want of the thread.
pub(super) enum Order {
    Call(Call),
    /// Nobody wants the answer of this call any longer.
    Forget(u64),
    /// Nothing more is wanted: `None` where nobody waits for the end.
    Close(Option<oneshot::Sender<()>>),
}

/// A request to be sent.
pub(super) struct Call {
    pub(super) id: u64,
    pub(super) frame: Vec<u8>,
    pub(super) what: What,
    pub(super) reply: oneshot::Sender<Result<Reply>>,
    /// Held until the service has replied, or the connection is lost.
    pub(super) keeps: Keeps,
}

/// What a call holds while the service may work on it: its count, and slots of the bounce buffer.
pub(super) type Keeps = (Counted, Option<Arc<Taken>>);

/// What a call changes beside its answer.
pub(super) enum What {
    Plain,
    /// Memory that is the service's once the reply says so, and again after each reconnection.
    Register(Lent),
    /// Memory that is given back: it needs no service, and has no deadline.
    Unregister(u32),
}

/// Counts calls for as long as it lives.
pub(super) struct Counted(Arc<AtomicUsize>);

impl Counted {
    /// One more call, if there are fewer than `max`.
    pub(super) fn new(count: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        let fewer = |calls| (calls < max).then_some(calls + 1);
        count.fetch_update(Ordering::AcqRel, Ordering::Acquire, fewer).ok()?;
        Some(Counted(Arc::clone(count)))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

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
    /// What the service has, or is given when it is back.
    lent: BTreeMap<u32, Lent>,
    pending: BTreeMap<u64, Pending>,
    /// Calls that wait for others' replies, in order.
    waiting: VecDeque<u64>,
    /// When each call is late, in order of time.
    deadlines: VecDeque<(Instant, u64)>,
    /// Calls that the service has.
    sent: usize,
    /// Bytes of their frames.
    sent_bytes: usize,
    requests_max: usize,
    request_bytes_max: usize,
    next_own_id: u64,
    closing: Option<Vec<oneshot::Sender<()>>>,
}

/// What a turn of a connection came to.
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

    /// Runs until the client is closed. `first` is told how the first attempt to connect went; a failure ends it.
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
                // Calls fail as those of a closed client from now on.
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

    /// Connects, attaches, and registers what was registered before. Calls that come meanwhile wait for the end of the
    /// attempt, which has a deadline.
    async fn connect(&mut self) -> Result<Link> {
        let deadline = self.options.deadline;
        match timeout(deadline, self.try_to_connect()).await {
            Ok(connected) => connected,
            Err(_) => Err(away(&self.socket, format!("it did not answer for {deadline:?}"))),
        }
    }

    async fn try_to_connect(&mut self) -> Result<Link> {
        let failed = |error: std::io::Error| away(&self.socket, error.to_string());
        let mut link = Link::new(UnixStream::connect(&self.socket).await.map_err(failed)?);
        link.push(Hello::ours().encode(), None);
        let welcome = loop {
            if let Some(bytes) = link.take_bytes::<{ Welcome::BYTES }>() {
                break Welcome::decode(&bytes).map_err(|error| nonsense(&error.to_string()))?;
            }
            self.transfer(&mut link).await?;
        };
        check(&welcome)?;
        self.requests_max = (welcome.limits.requests as usize).max(1);
        self.request_bytes_max = welcome.limits.request_bytes as usize;
        let ClientOptions { namespace, block_bytes, capacity_bytes, host_bytes, .. } = &self.options;
        let attach = Request::Attach {
            namespace: namespace.clone(),
            block_bytes: *block_bytes as u64,
            capacity_bytes: *capacity_bytes,
            host_bytes: *host_bytes,
        };
        match self.ask(&mut link, &attach, None).await? {
            Reply::Attached { block_bytes, .. } if block_bytes == self.options.block_bytes as u64 => {}
            Reply::Failed(failure) => return Err(failure.into()),
            other => return Err(nonsense(&format!("{other:?} to an attach request"))),
        }
        for lent in self.lent.values().cloned().collect::<Vec<_>>() {
            match self.ask(&mut link, &register(&lent), Some(Arc::clone(&lent.fd))).await? {
                Reply::Registered { .. } => {}
                Reply::Failed(failure) => {
                    tracing::warn!(reason = %failure.text, "the service refused memory that it had before");
                    return Err(failure.into());
                }
                other => return Err(nonsense(&format!("{other:?} to a register request"))),
            }
        }
        Ok(link)
    }

    /// Asks, and waits for the reply, on a connection without calls.
    async fn ask(&mut self, link: &mut Link, request: &Request, fd: Option<Arc<OwnedFd>>) -> Result<Reply> {
        let id = self.own_id();
        link.push(request.encode(id), fd);
        loop {
            match link.next_frame(|header, body| Reply::decode(header.kind, body)).map_err(|e| self.broken(e))? {
                Some((found, reply)) if found == id => return Ok(reply),
                Some((_, Reply::Goodbye(failure))) => return Err(failure.into()),
                Some((found, _)) => return Err(nonsense(&format!("a reply to request {found}, expected {id}"))),
                None => self.transfer(link).await?,
            }
        }
    }

    fn own_id(&mut self) -> u64 {
        self.next_own_id += 2;
        self.next_own_id
    }

    fn broken(&self, error: LinkError) -> Error {
        match error {
            LinkError::Gone(error) => away(&self.socket, error.to_string()),
            LinkError::Nonsense(text) => nonsense(&text),
        }
    }

    /// Sends what is to go out and takes what has come, once there is either.
    async fn transfer(&self, link: &mut Link) -> Result<()> {
        let moved = async {
            link.flush()?;
            link.ready(true).await?;
            link.receive().map(drop)
        };
        moved.await.map_err(|error| self.broken(error))
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
        // What the thread itself has asked for, nobody waits for.
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

    /// Nobody waits for a call any longer: the service is to begin nothing more of it.
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

/// How memory is registered.
pub(super) fn register(lent: &Lent) -> Request {
    Request::Register { region: lent.number, pin: lent.pin, offset: lent.offset, len: lent.len as u64 }
}

pub(super) fn away(socket: &std::path::Path, why: impl std::fmt::Display) -> Error {
    let text = format!("{}: {why}; start `kvhoist serve`, or try later: the client connects again", socket.display());
    Error::Service { fault: ServiceFault::Away, text }
}

pub(super) fn nonsense(text: &str) -> Error {
    Error::Service { fault: ServiceFault::Protocol, text: text.to_owned() }
}

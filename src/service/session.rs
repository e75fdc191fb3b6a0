//! One client's connection, from its hello to its hang-up.

use std::{collections::BTreeMap, future::pending, os::fd::OwnedFd, rc::Rc, time::Duration};

use tokio::{
    net::UnixStream,
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};

use super::{
    blocks::{Cancel, Movers, Way},
    house::{Guest, House},
    link::{Link, LinkError},
    memory,
    protocol::{Blocks, Failure, Header, Hello, Reply, Request, Welcome},
    spaces::{Space, Wanted, stats},
};
use crate::{block::BlockKey, cache::Cache, error::ServiceFault};

/// With more than this to be taken by the client, nothing more is read from it.
const OUTBOX_BYTES_MAX: usize = 1 << 20;
/// Frames that are read in one turn.
const FRAMES_PER_TURN: usize = 32;
/// How long a client that is cut off has to take the reason.
const GOODBYE: Duration = Duration::from_millis(100);

/// Why a session ends.
enum End {
    /// The client has hung up.
    Gone,
    /// The client is told why, and cut off.
    Cut(Failure),
    /// The service ends, and all that the client asked for is answered.
    Drained,
}

impl From<LinkError> for End {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Gone(_) => End::Gone,
            LinkError::Nonsense(text) => End::Cut(Failure::new(ServiceFault::Protocol, text)),
        }
    }
}

/// What a request ended with.
struct Ended {
    id: u64,
    result: Outcome,
}

enum Outcome {
    Reply(Reply),
    Attached(Result<Rc<Space>, Failure>),
}

struct Session {
    house: Rc<House>,
    guest: Rc<Guest>,
    link: Link,
    draining: watch::Receiver<bool>,
    tasks: JoinSet<Ended>,
    /// Requests under way.
    requests: BTreeMap<u64, Cancel>,
    /// The bytes of their frames.
    request_bytes: BTreeMap<u64, usize>,
    /// The space, once the client is attached, and what moves its blocks.
    attached: Option<(Rc<Space>, Rc<Movers>)>,
    attaching: bool,
    /// The handshake is done.
    greeted: bool,
    /// When the client last took something of what it was sent, or had taken all.
    taken: Instant,
}

/// Serves a connection until it ends, and lets go of the client's memory before it hangs up.
pub(super) async fn serve(house: Rc<House>, guest: Rc<Guest>, stream: UnixStream) {
    let mut session = Session {
        draining: house.draining(),
        link: Link::new(stream),
        tasks: JoinSet::new(),
        requests: BTreeMap::new(),
        request_bytes: BTreeMap::new(),
        attached: None,
        attaching: false,
        greeted: false,
        taken: Instant::now(),
        house,
        guest,
    };
    let end = match session.greet().await {
        Ok(()) => session.run().await,
        Err(end) => end,
    };
    session.finish(end).await;
}

/// Tells a connection why it is not let in.
pub(super) async fn refuse(house: Rc<House>, stream: UnixStream, fault: ServiceFault) {
    let mut link = Link::new(stream);
    link.push(Welcome::new(Err(fault), house.limits()).encode(), None);
    tell(&mut link).await;
}

/// Sends what is to go out, for a moment.
async fn tell(link: &mut Link) {
    let sent = timeout(GOODBYE, async {
        while link.flush().is_ok() && link.outbox_bytes() > 0 {
            if link.ready(false).await.is_err() {
                break;
            }
        }
    });
    drop(sent.await);
}

impl Session {
    fn stall(&self) -> Duration {
        Duration::from_millis(self.house.config.stall_ms)
    }

    /// The handshake.
    async fn greet(&mut self) -> Result<(), End> {
        let deadline = Instant::now() + self.stall();
        let hello: [u8; Hello::BYTES] = loop {
            if let Some(bytes) = self.link.take_bytes() {
                break bytes;
            }
            tokio::select! { biased;
                _ = self.draining.wait_for(|draining| *draining) => return Err(End::Drained),
                ready = self.link.ready(true) => ready?,
                () = sleep_until(deadline) => {
                    return Err(End::Cut(Failure::new(ServiceFault::Timeout, "no hello came in time")));
                }
            }
            self.link.receive()?;
        };
        let hello = Hello::decode(&hello).map_err(LinkError::from)?;
        let Some(version) = hello.common_version() else {
            let Hello { version_min, version_max } = hello;
            let text = format!("versions {version_min} to {version_max}, of which none is spoken here");
            return Err(End::Cut(Failure::new(ServiceFault::Version, text)));
        };
        self.link.push(Welcome::new(Ok(version), self.house.limits()).encode(), None);
        self.greeted = true;
        Ok(())
    }

    async fn run(&mut self) -> End {
        loop {
            match self.turn().await {
                Ok(()) => {}
                Err(end) => return end,
            }
        }
    }

    /// Reads what has come, sends what is to go out, and waits for more of either.
    async fn turn(&mut self) -> Result<(), End> {
        let draining = *self.draining.borrow();
        let listens = !draining && self.link.outbox_bytes() <= OUTBOX_BYTES_MAX;
        let mut frames = if listens { FRAMES_PER_TURN } else { 0 };
        while frames > 0 {
            let decode = |header: &Header, body: &[u8]| Ok((body.len(), Request::decode(header.kind, body)?));
            let Some((id, (bytes, request))) = self.link.next_frame(decode)? else { break };
            self.begin(id, bytes, request)?;
            frames -= 1;
        }
        self.flush()?;
        if listens && frames == 0 {
            // There may be more; others have their turn first.
            tokio::task::yield_now().await;
            return self.reap();
        }
        let outbox = self.link.outbox_bytes();
        if draining && outbox == 0 && self.requests.is_empty() {
            return Err(End::Drained);
        }
        let stalled = self.taken + self.stall();
        let io = async {
            match listens || outbox > 0 {
                true => self.link.ready(listens).await,
                false => pending().await,
            }
        };
        tokio::select! { biased;
            joined = self.tasks.join_next(), if !self.tasks.is_empty() => {
                let ended = joined.and_then(Result::ok);
                self.end(ended)
            }
            ready = io => {
                ready?;
                if listens {
                    self.link.receive()?;
                }
                Ok(())
            }
            changed = self.draining.changed(), if !draining => changed.map_err(|_| End::Drained),
            () = sleep_until(stalled), if outbox > 0 => {
                let text = format!("{outbox} bytes of replies were not taken for {:?}", self.stall());
                Err(End::Cut(Failure::new(ServiceFault::Timeout, text)))
            }
        }
    }

    /// Answers all requests that have ended.
    fn reap(&mut self) -> Result<(), End> {
        while let Some(joined) = self.tasks.try_join_next() {
            self.end(joined.ok())?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), End> {
        if self.link.flush()? > 0 {
            self.taken = Instant::now();
        }
        Ok(())
    }

    fn reply(&mut self, id: u64, reply: &Reply) {
        if self.link.outbox_bytes() == 0 {
            self.taken = Instant::now();
        }
        self.link.push(reply.encode(id), None);
    }

    /// Answers a request whose task has ended; `None`: it panicked.
    fn end(&mut self, ended: Option<Ended>) -> Result<(), End> {
        let Some(Ended { id, result }) = ended else {
            return Err(End::Cut(Failure::new(ServiceFault::Io, "the service failed in the middle of a request")));
        };
        self.requests.remove(&id);
        self.request_bytes.remove(&id);
        self.guest.requests.set(self.requests.len() as u32);
        let reply = match result {
            Outcome::Reply(reply) => reply,
            Outcome::Attached(Ok(space)) => self.enter(space),
            Outcome::Attached(Err(failure)) => {
                self.attaching = false;
                Reply::Failed(failure)
            }
        };
        self.reply(id, &reply);
        Ok(())
    }

    /// The client is in a space from now on.
    fn enter(&mut self, space: Rc<Space>) -> Reply {
        let movers = Rc::new(Movers::new(&space, self.house.config.bytes_in_flight_max));
        space.clients.set(space.clients.get() + 1);
        self.guest.namespace.borrow_mut().clone_from(&space.namespace);
        *self.guest.movers.borrow_mut() = Some(Rc::clone(&movers));
        let Space { block_bytes, capacity_bytes, host_bytes, .. } = *space;
        self.attached = Some((space, movers));
        Reply::Attached { block_bytes, capacity_bytes, host_bytes }
    }

    /// Begins a request, or answers it at once.
    fn begin(&mut self, id: u64, bytes: usize, request: Request) -> Result<(), End> {
        if let Request::Cancel { request } = request {
            if let Some(cancel) = self.requests.get(&request) {
                cancel.cancel();
            }
            return Ok(());
        }
        // Also where the request is refused: the next one must not get it.
        let fd = matches!(request, Request::Register { .. }).then(|| self.link.take_fd()).flatten();
        if id == 0 || self.requests.contains_key(&id) {
            let text = format!("request id: found {id}, expected one that is not 0 and not in flight");
            return Err(End::Cut(Failure::new(ServiceFault::Protocol, text)));
        }
        let limits = self.house.limits();
        let in_flight: usize = self.request_bytes.values().sum();
        if self.requests.len() >= limits.requests as usize || in_flight + bytes > limits.request_bytes as usize {
            let text =
                format!("busy: {} requests of {in_flight} bytes are in flight; wait for replies", self.requests.len());
            self.reply(id, &Reply::Failed(Failure::new(ServiceFault::Busy, text)));
            return Ok(());
        }
        match self.answer(id, request, fd) {
            Ok(None) => {}
            Ok(Some(reply)) => self.reply(id, &reply),
            Err(failure) => self.reply(id, &Reply::Failed(failure)),
        }
        if self.requests.contains_key(&id) {
            self.request_bytes.insert(id, bytes);
        }
        Ok(())
    }

    /// Runs a request; its reply comes when it has ended.
    fn spawn(&mut self, id: u64, run: impl Future<Output = Reply> + 'static, cancel: Cancel) {
        self.requests.insert(id, cancel);
        self.guest.requests.set(self.requests.len() as u32);
        self.tasks.spawn_local(async move { Ended { id, result: Outcome::Reply(run.await) } });
    }

    /// The reply, or `None` where it comes later.
    fn answer(&mut self, id: u64, request: Request, fd: Option<OwnedFd>) -> Result<Option<Reply>, Failure> {
        let request = match request {
            Request::Status => return Ok(Some(Reply::Status(Box::new(self.house.status())))),
            Request::Attach { namespace, block_bytes, capacity_bytes, host_bytes } => {
                let uid = self.guest.uid;
                self.attach(id, Wanted { namespace, uid, block_bytes, capacity_bytes, host_bytes })?;
                return Ok(None);
            }
            Request::RemoveSpace { namespace, block_bytes } => {
                let (spaces, uid) = (Rc::clone(&self.house.spaces), self.guest.uid);
                let remove = async move {
                    match spaces.remove(uid, namespace, block_bytes).await {
                        Ok(()) => Reply::Done,
                        Err(failure) => Reply::Failed(failure),
                    }
                };
                self.spawn(id, remove, Cancel::default());
                return Ok(None);
            }
            other => other,
        };
        let Some((_, movers)) = &self.attached else {
            return Err(Failure::new(ServiceFault::Argument, "no space: attach to one first"));
        };
        let movers = Rc::clone(movers);
        let cache = movers.cache().clone();
        let none = Cancel::default();
        match request {
            Request::MatchLen { keys } => return Ok(Some(Reply::Count(cache.match_len(&keys) as u32))),
            Request::MatchPrefix { keys } => {
                return Ok(Some(Reply::Tiers(cache.match_prefix(&keys).tiers().to_vec())));
            }
            Request::Contains { keys } => {
                let there = |key: &BlockKey| cache.match_len(std::slice::from_ref(key)) == 1;
                return Ok(Some(Reply::Flags(keys.iter().map(there).collect())));
            }
            Request::Prefetch { keys } => {
                let started = cache.prefetch(&keys).map_err(|error| Failure::from(&error))?;
                return Ok(Some(Reply::Count(started as u32)));
            }
            Request::Touch { keys } => {
                cache.touch(&keys);
                return Ok(Some(Reply::Done));
            }
            Request::Stats => return Ok(Some(Reply::Stats(Box::new(stats(&cache))))),
            Request::Register { region, pin, offset, len } => {
                self.register(&movers, (region, offset, len), fd)?;
                if !pin || !self.house.config.pin {
                    return Ok(Some(Reply::Registered { pinned: false }));
                }
                self.spawn(id, async move { Reply::Registered { pinned: movers.regions.pin(region).await } }, none);
            }
            Request::Unregister { region } => {
                let release = async move {
                    movers.regions.release(region).await;
                    Reply::Done
                };
                self.spawn(id, release, none);
            }
            Request::Load(blocks) => self.move_blocks(id, &movers, Way::Load, blocks)?,
            Request::Store { parent, blocks } => self.move_blocks(id, &movers, Way::Store(parent), blocks)?,
            Request::Remove { durable, keys } => self.spawn(id, remove(cache, keys, durable), none),
            Request::Sync => {
                let sync = async move {
                    match cache.sync().await {
                        Ok(()) => Reply::Done,
                        Err(error) => Reply::Failed(Failure::from(&error)),
                    }
                };
                self.spawn(id, sync, none);
            }
            Request::Attach { .. } | Request::Status | Request::Cancel { .. } | Request::RemoveSpace { .. } => {
                unreachable!("answered before")
            }
        }
        Ok(None)
    }

    fn attach(&mut self, id: u64, wanted: Wanted) -> Result<(), Failure> {
        if self.attaching {
            return Err(Failure::new(ServiceFault::Argument, "attached already: a connection has one space"));
        }
        self.attaching = true;
        self.requests.insert(id, Cancel::default());
        let spaces = Rc::clone(&self.house.spaces);
        self.tasks.spawn_local(async move { Ended { id, result: Outcome::Attached(spaces.attach(wanted).await) } });
        Ok(())
    }

    /// Maps a client's memory and registers it.
    fn register(
        &self,
        movers: &Movers,
        (region, offset, len): (u32, u64, u64),
        fd: Option<OwnedFd>,
    ) -> Result<(), Failure> {
        let (regions, config) = (&movers.regions, &self.house.config);
        let Some(fd) = fd else {
            return Err(Failure::new(ServiceFault::Argument, "register: no descriptor came with the frame"));
        };
        if regions.has(region) {
            let text = format!("region: found {region}, which is registered, expected another number");
            return Err(Failure::new(ServiceFault::Argument, text));
        }
        if regions.count() >= config.regions_max as usize {
            let text = format!("busy: {} regions are registered, which is the limit", config.regions_max);
            return Err(Failure::new(ServiceFault::Busy, text));
        }
        if regions.bytes().checked_add(len).is_none_or(|bytes| bytes > config.region_bytes_max) {
            let text = format!(
                "busy: {} bytes are registered and {len} are to be, of {} at most",
                regions.bytes(),
                config.region_bytes_max
            );
            return Err(Failure::new(ServiceFault::Busy, text));
        }
        regions.add(region, memory::map(&fd, offset, len)?)
    }

    fn move_blocks(&mut self, id: u64, movers: &Rc<Movers>, way: Way, blocks: Blocks) -> Result<(), Failure> {
        let block_bytes = movers.cache().config().block_bytes as u64;
        for places in &blocks.places {
            let bytes: u64 = places.iter().map(|place| u64::from(place.len)).sum();
            if bytes != block_bytes {
                let text = format!("places: found {bytes} bytes, expected one block of {block_bytes}");
                return Err(Failure::new(ServiceFault::Argument, text));
            }
            movers.regions.segments(places)?;
        }
        let cancel = Cancel::default();
        let run = Rc::clone(movers).run(way, blocks, cancel.clone());
        self.spawn(id, async move { Reply::Results(run.await) }, cancel);
        Ok(())
    }

    /// Tells the client why, lets go of its memory, and hangs up.
    async fn finish(mut self, end: End) {
        let goodbye = match end {
            End::Gone => None,
            End::Drained => Some(Failure::new(ServiceFault::Draining, "the service is ending; connect again later")),
            End::Cut(failure) => {
                self.house.cut_off.set(self.house.cut_off.get() + 1);
                tracing::warn!(reason = %failure.text, uid = self.guest.uid, "a client was cut off");
                Some(failure)
            }
        };
        if let Some(failure) = goodbye {
            let bytes = match self.greeted {
                true => Reply::Goodbye(failure).encode(0),
                false => Welcome::new(Err(failure.fault), self.house.limits()).encode(),
            };
            self.link.push(bytes, None);
            tell(&mut self.link).await;
        }
        // What was not begun is dropped here. What was begun holds its regions.
        self.tasks.shutdown().await;
        if let Some((space, movers)) = self.attached.take() {
            movers.regions.release_all().await;
            space.clients.set(space.clients.get() - 1);
        }
    }
}

async fn remove(cache: Cache, keys: Vec<BlockKey>, durable: bool) -> Reply {
    let mut results = Vec::with_capacity(keys.len());
    for key in &keys {
        let removed = if durable { cache.remove_durably(key).await } else { cache.remove(key).await };
        results.push(removed.map_err(|error| Failure::from(&error)));
    }
    Reply::Results(results)
}

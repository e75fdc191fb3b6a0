//! How a session handles requests.

use std::{rc::Rc, time::Duration};

use kvhoist::{BlockKey, Cache};
use kvhoist_files::FileIdentity;

use super::{End, Ended, Outcome, Session, attached::Entered, pins::UNPINNED_PER_TURN};
use crate::{
    config::ServerConfig,
    error::ServiceFault,
    peers::own_uid,
    protocol::{Blocks, Failure, Header, RegionKind, Reply, Request, SpaceDevice, Way},
    regions::{Regions, taken},
    spaces::{Wanted, files::WantedFile},
    transfers::{Cancel, ClientTransfers},
    wire::Lent,
};

/// With more unread replies than this, nothing more is read from the client.
pub(super) const OUTBOX_BYTES_MAX: usize = 1 << 20;
/// Frames that are read in one turn, short ones: so many bytes of a frame count as one more, and so many of a reply
/// that is made at once, which costs more.
pub(super) const FRAMES_PER_TURN: usize = 32;
const BYTES_LIKE_A_FRAME: usize = 4096;
const REPLY_BYTES_LIKE_A_FRAME: usize = 512;
/// Files that one connection may hold.
const HELD_MAX: usize = 1024;

impl Session {
    /// Whether frames of the client are read now.
    pub(super) fn listens(&self) -> bool {
        !self.state.is_draining() && !self.awaits_status && self.link.sender.bytes() <= OUTBOX_BYTES_MAX
    }

    /// Handles the frames of one turn that have come; true if there may be more.
    pub(super) fn handle_frames(&mut self) -> Result<bool, End> {
        let mut frames = FRAMES_PER_TURN;
        while frames > 0 && self.listens() {
            let decode = |header: &Header, body: &[u8]| Ok((body.len(), Request::decode(header.kind, body)?));
            let Some((id, (bytes, request))) = self.link.receiver.next_frame(decode)? else { return Ok(false) };
            let outbox = self.link.sender.bytes();
            let unpinned = self.begin(id, bytes, request)?;
            let replied = self.link.sender.bytes() - outbox;
            let like_frames = bytes / BYTES_LIKE_A_FRAME + replied / REPLY_BYTES_LIKE_A_FRAME;
            frames = frames.saturating_sub(1 + like_frames + unpinned * FRAMES_PER_TURN / UNPINNED_PER_TURN);
        }
        Ok(true)
    }

    /// Begins a request, or answers it at once. Returns how many pins it has let go of.
    fn begin(&mut self, id: u64, bytes: usize, request: Request) -> Result<usize, End> {
        if let Request::Cancel { request } = request {
            if let Some(cancel) = self.requests.get(&request) {
                cancel.cancel();
            }
            return Ok(0);
        }
        if let Request::LetGo { hold } = request {
            // What has ended is held by then.
            self.reap()?;
            self.held.remove(&hold);
            // Or it is not held yet, and nobody waits for it any more.
            if let Some(cancel) = self.requests.get(&hold) {
                cancel.cancel();
            }
            return Ok(self.unpin(hold));
        }
        // Taken also if the request is refused: the next one must not get it.
        let lent = match request {
            Request::Register { .. } => self.link.receiver.take_lent(),
            _ => Lent::Nothing,
        };
        if id == 0 || self.requests.contains_key(&id) {
            let text = format!("request id: found {id}, expected one that is not 0 and not in flight");
            return Err(End::Cut(Failure::new(ServiceFault::Protocol, text)));
        }
        let limits = self.state.limits();
        let in_flight: usize = self.request_bytes.values().sum();
        if self.requests.len() >= limits.requests as usize || in_flight + bytes > limits.request_bytes as usize {
            let text =
                format!("busy: {} requests of {in_flight} bytes are in flight; wait for replies", self.requests.len());
            self.reply(id, &Reply::Failed(Failure::new(ServiceFault::Busy, text)));
            return Ok(0);
        }
        match self.answer(id, request, lent) {
            Ok(None) => {}
            Ok(Some(reply)) => self.reply(id, &reply),
            Err(failure) => self.reply(id, &Reply::Failed(failure)),
        }
        if self.requests.contains_key(&id) {
            self.request_bytes.insert(id, bytes);
        }
        Ok(0)
    }

    /// Runs a request; its reply comes when it has ended.
    fn spawn(&mut self, id: u64, run: impl Future<Output = Reply> + 'static, cancel: Cancel) {
        self.requests.insert(id, cancel);
        self.connection.requests.set(self.requests.len() as u32);
        self.tasks.spawn_local(async move { Ended { id, result: Outcome::Reply(run.await) } });
    }

    /// The reply, or `None` if a task will give it.
    fn answer(&mut self, id: u64, request: Request, lent: Lent) -> Result<Option<Reply>, Failure> {
        match request {
            Request::Status => {
                self.begin_status(id);
                return Ok(None);
            }
            Request::Attach { namespace, block_bytes, capacity_bytes, host_bytes, shared, device } => {
                let uid = self.connection.uid;
                self.attach(id, Wanted { namespace, uid, shared, block_bytes, capacity_bytes, host_bytes, device })?;
                return Ok(None);
            }
            Request::RemoveSpace { namespace, block_bytes, shared } => {
                let (spaces, uid) = (Rc::clone(&self.state.spaces), self.connection.uid);
                let (capacity_bytes, host_bytes, device) = (0, 0, SpaceDevice::None);
                let wanted = Wanted { namespace, uid, shared, block_bytes, capacity_bytes, host_bytes, device };
                let remove = async move { done(spaces.remove(wanted).await) };
                self.spawn(id, remove, Cancel::default());
                return Ok(None);
            }
            Request::Hold { keep, device, inode, size, changed_s, changed_ns, path } => {
                let (changed_s, changed_ns) = (changed_s.cast_signed(), changed_ns.cast_signed());
                let identity = FileIdentity { device, inode, size, changed_s, changed_ns };
                self.hold(id, WantedFile { path, identity, keep })?;
                return Ok(None);
            }
            _ => {}
        }
        let Some((_, transfers)) = &self.attached else {
            return Err(Failure::new(ServiceFault::Argument, "no space: attach to one first"));
        };
        let transfers = Rc::clone(transfers);
        if let Request::Pin { most, keys } = request {
            return self.pin(id, most, &keys).map(Some);
        }
        match answer_at_once(transfers.cache(), request) {
            Ok(answered) => answered.map(Some),
            Err(request) => self.start(id, &transfers, request, lent),
        }
    }

    /// Starts a request in the client's space.
    fn start(
        &mut self,
        id: u64,
        transfers: &Rc<ClientTransfers>,
        request: Request,
        lent: Lent,
    ) -> Result<Option<Reply>, Failure> {
        let (transfers, cache, none) = (Rc::clone(transfers), transfers.cache().clone(), Cancel::default());
        match request {
            Request::Register { region, kind, pin, offset, len } => {
                check_kind(kind, self.device)?;
                self.register(&transfers, (region, offset, len), kind, &lent)?;
                if !pin || kind != RegionKind::Host || !self.state.config.pin {
                    return Ok(Some(Reply::Registered { pinned: false }));
                }
                self.spawn(id, async move { Reply::Registered { pinned: transfers.regions.pin(region).await } }, none);
            }
            Request::RegisterDevice { region, offset, len, handle } => {
                check_room(&transfers.regions, &self.state.config, region, len)?;
                let state = Rc::clone(&self.state);
                let add = async move {
                    // Again: other memory may be registered while this is imported.
                    let check = || check_room(&transfers.regions, &state.config, region, len);
                    let added = transfers.regions.add_imported(region, handle, (offset, len), check).await;
                    added.map_or_else(Reply::Failed, |()| Reply::Registered { pinned: false })
                };
                self.spawn(id, add, none);
            }
            Request::Unregister { region } => {
                let release = async move {
                    transfers.regions.release(region).await;
                    Reply::Done
                };
                self.spawn(id, release, none);
            }
            Request::Load(blocks) => self.move_blocks(id, transfers, Way::Load, blocks),
            Request::Store { parent, blocks } => self.move_blocks(id, transfers, Way::Store(parent), blocks),
            Request::LoadLayers { layer_of, blocks } => {
                let (cancel, tell) = (Cancel::default(), self.layers.0.clone());
                let tell = move |reply| drop(tell.send((id, reply)));
                let run = transfers.load_layers(layer_of, blocks, cancel.clone(), tell);
                self.spawn(id, async move { run.await.map_or_else(Reply::Failed, Reply::Results) }, cancel);
            }
            Request::Keep { ms, keys } => {
                let keep = async move { Reply::Count(transfers.keep(&keys, Duration::from_millis(ms)).await as u32) };
                self.spawn(id, keep, none);
            }
            Request::Remove { durable, keys } => self.spawn(id, remove(cache, keys, durable), none),
            Request::Sync => {
                let sync = async move { done(cache.sync().await.map_err(|error| Failure::from(&error))) };
                self.spawn(id, sync, none);
            }
            _ => unreachable!("answered before"),
        }
        Ok(None)
    }

    /// Answers with the next figures that are collected, which other clients get too.
    fn begin_status(&mut self, id: u64) {
        self.awaits_status = true;
        self.requests.insert(id, Cancel::default());
        let (state, seen) = (Rc::clone(&self.state), self.state.status_frames.made());
        self.tasks.spawn_local(async move {
            let frame = state.status_frames.after(seen, || state.status()).await;
            Ended { id, result: Outcome::Status(frame) }
        });
    }

    fn attach(&mut self, id: u64, wanted: Wanted) -> Result<(), Failure> {
        if self.attaching {
            return Err(Failure::new(ServiceFault::Argument, "attached already: a connection has one space"));
        }
        self.connection.may_be_client()?;
        self.attaching = true;
        self.requests.insert(id, Cancel::default());
        let spaces = Rc::clone(&self.state.spaces);
        let entered = async move { Ended { id, result: Outcome::Attached(Entered::new(&spaces, wanted).await) } };
        self.tasks.spawn_local(entered);
        Ok(())
    }

    /// Holds a file for a client of the service's own user: the service opens it by its path, as itself.
    fn hold(&mut self, id: u64, wanted: WantedFile) -> Result<(), Failure> {
        let (uid, own) = (self.connection.uid, own_uid());
        if uid != own {
            let text =
                format!("file: found a client of user {uid}, expected {own}: a service reads its own user's files");
            return Err(Failure::new(ServiceFault::Permission, text));
        }
        self.connection.may_be_client()?;
        if self.held.len() >= HELD_MAX || self.held.contains_key(&id) {
            let text = format!(
                "file: found {} that this client holds, expected fewer than {HELD_MAX}, and no request's id \
                                again",
                self.held.len()
            );
            return Err(Failure::new(ServiceFault::Busy, text));
        }
        let cancel = Cancel::default();
        self.requests.insert(id, cancel.clone());
        let spaces = Rc::clone(&self.state.spaces);
        let state = Rc::clone(&self.state);
        self.tasks.spawn_local(async move {
            let held = tokio::select! { biased;
                () = cancel.canceled() => Err(Failure::new(ServiceFault::Canceled, "the client let go of the file")),
                held = spaces.hold(wanted) => held,
                // An open may hang for ever.
                () = state.drains() => Err(Failure::new(ServiceFault::Draining, "the service is ending")),
            };
            Ended { id, result: Outcome::Held(held) }
        });
        Ok(())
    }

    /// Maps a client's memory and registers it.
    fn register(
        &self,
        transfers: &ClientTransfers,
        (region, offset, len): (u32, u64, u64),
        kind: RegionKind,
        lent: &Lent,
    ) -> Result<(), Failure> {
        let fd = match lent {
            Lent::Memory(fd) => fd,
            Lent::Nothing => {
                return Err(Failure::new(ServiceFault::Argument, "register: no descriptor came with the frame"));
            }
            Lent::Other => {
                let text = "memory: found a descriptor of something else, expected a memfd, or a file in /dev/shm";
                return Err(Failure::new(ServiceFault::Memory, text));
            }
        };
        check_room(&transfers.regions, &self.state.config, region, len)?;
        transfers.regions.add(region, kind, fd, offset, len)
    }

    fn move_blocks(&mut self, id: u64, transfers: Rc<ClientTransfers>, way: Way, blocks: Blocks) {
        let cancel = Cancel::default();
        let run = transfers.run(way, blocks, cancel.clone());
        self.spawn(id, async move { run.await.map_or_else(Reply::Failed, Reply::Results) }, cancel);
    }
}

/// Refuses a region whose number another has, and one beyond the limits of a connection.
fn check_room(regions: &Regions, config: &ServerConfig, region: u32, len: u64) -> Result<(), Failure> {
    if regions.has(region) {
        return Err(taken(region));
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
    Ok(())
}

fn done(result: Result<(), Failure>) -> Reply {
    match result {
        Ok(()) => Reply::Done,
        Err(failure) => Reply::Failed(failure),
    }
}

/// Answers a look-up, or a hint that takes no more steps than it has keys; any other request comes back.
fn answer_at_once(cache: &Cache, request: Request) -> Result<Result<Reply, Failure>, Request> {
    Ok(Ok(match request {
        Request::MatchLen { keys } => Reply::Count(cache.match_len(&keys) as u32),
        Request::MatchPrefix { keys } => Reply::Tiers(cache.match_prefix(&keys)),
        Request::Contains { keys } => Reply::Flags(keys.iter().map(|key| cache.contains(key)).collect()),
        Request::Prefetch { keys } => match cache.prefetch(&keys) {
            Ok(started) => Reply::Count(started as u32),
            Err(error) => return Ok(Err(Failure::from(&error))),
        },
        Request::Touch { keys } => {
            cache.touch(&keys);
            Reply::Done
        }
        Request::Release { next, mut keys } => {
            let count = keys.len();
            keys.extend(next);
            Reply::Count(cache.release_first(&keys, count) as u32)
        }
        Request::Stats => Reply::Stats(Box::new(cache.stats())),
        other => return Err(other),
    }))
}

/// Refuses a memfd that plays a device's memory where the client's device is another.
fn check_kind(kind: RegionKind, device: SpaceDevice) -> Result<(), Failure> {
    if kind == RegionKind::Host || device == SpaceDevice::Simulated {
        return Ok(());
    }
    let text = "region: found memory of a simulated device, expected other memory: the client attached without such a \
                device";
    Err(Failure::new(ServiceFault::Memory, text))
}

async fn remove(cache: Cache, keys: Vec<BlockKey>, durable: bool) -> Reply {
    let mut results = Vec::with_capacity(keys.len());
    for key in &keys {
        let removed = if durable { cache.remove_durably(key).await } else { cache.remove(key).await };
        results.push(removed.map_err(|error| Failure::from(&error)));
    }
    Reply::Results(results)
}

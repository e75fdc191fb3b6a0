//! A stream between a client and the service: bytes arrive in order, late, in pieces, or not for a long time.

use std::{
    collections::{BTreeMap, VecDeque},
    future::ready,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

use kvhoist_service::internals::{
    protocol::{HEADER_BYTES, Header, Hello, Welcome},
    seams::{Came, Coming, Descriptor, Lent, Wire},
};
use tokio::sync::Notify;

use super::plan::Delivery;
use crate::sim::Rng;

/// Locks what the ends of a stream share; nothing panics under it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The requests of one connection that have no reply yet, as an observer of the socket sees them.
#[derive(Default)]
pub struct Ids {
    /// Each with how often it was sent: a client may send one twice.
    in_flight: BTreeMap<u64, u32>,
    /// Bytes that are not those of the protocol were sent.
    lost: bool,
    pub wrong: Option<String>,
}

impl Ids {
    pub fn in_flight(&self) -> usize {
        if self.lost { 0 } else { self.in_flight.len() }
    }

    fn request(&mut self, Header { id, .. }: Header) {
        // A cancellation has no reply.
        if id != 0 {
            *self.in_flight.entry(id).or_default() += 1;
        }
    }

    fn reply(&mut self, Header { id, kind, .. }: Header) {
        // A goodbye answers no request.
        if id == 0 || self.lost {
            return;
        }
        match self.in_flight.get_mut(&id) {
            Some(_) if kind == LAYER => {}
            Some(1) => drop(self.in_flight.remove(&id)),
            Some(sent) => *sent -= 1,
            None => drop(self.wrong.get_or_insert(format!("a reply to request {id}, which is not in flight"))),
        }
    }
}

/// The kind of a reply that tells of one layer: others of the request follow.
const LAYER: u16 = 0x10c;

/// Reads the headers of the frames that pass.
struct Observer {
    ids: Arc<Mutex<Ids>>,
    note: fn(&mut Ids, Header),
    /// Bytes that are no header: the rest of a handshake or of a body.
    skip: usize,
    header: Vec<u8>,
}

impl Observer {
    fn pass(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let skipped = self.skip.min(bytes.len());
            (self.skip, bytes) = (self.skip - skipped, &bytes[skipped..]);
            let taken = bytes.len().min(HEADER_BYTES - self.header.len());
            if self.skip > 0 || taken == 0 {
                continue;
            }
            self.header.extend_from_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            let Some(header) = self.header.first_chunk::<HEADER_BYTES>() else { continue };
            let mut ids = lock(&self.ids);
            match Header::decode(header) {
                Ok(header) => {
                    self.skip = header.body_bytes as usize;
                    (self.note)(&mut ids, header);
                }
                Err(_) => ids.lost = true,
            }
            drop(ids);
            self.header.clear();
        }
    }
}

/// A message of so many bytes is not cut in pieces: a register frame.
const WHOLE_BYTES: usize = 40;

/// One direction of a stream.
struct Way {
    /// Sent and not received.
    bytes: VecDeque<u8>,
    /// Of these, how many have arrived.
    arrived: usize,
    /// Bytes received so far.
    received: u64,
    /// Descriptors, each with the number of the byte that it goes with.
    fds: VecDeque<(u64, OwnedFd)>,
    room: usize,
    /// Nothing more is sent.
    ended: bool,
    end_arrived: bool,
    /// The sender has hung up, and will not receive either.
    hung_up: bool,
    /// The receiver has hung up, and the sender can know it.
    broken: bool,
    receiver: Option<Waker>,
    sender: Option<Waker>,
    observer: Observer,
}

impl Way {
    /// So many bytes arrive, and the rest of a short message that a descriptor came with.
    fn arrive(&mut self, piece: usize) {
        let mut end = self.received + (self.arrived + piece) as u64;
        let within = |at: &u64| *at < end && end < *at + WHOLE_BYTES as u64;
        if let Some(at) = self.fds.iter().map(|(at, _)| *at).find(within) {
            end = (at + WHOLE_BYTES as u64).min(self.received + self.bytes.len() as u64);
        }
        self.arrived = (end - self.received) as usize;
    }

    fn take(&mut self, len: usize) -> Vec<u8> {
        self.arrived -= len;
        self.received += len as u64;
        self.bytes.drain(..len).collect()
    }
}

/// One direction, and what wakes its carrier.
struct Lane(Mutex<Way>, Notify);

impl Lane {
    fn new(room: usize, observer: Observer) -> Arc<Self> {
        let way = Way {
            bytes: VecDeque::new(),
            arrived: 0,
            received: 0,
            fds: VecDeque::new(),
            room,
            ended: false,
            end_arrived: false,
            hung_up: false,
            broken: false,
            receiver: None,
            sender: None,
            observer,
        };
        Arc::new(Lane(Mutex::new(way), Notify::new()))
    }

    /// Changes the direction, and wakes both of its ends.
    fn change(&self, change: impl FnOnce(&mut Way)) {
        let mut way = lock(&self.0);
        change(&mut way);
        let wakers = [way.receiver.take(), way.sender.take()];
        drop(way);
        wakers.into_iter().flatten().for_each(Waker::wake);
        self.1.notify_one();
    }

    /// Carries bytes from the sender to the receiver. A hang-up arrives with the end, also at those who send: `back` is
    /// the other direction.
    async fn carry(self: Arc<Self>, back: Arc<Self>, mut rng: Rng, delivery: Delivery) {
        loop {
            let (left, ended, broken) = {
                let way = lock(&self.0);
                (way.bytes.len() - way.arrived, way.ended, way.broken)
            };
            if broken || (left == 0 && ended) {
                let mut hung_up = false;
                self.change(|way| {
                    way.end_arrived = true;
                    hung_up = way.hung_up;
                });
                // A socket that was shut down may be closed later.
                while !hung_up {
                    self.1.notified().await;
                    hung_up = lock(&self.0).hung_up;
                }
                return back.change(|way| way.broken = true);
            }
            if left == 0 {
                self.1.notified().await;
                continue;
            }
            if rng.chance(delivery.freeze) {
                tokio::time::sleep(Duration::from_millis(rng.below(delivery.freeze_ms_max))).await;
            } else if rng.chance(delivery.late) {
                tokio::time::sleep(Duration::from_millis(rng.below(5))).await;
            } else {
                tokio::task::yield_now().await;
            }
            let piece = if rng.chance(delivery.pieces) { rng.between(1, left as u64) as usize } else { left };
            self.change(|way| way.arrive(piece));
        }
    }
}

/// One end of a stream.
pub struct End {
    out: Arc<Lane>,
    into: Arc<Lane>,
}

impl Drop for End {
    fn drop(&mut self) {
        self.hang_up();
    }
}

/// A stream: the client's end, the service's, and the requests on it. Tasks of the current `LocalSet` carry its bytes.
pub fn pair(rng: &mut Rng, delivery: Delivery) -> (Arc<End>, Arc<End>, Arc<Mutex<Ids>>) {
    let ids = Arc::new(Mutex::new(Ids::default()));
    let observer = |note, skip| Observer { ids: Arc::clone(&ids), note, skip, header: Vec::new() };
    let up = Lane::new(delivery.room, observer(Ids::request, Hello::BYTES));
    let down = Lane::new(delivery.room, observer(Ids::reply, Welcome::BYTES));
    for (lane, back) in [(&up, &down), (&down, &up)] {
        tokio::task::spawn_local(Arc::clone(lane).carry(Arc::clone(back), rng.fork(), delivery));
    }
    let client = Arc::new(End { out: Arc::clone(&up), into: Arc::clone(&down) });
    (client, Arc::new(End { out: down, into: up }), ids)
}

impl Wire for End {
    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let mut way = lock(&self.out.0);
        if way.broken || way.ended {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let room = way.room.saturating_sub(way.bytes.len());
        // A message as short as that is taken whole or not at all.
        let len = bytes.len().min(if !fds.is_empty() && room > 0 { room.max(WHOLE_BYTES) } else { room });
        if len == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if let Some(fd) = fds.first() {
            let at = way.received + way.bytes.len() as u64;
            way.fds.push_back((at, fd.try_clone_to_owned()?));
        }
        way.bytes.extend(&bytes[..len]);
        way.observer.pass(&bytes[..len]);
        drop(way);
        self.out.1.notify_one();
        Ok(len)
    }

    fn receive(&self, buf: &mut [u8]) -> io::Result<Came> {
        let mut way = lock(&self.into.0);
        let mut len = way.arrived.min(buf.len());
        if len == 0 {
            return if way.end_arrived { Ok(Came::Bytes(0)) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let lent = way.fds.front().is_some_and(|(at, _)| *at < way.received + len as u64);
        if lent {
            // A descriptor ends a call before the next one, as in the kernel.
            if let Some((next, _)) = way.fds.get(1) {
                len = len.min((*next - way.received) as usize);
            }
            for (to, from) in buf.iter_mut().zip(&way.bytes) {
                *to = *from;
            }
            return Ok(Came::Lent(len));
        }
        for (to, from) in buf.iter_mut().zip(way.take(len)) {
            *to = from;
        }
        drop(way);
        self.into.change(|_| {});
        Ok(Came::Bytes(len))
    }

    fn receive_lent(&self, len: usize) -> Coming<'_> {
        let mut way = lock(&self.into.0);
        let fd = way.fds.pop_front();
        let bytes = way.take(len);
        drop(way);
        self.into.change(|_| {});
        let lent = fd.map_or(Lent::Nothing, |(_, fd)| Lent::Memory(Descriptor::new(fd, drop)));
        Box::pin(ready(Ok((bytes, lent))))
    }

    fn end(&self) {
        self.out.change(|way| way.ended = true);
    }

    fn hang_up(&self) {
        self.out.change(|way| (way.ended, way.hung_up) = (true, true));
    }

    fn poll_ready(&self, context: &mut Context<'_>, receive: bool, send: bool) -> Poll<io::Result<()>> {
        if receive {
            let mut way = lock(&self.into.0);
            if way.arrived > 0 || way.end_arrived {
                return Poll::Ready(Ok(()));
            }
            way.receiver = Some(context.waker().clone());
        }
        if send {
            let mut way = lock(&self.out.0);
            if way.bytes.len() < way.room || way.broken {
                return Poll::Ready(Ok(()));
            }
            way.sender = Some(context.waker().clone());
        }
        Poll::Pending
    }
}

//! A socket that is full: the thread waits for it, and does not spin.

use std::{
    collections::VecDeque,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    pin::pin,
    sync::atomic::{AtomicUsize, Ordering},
    task::{Context, Poll, Waker},
};

use super::*;
use crate::service::{
    client::order::Counted,
    link::Link,
    protocol::{HEADER_BYTES, Limits},
    wire::Wire,
};

/// Takes as many bytes as it has room for.
#[derive(Default)]
struct Narrow {
    room: AtomicUsize,
    taken: Mutex<Vec<u8>>,
}

impl Wire for Narrow {
    fn send(&self, bytes: &[u8], _fd: Option<BorrowedFd<'_>>) -> io::Result<usize> {
        let len = bytes.len().min(self.room.load(Ordering::Relaxed));
        if len == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.room.fetch_sub(len, Ordering::Relaxed);
        self.taken.lock().expect("one thread").extend_from_slice(&bytes[..len]);
        Ok(len)
    }

    fn receive(&self, _buf: &mut [u8], _fds: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn end(&self) {}

    fn poll_ready(&self, _context: &mut Context<'_>, _receive: bool, _send: bool) -> Poll<io::Result<()>> {
        Poll::Pending
    }
}

/// Whether the thread would go on without waiting.
fn is_woken(line: &Line) -> bool {
    pin!(line.woken.notified()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

#[test]
fn the_thread_waits_while_the_socket_is_full() {
    let wire = Arc::new(Narrow::default());
    let (_receiver, sender) = Link::new(Arc::clone(&wire) as Arc<dyn Wire>).split();
    let line = Line::new("a socket".into(), Duration::from_secs(60));
    line.connected(sender, &Limits::new(8, 8, 1 << 20));
    wire.room.store(HEADER_BYTES + 3, Ordering::Relaxed);
    let frames = [Request::Sync.encode(2), Request::Unregister { region: 7 }.encode(4), Request::Stats.encode(6)];
    let counted = Arc::default();
    let mut replies = Vec::new();
    for (id, frame) in [2, 4, 6].into_iter().zip(&frames) {
        let (reply, receiver) = oneshot::channel();
        let keeps = (Counted::new(&counted, 8).expect("few calls"), None);
        line.begin(Call { id, frame: frame.clone(), what: What::Plain, reply, keeps }).expect("connected");
        replies.push(receiver);
    }
    assert!(is_woken(&line), "bytes are left, which the thread is to send");
    assert!(line.wait().to_send);
    assert!(!is_woken(&line), "the thread waits for the socket, and does not spin");
    assert_eq!(wire.taken.lock().expect("one thread").len(), HEADER_BYTES + 3);
    for _ in 0..1000 {
        wire.room.store(1, Ordering::Relaxed);
        line.wait();
    }
    assert!(!line.wait().to_send, "all is sent");
    assert_eq!(*wire.taken.lock().expect("one thread"), frames.concat());
}

//! Clients that connect, and send frames and descriptors that nobody wants.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
};

use kvhoist_service::internals::protocol::{FRAME_BYTES_MAX, Header, Hello, Request, Welcome};

use super::raw::{Raw, register};
use crate::options::Outcome;

/// Connections that `crowd` has at a time: more than the service admits.
const CROWD: usize = 2_000;
/// Connections with a frame that does not come, at a time.
const ANNOUNCED: usize = 200;
/// Sockets that linger, whose peers are kept.
const LINGERING: usize = 16;

pub fn never_reads(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let mut stream = Raw::greeted(socket)?.stream;
    stream.set_nonblocking(true)?;
    let request = Request::Status.encode(1);
    while !stop.load(Relaxed) {
        // Where the service takes no more: it reads nothing more of this connection.
        if stream.write_all(&request).is_err() {
            thread::yield_now();
        }
    }
    Ok(())
}

pub fn come_and_go(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    while !stop.load(Relaxed) {
        drop(UnixStream::connect(socket));
    }
    Ok(())
}

pub fn crowd(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let mut held = VecDeque::new();
    while !stop.load(Relaxed) {
        // The service, or a limit of this process, refuses some: those that it holds are let go, and come again.
        match Raw::greeted(socket) {
            Ok(raw) => held.push_back(raw),
            Err(_) => drop(held.pop_front()),
        }
        if held.len() > CROWD {
            held.pop_front();
        }
    }
    Ok(())
}

pub fn random_bytes(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let mut state = 1u64;
    while !stop.load(Relaxed) {
        // The service hangs up at once while it still has the connections of a crowd.
        let Ok(Raw { mut stream, .. }) = Raw::greeted(socket) else { continue };
        let mut bytes = [0; 3000];
        for byte in &mut bytes {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (state >> 56) as u8;
        }
        drop(stream.write_all(&bytes));
        drop(stream.read(&mut [0; 256]));
    }
    Ok(())
}

pub fn future_version(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    while !stop.load(Relaxed) {
        let mut stream = Raw::connect(socket)?.stream;
        stream.write_all(&Hello { version_min: 4, version_max: 900 }.encode())?;
        drop(stream.read(&mut [0; Welcome::BYTES]));
    }
    Ok(())
}

/// Each time the service says goodbye, and the client comes again.
pub fn replayed_ids(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    while !stop.load(Relaxed) {
        let mut raw = Raw::attached(socket)?;
        drop(raw.stream.write_all(&[Request::Sync.encode(5), Request::Sync.encode(5)].concat()));
        raw.hung_up();
    }
    Ok(())
}

/// Frames of the greatest length, of which 3 bytes come.
pub fn announced(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let header = Header { body_bytes: FRAME_BYTES_MAX as u32, kind: 4, id: 9 }.encode();
    let mut held = VecDeque::new();
    while !stop.load(Relaxed) {
        let mut raw = Raw::attached(socket)?;
        raw.stream.write_all(&[&header[..], &[0; 3]].concat())?;
        held.push_back(raw);
        if held.len() > ANNOUNCED {
            held.pop_front();
        }
    }
    Ok(())
}

/// Descriptors that no frame wants, 200 a connection.
pub fn unasked(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let file = File::open("/dev/null")?;
    while !stop.load(Relaxed) {
        let raw = Raw::attached(socket)?;
        for id in [7, 8] {
            // The service may have hung up at the first ones.
            drop(raw.send_with(&Request::Stats.encode(id), &[file.as_fd(); 100]));
        }
        raw.hung_up();
    }
    Ok(())
}

/// The client's own end of the connection goes along with a part of the hello, a frame that wants a descriptor, a part
/// of it, and a frame that wants none.
pub fn own_end(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let frame = register(1, 0, 4096).encode(2);
    let sync = Request::Sync.encode(2);
    for bytes in [&b"kvhoist"[..], &frame, &frame[..20], &sync].iter().cycle().take_while(|_| !stop.load(Relaxed)) {
        let raw = if *bytes == b"kvhoist" { Raw::connect(socket)? } else { Raw::attached(socket)? };
        raw.send_with(bytes, &[raw.stream.as_fd()])?;
    }
    Ok(())
}

/// TCP sockets whose close waits, each with a frame that wants a descriptor, one that wants none, and the hello.
pub fn lingering(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    set(&listener, libc::SO_RCVBUF, 4096)?;
    let (frame, hello, sync) = (register(1, 0, 4096).encode(2), Hello::ours().encode(), Request::Sync.encode(2));
    let mut peers = VecDeque::new();
    for bytes in [&frame[..], &sync, &hello].iter().cycle().take_while(|_| !stop.load(Relaxed)) {
        let raw = if bytes[..] == hello { Raw::connect(socket)? } else { Raw::attached(socket)? };
        let (ours, peer) = linger(&listener)?;
        raw.send_with(bytes, &[ours.as_fd()])?;
        // Where the service has closed its descriptor already, this thread waits instead of it.
        drop(ours);
        peers.push_back(peer);
        if peers.len() > LINGERING {
            peers.pop_front();
        }
    }
    Ok(())
}

/// A socket whose close waits for a peer that reads nothing, and that peer.
fn linger(listener: &TcpListener) -> Outcome<(TcpStream, TcpStream)> {
    let mut ours = TcpStream::connect(listener.local_addr()?)?;
    let (peer, _) = listener.accept()?;
    set(&ours, libc::SO_SNDBUF, 4096)?;
    ours.set_nonblocking(true)?;
    while ours.write(&[0; 4096]).is_ok() {}
    set(&ours, libc::SO_LINGER, libc::linger { l_onoff: 1, l_linger: 1 })?;
    Ok((ours, peer))
}

/// Sets an option of a socket: a plain structure of numbers.
fn set<T: Copy>(socket: &impl AsRawFd, option: libc::c_int, value: T) -> Outcome<()> {
    let bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: the value outlives the call, which reads so many bytes of it.
    let failed =
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, (&raw const value).cast(), bytes) };
    if failed != 0 {
        return Err(io::Error::last_os_error().into());
    }
    Ok(())
}

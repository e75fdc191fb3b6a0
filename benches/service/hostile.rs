//! What a client feels of hostile ones beside it.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use kvhoist::{
    BlockKey, Segment, block_on,
    internals::service::protocol::{Blocks, HEADER_BYTES, Header, Hello, Place, RegionKind, Request, Welcome},
    service::{Client, ClientOptions, SharedMemory},
};

use crate::{
    options::Outcome,
    pool::{all_done, key, timed},
};

const BLOCK_BYTES: usize = 64 << 10;
const BLOCKS: u64 = 16;
const CALLS: usize = 1_000;

/// One kind of hostility, until it is told to stop.
type Hostility = fn(&Path, &AtomicBool) -> Outcome<()>;

const KINDS: [(&str, Hostility); 8] = [
    ("truncated memory", truncated_memory),
    ("places outside of its memory", wrong_offsets),
    ("ids in flight sent again", replayed_ids),
    ("a reader that never reads", never_reads),
    ("connections that come and go", connections),
    ("thousands of connections, held", crowd),
    ("random bytes", random_bytes),
    ("a version from the future", future_version),
];
/// Connections that `crowd` has at a time: more than the service admits.
const CROWD: usize = 2_000;

/// The p99 of a client's calls while others are hostile, over that while nobody is, in turns.
pub fn hostile(socket: &Path, share: u64) -> Outcome<()> {
    let mut wanted = ClientOptions::new("hostile", BLOCK_BYTES);
    (wanted.capacity_bytes, wanted.host_bytes) = (share, share);
    let client = block_on(Client::connect(socket, wanted))?;
    let memory = Arc::new(SharedMemory::new(BLOCKS as usize * BLOCK_BYTES)?);
    // SAFETY: nobody touches a block of it while the block is on its way.
    let lent = unsafe { kvhoist::Memory::shared(Arc::clone(&memory)) };
    block_on(client.register(lent.pinned(true)))?;
    let place =
        |at: u64| vec![Segment { ptr: memory.as_ptr().wrapping_add(at as usize * BLOCK_BYTES), len: BLOCK_BYTES }];
    let places: Vec<_> = (0..BLOCKS).map(place).collect();
    let keys: Vec<BlockKey> = (0..BLOCKS).map(key).collect();
    all_done(&block_on(client.store_from(&keys, None, &places))?)?;
    let p99 = || -> Outcome<f64> {
        let mut times = Vec::with_capacity(CALLS);
        for at in 0..CALLS {
            let at = at % BLOCKS as usize;
            times.push(timed(|| all_done(&block_on(client.load_into(&keys[at..=at], &places[at..=at]))?))?);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[CALLS * 99 / 100])
    };
    p99()?;
    println!("p99 of a load of {BLOCK_BYTES} bytes beside a hostile client, over that without: median of 3, all");
    for (name, kind) in KINDS {
        let mut ratios = Vec::new();
        for _ in 0..3 {
            let quiet = p99()?;
            let (stop, socket): (_, PathBuf) = (Arc::new(AtomicBool::new(false)), socket.into());
            let told = Arc::clone(&stop);
            let thread = thread::spawn(move || kind(&socket, &told));
            let beside = p99();
            stop.store(true, Ordering::Relaxed);
            if let Err(error) = thread.join().map_err(|_| "it panicked")? {
                println!("{name}: ended early: {error}");
            }
            ratios.push(beside? / quiet);
        }
        ratios.sort_by(f64::total_cmp);
        println!("  {name:<32} {:.2}   {ratios:.2?}", ratios[1]);
    }
    Ok(())
}

fn greeted(socket: &Path) -> Outcome<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    // A service without a descriptor to spare lets a connection wait.
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(&Hello::ours().encode())?;
    stream.read_exact(&mut [0; Welcome::BYTES])?;
    Ok(stream)
}

fn never_reads(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let mut stream = greeted(socket)?;
    stream.set_nonblocking(true)?;
    let request = Request::Status.encode(1);
    while !stop.load(Ordering::Relaxed) {
        // Where the service takes no more: it reads nothing more of this connection.
        if stream.write_all(&request).is_err() {
            thread::yield_now();
        }
    }
    Ok(())
}

fn connections(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    while !stop.load(Ordering::Relaxed) {
        drop(UnixStream::connect(socket));
    }
    Ok(())
}

fn random_bytes(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let mut state = 1u64;
    while !stop.load(Ordering::Relaxed) {
        let mut stream = greeted(socket)?;
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

fn future_version(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    while !stop.load(Ordering::Relaxed) {
        let mut stream = UnixStream::connect(socket)?;
        stream.write_all(&Hello { version_min: 2, version_max: 900 }.encode())?;
        drop(stream.read(&mut [0; Welcome::BYTES]));
    }
    Ok(())
}

fn crowd(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let mut held = std::collections::VecDeque::new();
    while !stop.load(Ordering::Relaxed) {
        // The service, or a limit of this process, refuses some: those that it holds are let go, and come again.
        match greeted(socket) {
            Ok(stream) => held.push_back(stream),
            Err(_) => drop(held.pop_front()),
        }
        if held.len() > CROWD {
            held.pop_front();
        }
    }
    Ok(())
}

/// In a space of its own.
fn attached(socket: &Path) -> Outcome<UnixStream> {
    let mut stream = greeted(socket)?;
    let (namespace, bytes) = ("hostile clients".to_owned(), 4 << 20);
    let (capacity_bytes, host_bytes) = (bytes, bytes);
    let attach =
        Request::Attach { namespace, block_bytes: BLOCK_BYTES as u64, capacity_bytes, host_bytes, shared: false };
    stream.write_all(&attach.encode(1))?;
    skip_reply(&mut stream)?;
    Ok(stream)
}

fn skip_reply(stream: &mut UnixStream) -> Outcome<()> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let body_bytes = Header::decode(&header)?.body_bytes;
    io::copy(&mut stream.take(body_bytes.into()), &mut io::sink())?;
    Ok(())
}

fn truncated_memory(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let mut stream = attached(socket)?;
    let memory = memfd(4096)?;
    let said = Request::Register { region: 1, kind: RegionKind::Host, pin: true, offset: 0, len: 1 << 20 };
    for id in (2..).take_while(|_| !stop.load(Ordering::Relaxed)) {
        send_with(&stream, &said.encode(id), &memory)?;
        skip_reply(&mut stream)?;
    }
    Ok(())
}

fn wrong_offsets(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let mut stream = attached(socket)?;
    let memory = memfd(1 << 20)?;
    let good = Request::Register { region: 1, kind: RegionKind::Host, pin: true, offset: 0, len: 1 << 20 };
    send_with(&stream, &good.encode(2), &memory)?;
    skip_reply(&mut stream)?;
    let wrong = [(1, (1 << 20) - 1), (1, u64::MAX), (9, 0)];
    for (id, (region, offset)) in (3..).zip(wrong.into_iter().cycle()).take_while(|_| !stop.load(Ordering::Relaxed)) {
        let place = Place { region, offset, len: BLOCK_BYTES as u32 };
        let load = Request::Load(Blocks { keys: vec![key(0)], places: vec![vec![place]] });
        stream.write_all(&load.encode(id))?;
        skip_reply(&mut stream)?;
    }
    Ok(())
}

/// Each time the service says goodbye, and the client comes again.
fn replayed_ids(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    while !stop.load(Ordering::Relaxed) {
        let mut stream = attached(socket)?;
        drop(stream.write_all(&[Request::Sync.encode(5), Request::Sync.encode(5)].concat()));
        drop(io::copy(&mut stream, &mut io::sink()));
    }
    Ok(())
}

/// Memory without seals, of so many bytes.
fn memfd(len: u64) -> Outcome<File> {
    // SAFETY: a name that ends with 0; the result is checked before it is used.
    let fd = unsafe { libc::memfd_create(c"hostile".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error().into());
    }
    // SAFETY: a descriptor just made, owned by nobody else.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    Ok(file)
}

/// Sends a frame with a descriptor.
fn send_with(stream: &UnixStream, frame: &[u8], file: &File) -> Outcome<()> {
    let fd_bytes = size_of::<libc::c_int>() as libc::c_uint;
    let mut control = [0u64; 8];
    let mut part = libc::iovec { iov_base: frame.as_ptr().cast_mut().cast(), iov_len: frame.len() };
    // SAFETY: all zero is an empty message; it then names buffers that outlive the call, with their lengths, and the
    // control buffer has room for a header with one descriptor.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(fd_bytes) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(fd_bytes) as _;
        libc::CMSG_DATA(header).cast::<libc::c_int>().write_unaligned(file.as_raw_fd());
        libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    if usize::try_from(sent).ok() != Some(frame.len()) {
        return Err(format!("a frame of {} bytes: {sent} sent", frame.len()).into());
    }
    Ok(())
}

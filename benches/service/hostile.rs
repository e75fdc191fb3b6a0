//! What a client feels of hostile ones beside it.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use kvhoist::{
    BlockKey, Segment, block_on,
    internals::service::protocol::{Hello, Request, Welcome},
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

/// The p99 of a client's calls while others are hostile, over that while nobody is, in turns.
pub fn hostile(socket: &Path, share: u64) -> Outcome<()> {
    let mut wanted = ClientOptions::new("hostile", BLOCK_BYTES);
    (wanted.capacity_bytes, wanted.host_bytes) = (share, share);
    let client = block_on(Client::connect(socket, wanted))?;
    let memory = Arc::new(SharedMemory::new(BLOCKS as usize * BLOCK_BYTES)?);
    block_on(client.register(&memory, kvhoist::RegisterOptions::default().pinned(true)))?;
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
    let kinds: [(&str, Hostility); 4] = [
        ("a reader that never reads", never_reads),
        ("connections that come and go", connections),
        ("random bytes", random_bytes),
        ("a version from the future", future_version),
    ];
    p99()?;
    for (name, kind) in kinds {
        let mut ratios = Vec::new();
        for _ in 0..3 {
            let quiet = p99()?;
            let (stop, socket): (_, PathBuf) = (Arc::new(AtomicBool::new(false)), socket.into());
            let told = Arc::clone(&stop);
            let thread = thread::spawn(move || kind(&socket, &told));
            let beside = p99();
            stop.store(true, Ordering::Relaxed);
            drop(thread.join());
            ratios.push(beside? / quiet);
        }
        ratios.sort_by(f64::total_cmp);
        println!("p99 of a load of {BLOCK_BYTES} bytes beside {name}: {:.2} times", ratios[1]);
    }
    Ok(())
}

fn greeted(socket: &Path) -> Outcome<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
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

//! What a client feels of hostile ones beside it.
//!
//! Honest clients that do the work of hostile ones stand before these: a client that stores as much as it likes costs
//! its neighbors as much.
//!
//! Two kinds are no client of a service in good health, and are measured by tests: kills of the service amid loads
//! (`tests/service/killed.rs`), and HTTP connections that never read (`cli/tests/serve`).

mod connections;
mod memory;
mod raw;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kvhoist::{BlockKey, Segment, SharedMemory, block_on};
use kvhoist_service::{Client, ClientOptions};

use self::raw::{BLOCK_BYTES, SPACE};
use crate::{
    options::Outcome,
    pool::{all_done, key},
};

const BLOCKS: u64 = 16;
const CALLS_MIN: usize = 1_000;
/// Long enough for a kind of hostility to begin, and to be felt.
const MEASURED: Duration = Duration::from_millis(500);
const ROUNDS: usize = 3;

/// One kind of hostility, until it is told to stop.
type Hostility = fn(&Path, &AtomicBool) -> Outcome<()>;

const KINDS: [(&str, Hostility); 22] = [
    ("no client: a busy thread", |_, stop| busy(1, stop)),
    ("no client: two busy threads", |_, stop| busy(2, stop)),
    ("honest: stores in a space of its own", |socket, stop| memory::stores(socket, stop, memory::PARTS, false)),
    ("honest: stores and loads in one space", |socket, stop| memory::stores_and_loads(socket, stop, false)),
    ("truncated memory", memory::truncated),
    ("places outside of its memory", memory::wrong_offsets),
    ("ids in flight sent again", connections::replayed_ids),
    ("a reader that never reads", connections::never_reads),
    ("connections that come and go", connections::come_and_go),
    ("thousands of connections, held", connections::crowd),
    ("random bytes", connections::random_bytes),
    ("a version from the future", connections::future_version),
    ("tebibytes lent until it is refused", memory::huge),
    ("memory taken away amid stores", |socket, stop| memory::stores(socket, stop, memory::PARTS, true)),
    ("the same, of blocks in one part", |socket, stop| memory::stores(socket, stop, 1, true)),
    ("sockets whose close lingers", connections::lingering),
    ("its own end of the connection", connections::own_end),
    ("attaches that are refused", memory::refused_attaches),
    ("65,536 places in 256 regions", memory::many_places),
    ("frames announced that never come", connections::announced),
    ("memory that changes amid stores", |socket, stop| memory::stores_and_loads(socket, stop, true)),
    ("descriptors that nobody wants", connections::unasked),
];

/// The 99th of a hundred calls, and the slowest one.
struct Times {
    p99: f64,
    worst: f64,
}

/// The p99 of a client's calls while others are hostile, over that while nobody is, in turns.
pub fn hostile(socket: &Path, share: u64, wanted_kind: &str) -> Outcome<()> {
    let mut wanted = ClientOptions::new(SPACE, BLOCK_BYTES);
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
    let measure = || -> Outcome<Times> {
        let (begun, mut times) = (Instant::now(), Vec::new());
        while times.len() < CALLS_MIN || begun.elapsed() < MEASURED {
            let at = times.len() % BLOCKS as usize;
            let call = Instant::now();
            all_done(&block_on(client.load_into(&keys[at..=at], &places[at..=at]))?)?;
            times.push(call.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok(Times { p99: times[times.len() * 99 / 100], worst: times[times.len() - 1] })
    };
    measure()?;
    println!(
        "p99 of a load of {BLOCK_BYTES} bytes beside a hostile client, over that without: median of {ROUNDS}, all;"
    );
    println!("the greatest p99 beside it and without, and the slowest load beside it and without, ms");
    for (name, kind) in KINDS.into_iter().filter(|(name, _)| name.contains(wanted_kind)) {
        let (mut ratios, mut p99, mut worst) = (Vec::new(), [0f64; 2], [0f64; 2]);
        for _ in 0..ROUNDS {
            let quiet = measure()?;
            let beside = beside(socket, name, kind, &measure)?;
            ratios.push(beside.p99 / quiet.p99);
            p99 = [p99[0].max(beside.p99), p99[1].max(quiet.p99)];
            worst = [worst[0].max(beside.worst), worst[1].max(quiet.worst)];
        }
        ratios.sort_by(f64::total_cmp);
        let [[beside, quiet], [worst, worst_quiet]] = [p99, worst].map(|times| times.map(|s| s * 1e3));
        let median = ratios[ROUNDS / 2];
        println!("  {name:<37} {median:.2}   {ratios:.2?}   {beside:.2} {quiet:.2}   {worst:.1} {worst_quiet:.1}");
    }
    Ok(())
}

/// What the processors alone cost the client, where hostile ones use as many.
fn busy(threads: usize, stop: &AtomicBool) -> Outcome<()> {
    thread::scope(|scope| {
        (0..threads).for_each(|_| drop(scope.spawn(|| while !stop.load(Ordering::Relaxed) {})));
    });
    Ok(())
}

/// What is measured beside one kind.
fn beside(socket: &Path, name: &str, kind: Hostility, measure: &dyn Fn() -> Outcome<Times>) -> Outcome<Times> {
    let (stop, socket): (_, PathBuf) = (Arc::new(AtomicBool::new(false)), socket.into());
    let told = Arc::clone(&stop);
    let thread = thread::spawn(move || kind(&socket, &told));
    let times = measure();
    stop.store(true, Ordering::Relaxed);
    if let Err(error) = thread.join().map_err(|_| "it panicked")? {
        println!("{name}: ended early: {error}");
    }
    times
}

//! Services that are killed in the middle of loads: from the hang-up on, their clients' memory is their clients'.
//!
//! `KVHOIST_SERVICE_KILLS=1000` kills so many services for each way of transferring; `KVHOIST_TEST_SEED` repeats a
//! run's draws.

use std::{
    fmt,
    io::Read,
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use kvhoist::{Config, DirectIo, Memory, Segment, SharedMemory, StorageKind, block_on};
use kvhoist_service::{
    Client, ClientOptions, ServerConfig,
    internals::protocol::{Blocks, Place, RegionKind, Reply, Request, SpaceDevice},
};

use crate::{
    common::{self, Rng, key, seed},
    node::{HANG, Process, serve},
    pool_client::is_away,
    raw::Raw,
};

pub const BLOCK_BYTES: usize = 1 << 20;
/// Block `n` has only bytes of the value `n`.
pub const BLOCKS: u64 = 96;
pub const POOL_BYTES: usize = BLOCKS as usize * BLOCK_BYTES;
const BLOCKS_PER_LOAD: u64 = 4;
/// What a client writes to its memory after the hang-up.
pub const MINE: u8 = 0x6b;
/// Far longer than a drive takes for what it was asked before the kill.
const WAIT: Duration = Duration::from_millis(250);

/// How the service transfers.
#[derive(Clone, Copy)]
struct Way {
    storage: &'static str,
    workers: u32,
    bypass: bool,
}

/// The reactor's ring, the workers' rings, host slots between, and system calls.
const WAYS: [Way; 4] = [
    Way { storage: "uring", workers: 0, bypass: true },
    Way { storage: "uring", workers: 8, bypass: true },
    Way { storage: "uring", workers: 8, bypass: false },
    Way { storage: "blocking", workers: 0, bypass: true },
];

impl fmt::Display for Way {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{} {} {}", self.storage, self.workers, self.bypass)
    }
}

/// How many services are killed for each way.
pub fn kills() -> u64 {
    let Ok(text) = std::env::var("KVHOIST_SERVICE_KILLS") else { return 4 };
    text.parse().unwrap_or_else(|_| panic!("KVHOIST_SERVICE_KILLS: found {text:?}, expected a number, such as 1000"))
}

/// The service's process: until its standard input ends.
pub fn run(words: &[&str]) {
    let [socket, path, storage, workers, bypass] = words else { panic!("{words:?}") };
    let mut config = ServerConfig::new(*socket);
    config.paths = vec![path.into()];
    config.capacity_bytes = 2 * POOL_BYTES as u64;
    config.host_bytes = 8 * BLOCK_BYTES as u64;
    config.cache = Config::default()
        .bypass_host(bypass.parse().expect("a word"))
        .direct_io(DirectIo::Prefer)
        // Far more than the drive does in the time in which a process dies.
        .read_bytes_in_flight_max(POOL_BYTES as u64)
        .workers(workers.parse::<u32>().expect("a number"))
        .storage(if *storage == "uring" { StorageKind::Uring } else { StorageKind::Blocking });
    serve(config);
}

/// A store, and the service over it.
struct DirectService {
    store: tempfile::TempDir,
    place: tempfile::TempDir,
    way: Way,
    process: Process,
}

impl DirectService {
    /// A service whose space has all blocks.
    fn new(way: Way) -> Self {
        let (store, place) = (common::directory(), tempfile::tempdir().expect("a directory"));
        let process = DirectService::start(&place.path().join("s"), store.path(), way);
        let node = DirectService { store, place, way, process };
        let (client, memory) = (node.client(), Arc::new(SharedMemory::new(POOL_BYTES).expect("memory")));
        // SAFETY: nothing touches it while blocks are stored from it.
        let region = block_on(client.register(unsafe { Memory::shared(Arc::clone(&memory)) })).expect("registered");
        (0..BLOCKS).for_each(|n| memory.write(n as usize * BLOCK_BYTES, &vec![n as u8; BLOCK_BYTES]));
        let keys: Vec<_> = (0..BLOCKS).map(key).collect();
        let stored = block_on(client.store_from(&keys, None, &places(memory.as_ptr()))).expect("a service");
        assert!(stored.iter().all(|result| matches!(result, Ok(true))), "{stored:?}");
        block_on(client.unregister(&region)).expect("unregistered");
        node
    }

    fn start(socket: &Path, store: &Path, way: Way) -> Process {
        let mut service = Process::start(&format!("direct {} {} {way}", socket.display(), store.display()));
        assert_eq!(service.word().as_deref(), Some("ready"));
        service
    }

    fn restart(&mut self) {
        self.process = DirectService::start(&self.place.path().join("s"), self.store.path(), self.way);
    }

    fn client(&self) -> Client {
        let mut options = ClientOptions::new("tests", BLOCK_BYTES);
        (options.capacity_bytes, options.host_bytes) = (2 * POOL_BYTES as u64, 8 * BLOCK_BYTES as u64);
        options.deadline = HANG;
        block_on(Client::connect(&self.place.path().join("s"), options)).expect("a service")
    }

    fn raw(&self, memory: &SharedMemory) -> Raw {
        let attach = Request::Attach {
            namespace: "tests".into(),
            block_bytes: BLOCK_BYTES as u64,
            capacity_bytes: 2 * POOL_BYTES as u64,
            host_bytes: 8 * BLOCK_BYTES as u64,
            shared: false,
            device: SpaceDevice::None,
        };
        let mut raw = Raw::attached_by(&self.place.path().join("s"), &attach);
        let len = POOL_BYTES as u64;
        let register = Request::Register { region: 1, kind: RegionKind::Host, pin: false, offset: 0, len };
        let reply = raw.ask_with(2, &register, memory.as_fd());
        assert!(matches!(reply, Reply::Registered { .. }), "{reply:?}");
        raw
    }
}

pub fn places(start: *mut u8) -> Vec<Vec<Segment>> {
    let place = |n: u64| Segment { ptr: start.wrapping_add(n as usize * BLOCK_BYTES), len: BLOCK_BYTES };
    (0..BLOCKS).map(|n| vec![place(n)]).collect()
}

/// Requests for all blocks, each to its own place.
fn loads(first_id: u64) -> Vec<u8> {
    let load = |first: u64| {
        let blocks = first..first + BLOCKS_PER_LOAD;
        let place = |n: u64| [Place { region: 1, len: BLOCK_BYTES as u32, offset: n * BLOCK_BYTES as u64 }];
        let blocks = Blocks { keys: blocks.clone().map(key).collect(), places: blocks.map(place).collect() };
        Request::Load(blocks).encode(first_id + first)
    };
    (0..BLOCKS).step_by(BLOCKS_PER_LOAD as usize).flat_map(load).collect()
}

/// Writes `mine` to all of the memory; how many of its pages another has written to after a while.
pub fn overwritten_pages(memory: &SharedMemory, mine: &mut [u8]) -> usize {
    memory.write(0, mine);
    // It waits for nothing: nothing may happen.
    thread::sleep(WAIT);
    memory.read(0, mine);
    let pages = mine.chunks(4096).filter(|page| **page != [MINE; 4096]).count();
    mine.fill(MINE);
    pages
}

/// Kills the service in the middle of a raw client's loads; how many pages it wrote to after the hang-up.
fn kill_amid_loads(node: &mut DirectService, mine: &mut [u8], rng: &mut Rng) -> usize {
    let memory = SharedMemory::new(POOL_BYTES).expect("memory");
    let mut raw = node.raw(&memory);
    let per_round = BLOCKS / BLOCKS_PER_LOAD;
    raw.send(&loads(100));
    // More is sent when some replies have come, so that the drive never runs dry.
    for _ in 0..rng.below(per_round) {
        let (_, reply) = raw.reply().expect("a reply");
        assert_eq!(reply, Reply::Results(vec![Ok(true); BLOCKS_PER_LOAD as usize]));
    }
    raw.send(&loads(1000));
    a_moment(rng);
    node.process.send_kill();
    // What was sent before, and the hang-up.
    let mut buf = vec![0; 1 << 16];
    while raw.stream.read(&mut buf).is_ok_and(|len| len > 0) {}
    let pages = overwritten_pages(&memory, mine);
    node.process.kill();
    pages
}

/// Lets a drawn time pass: which transfers are in flight then is drawn with it.
pub fn a_moment(rng: &mut Rng) {
    let until = Instant::now() + Duration::from_micros(rng.below(8000));
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

/// Kills services for each way of transferring; none may overwrite a page.
fn kill_all(mut kill: impl FnMut(&mut DirectService, &mut [u8], &mut Rng) -> usize) {
    let (mut rng, mut mine, mut wrong) = (Rng(seed()), vec![MINE; POOL_BYTES], 0);
    for way in WAYS {
        let (mut node, mut spoiled) = (DirectService::new(way), Vec::new());
        for count in 0..kills() {
            if count > 0 {
                node.restart();
            }
            let pages = kill(&mut node, &mut mine, &mut rng);
            spoiled.extend((pages > 0).then_some(pages));
        }
        println!("{way}: {} of {} kills overwrote pages: {spoiled:?}", spoiled.len(), kills());
        wrong += spoiled.len();
    }
    assert_eq!(wrong, 0, "services that were killed wrote to their clients' memory after the hang-up");
}

#[test]
fn after_the_hang_up_of_a_killed_service_memory_stays_as_its_client_leaves_it() {
    kill_all(kill_amid_loads);
}

#[test]
fn a_load_that_raises_because_its_service_was_killed_has_given_its_memory_back() {
    kill_all(|node, mine, rng| {
        let (client, memory) = (node.client(), Arc::new(SharedMemory::new(POOL_BYTES).expect("memory")));
        // SAFETY: nothing touches it while a load of it is in flight.
        block_on(client.register(unsafe { Memory::shared(Arc::clone(&memory)) })).expect("registered");
        let (keys, places): (Vec<_>, _) = ((0..BLOCKS).map(key).collect(), places(memory.as_ptr()));
        let (tell, told) = mpsc::channel();
        let pages = thread::scope(|scope| {
            let loads = scope.spawn(|| {
                loop {
                    let _nobody_waits = tell.send(());
                    match block_on(client.load_into(&keys, &places)) {
                        Ok(results) if results.iter().all(Result::is_ok) => {}
                        Err(error) if is_away(&error) => return overwritten_pages(&memory, mine),
                        other => panic!("{other:?}"),
                    }
                }
            });
            // One load has ended, and another has begun.
            (0..2).for_each(|_| told.recv_timeout(HANG).expect("loads"));
            a_moment(rng);
            node.process.send_kill();
            loads.join().expect("pages")
        });
        node.process.kill();
        pages
    });
}

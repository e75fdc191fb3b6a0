//! A service with several clients whose calls, cancellations and hang-ups are drawn from a seed, in one process. What a
//! model knows to be stored is found, all bytes are compared, and memory that was given back is never written again.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    path::Path,
    rc::Rc,
    sync::Arc,
};

use kvhoist::{Config, DirectIo, Segment, SharedMemory, Tier};
use kvhoist_service::{Client, ClientOptions, ClientRegion, Server, ServerConfig};
use tokio::task::{JoinHandle, LocalSet, yield_now};

use crate::{
    common::{self, Rng, key, payload, seed},
    node::{HANG, status_of},
};

const BLOCK_BYTES: usize = 8 << 10;
/// Fewer slots than blocks that move at a time, so that they are evicted while others wait for them.
const HOST_BLOCKS: u64 = 8;
const DISK_BLOCKS: u64 = 256;
const KEYS: u64 = 64;
const PLACES: usize = 48;
const CALLERS: usize = 4;
const SPACES: [&str; 2] = ["first", "second"];
/// What the owner writes to memory that it has back.
const OWNED: u8 = 0x5a;

/// How many steps are drawn.
fn steps() -> u64 {
    std::env::var("KVHOIST_SERVICE_STEPS").ok().and_then(|text| text.parse().ok()).unwrap_or(400)
}

/// What is known of a block.
#[derive(Default)]
struct Known {
    /// A store has ended well, and no removal was begun since the store began.
    stored: bool,
    removals_begun: u64,
    removals_in_flight: u64,
}

#[derive(Default)]
struct Model(RefCell<BTreeMap<u64, Known>>);

impl Model {
    fn with<T>(&self, number: u64, change: impl FnOnce(&mut Known) -> T) -> T {
        change(self.0.borrow_mut().entry(number).or_default())
    }

    /// Begins a removal, and tells when it has ended.
    fn removal(&self, number: u64, ended: bool) {
        self.with(number, |known| {
            if ended {
                known.removals_in_flight -= 1;
            } else {
                known.stored = false;
                known.removals_begun += 1;
                known.removals_in_flight += 1;
            }
        });
    }

    /// The removals that were begun, where none is in flight.
    fn quiet(&self, number: u64) -> Option<u64> {
        self.with(number, |known| (known.removals_in_flight == 0).then_some(known.removals_begun))
    }
}

/// Memory that a client lends, and whether it has it back.
struct Pool {
    memory: Arc<SharedMemory>,
    returned: Cell<bool>,
}

/// A client, its memory, and its calls in flight.
struct Caller {
    socket: std::path::PathBuf,
    space: usize,
    client: Client,
    pool: Rc<Pool>,
    region: ClientRegion,
    /// Places of the pool that no call was given since it was registered.
    unused: usize,
    calls: Vec<JoinHandle<()>>,
    /// Pools that were given back, which nobody may write to.
    returned: Vec<Rc<Pool>>,
}

async fn connect(socket: &Path, space: usize) -> Client {
    let mut options = ClientOptions::new(SPACES[space], BLOCK_BYTES);
    (options.capacity_bytes, options.host_bytes) = (capacity(), HOST_BLOCKS * BLOCK_BYTES as u64);
    options.deadline = HANG;
    Client::connect(socket, options).await.expect("a service")
}

fn capacity() -> u64 {
    kvhoist::DiskPath::file_bytes(DISK_BLOCKS, BLOCK_BYTES as u64)
}

async fn lend(client: &Client) -> (Rc<Pool>, ClientRegion) {
    let memory = Arc::new(SharedMemory::new(PLACES * BLOCK_BYTES).expect("memory"));
    // SAFETY: nobody touches a block of it while the block is on its way.
    let lent = unsafe { kvhoist::Memory::shared(Arc::clone(&memory)) };
    let region = client.register(lent.pinned(true)).await.expect("registered");
    (Rc::new(Pool { memory, returned: Cell::new(false) }), region)
}

impl Caller {
    async fn new(socket: &Path, space: usize) -> Self {
        let client = connect(socket, space).await;
        let (pool, region) = lend(&client).await;
        let (unused, calls, returned) = (PLACES, Vec::new(), Vec::new());
        Caller { socket: socket.into(), space, client, pool, region, unused, calls, returned }
    }

    /// Writes to memory that the service has given back.
    fn own_again(&mut self, pool: Rc<Pool>) {
        pool.returned.set(true);
        pool.memory.write(0, &vec![OWNED; PLACES * BLOCK_BYTES]);
        self.returned.push(pool);
    }

    /// Takes `count` places that no other call has. Where there are too few, gives the whole pool back first, with
    /// calls in flight, and lends another.
    async fn places(&mut self, count: usize) -> usize {
        if self.unused < count {
            let (pool, region) = lend(&self.client).await;
            let old = std::mem::replace(&mut self.pool, pool);
            self.client.unregister(&std::mem::replace(&mut self.region, region)).await.expect("given back");
            self.own_again(old);
            self.unused = PLACES;
        }
        self.unused -= count;
        self.unused
    }

    /// Hangs up with calls in flight, and connects again.
    async fn hang_up(&mut self, cancel: bool) {
        if cancel {
            self.calls.drain(..).for_each(|call| call.abort());
        }
        self.client.close().await.expect("closed");
        let old = Rc::clone(&self.pool);
        self.own_again(old);
        self.client = connect(&self.socket, self.space).await;
        (self.pool, self.region) = lend(&self.client).await;
        self.unused = PLACES;
    }

    async fn end(mut self) {
        for call in self.calls.drain(..) {
            call.await.expect("right bytes, and no error");
        }
        self.client.close().await.expect("closed");
        for pool in &self.returned {
            let mut bytes = vec![0; PLACES * BLOCK_BYTES];
            pool.memory.read(0, &mut bytes);
            assert!(bytes.iter().all(|byte| *byte == OWNED), "memory was written to after it was given back");
        }
    }
}

fn segments(pool: &Pool, first: usize, count: usize) -> Vec<Vec<Segment>> {
    let place = |at: usize| {
        vec![Segment { ptr: pool.memory.as_ptr().wrapping_add((first + at) * BLOCK_BYTES), len: BLOCK_BYTES }]
    };
    (0..count).map(place).collect()
}

/// Whether a call failed because its client was closed, or its memory taken back, under it.
fn is_expected(error: &kvhoist::Error) -> bool {
    use kvhoist::{Error, ServiceFault};
    matches!(
        error,
        Error::Closed
            | Error::Argument { .. }
            | Error::Service { fault: ServiceFault::Argument | ServiceFault::Away | ServiceFault::Canceled, .. }
    )
}

/// Stores blocks and tells the model.
async fn store(client: Client, pool: Rc<Pool>, (first, place): (u64, usize), count: usize, model: Rc<Model>) {
    if pool.returned.get() {
        return;
    }
    let numbers: Vec<u64> = (first..first + count as u64).collect();
    let quiet: Vec<_> = numbers.iter().map(|number| model.quiet(*number)).collect();
    for (at, number) in numbers.iter().enumerate() {
        pool.memory.write((place + at) * BLOCK_BYTES, &payload(*number, BLOCK_BYTES));
    }
    let keys: Vec<_> = numbers.iter().map(|number| key(*number)).collect();
    match client.store_from(&keys, None, &segments(&pool, place, count)).await {
        Ok(results) => {
            for ((number, result), begun) in numbers.into_iter().zip(results).zip(quiet) {
                match result {
                    Ok(true) => model.with(number, |known| known.stored |= begun == Some(known.removals_begun)),
                    Ok(false) => panic!("block {number} was not stored"),
                    Err(error) => assert!(is_expected(&error), "{error}"),
                }
            }
        }
        Err(error) => assert!(is_expected(&error), "{error}"),
    }
}

/// Loads blocks, compares their bytes, and finds what the model knows to be there.
async fn load(client: Client, pool: Rc<Pool>, (first, place): (u64, usize), count: usize, model: Rc<Model>) {
    let numbers: Vec<u64> = (first..first + count as u64).collect();
    let known = |number: &u64| model.with(*number, |known| known.stored.then_some(known.removals_begun));
    let before: Vec<_> = numbers.iter().map(known).collect();
    let keys: Vec<_> = numbers.iter().map(|number| key(*number)).collect();
    let results = match client.load_into(&keys, &segments(&pool, place, count)).await {
        Ok(results) => results,
        Err(error) => return assert!(is_expected(&error), "{error}"),
    };
    for (at, result) in results.into_iter().enumerate() {
        let number = numbers[at];
        match result {
            // Its owner has written to it since.
            Ok(true) if pool.returned.get() => {}
            Ok(true) => {
                let mut bytes = vec![0; BLOCK_BYTES];
                pool.memory.read((place + at) * BLOCK_BYTES, &mut bytes);
                assert!(bytes == payload(number, BLOCK_BYTES), "WRONG BYTES of block {number}");
            }
            Ok(false) => {
                let removed = model.with(number, |known| before[at] != Some(known.removals_begun));
                assert!(removed, "block {number} was stored, and is gone");
            }
            Err(error) => assert!(is_expected(&error), "{error}"),
        }
    }
}

async fn remove(client: Client, number: u64, model: Rc<Model>) {
    // Where the client is closed under it, the service has ended with it before the close returns, or has not begun.
    if let Err(error) = client.remove(&key(number)).await {
        assert!(is_expected(&error), "{error}");
    }
    model.removal(number, true);
}

/// One step of a caller.
async fn step(caller: &mut Caller, model: &Rc<Model>, rng: &mut Rng) {
    let count = 1 + rng.below(8) as usize;
    let first = rng.below(KEYS - count as u64);
    let (client, model) = (caller.client.clone(), Rc::clone(model));
    match rng.below(12) {
        drawn @ 0..=6 => {
            let place = caller.places(count).await;
            let (client, pool, at) = (caller.client.clone(), Rc::clone(&caller.pool), (first, place));
            caller.calls.push(match drawn {
                0..=2 => tokio::task::spawn_local(store(client, pool, at, count, model)),
                _ => tokio::task::spawn_local(load(client, pool, at, count, model)),
            });
        }
        7 => {
            model.removal(first, false);
            drop(tokio::task::spawn_local(remove(client, first, model)));
        }
        8 => drop(client.prefetch(&[key(first)]).await.expect("a service")),
        9 if !caller.calls.is_empty() => {
            let drawn = rng.below(caller.calls.len() as u64) as usize;
            caller.calls.swap_remove(drawn).abort();
        }
        10 if !caller.calls.is_empty() => {
            let drawn = rng.below(caller.calls.len() as u64) as usize;
            caller.calls.swap_remove(drawn).await.expect("right bytes, and no error");
        }
        11 if rng.below(4) == 0 => {
            let cancel = rng.below(2) == 0;
            caller.hang_up(cancel).await;
        }
        _ => {}
    }
    for _ in 0..rng.below(4) {
        yield_now().await;
    }
}

async fn run(socket: &Path, rng: &mut Rng) {
    let models: Vec<Rc<Model>> = SPACES.iter().map(|_| Rc::default()).collect();
    let mut callers = Vec::new();
    for n in 0..CALLERS {
        callers.push(Caller::new(socket, n % SPACES.len()).await);
    }
    for _ in 0..steps() {
        let caller = &mut callers[rng.below(CALLERS as u64) as usize];
        let model = &models[caller.space];
        step(caller, model, rng).await;
    }
    for caller in callers {
        caller.end().await;
    }
}

/// Nothing of the clients is left, and every slot can be used.
async fn check(socket: &Path) {
    for space in 0..SPACES.len() {
        let client = connect(socket, space).await;
        let (pool, _region) = lend(&client).await;
        for first in (0..DISK_BLOCKS).step_by(PLACES) {
            let keys: Vec<_> = (0..PLACES as u64).map(|at| key((1 << 32) + first + at)).collect();
            let stored = client.store_from(&keys, None, &segments(&pool, 0, PLACES)).await.expect("a service");
            assert!(stored.iter().all(|result| matches!(result, Ok(true))), "{stored:?}");
            client.prefetch(&keys).await.expect("a service");
            assert!(client.load_into(&keys, &segments(&pool, 0, PLACES)).await.expect("a service")[0].is_ok());
        }
        let stats = client.stats().await.expect("a service");
        for tier in [Tier::Disk, Tier::Host] {
            let figures = stats.tier(tier);
            assert!(figures.slots > 0 && figures.resident == figures.slots, "slots of {tier:?} are lost: {stats:?}");
        }
        assert_eq!((stats.checksum_failures, stats.quarantined), (0, 0), "{stats:?}");
        client.close().await.expect("closed");
    }
}

#[test]
fn drawn_calls_of_several_clients_are_right_and_leave_nothing_behind() {
    let mut rng = Rng(seed());
    let (store, place) = (common::directory(), tempfile::tempdir().expect("a directory"));
    let mut config = ServerConfig::new(place.path().join("s"));
    config.paths = vec![store.path().into()];
    config.capacity_bytes = SPACES.len() as u64 * capacity();
    config.host_bytes = SPACES.len() as u64 * HOST_BLOCKS * BLOCK_BYTES as u64;
    config.cache = Config::default().bypass_host(true).direct_io(DirectIo::Prefer);
    // Less than one call of a client moves.
    config.bytes_in_flight_max = 4 * BLOCK_BYTES as u64;
    let server = Server::start(config).expect("a service");
    let socket = server.socket().to_owned();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    LocalSet::new().block_on(&runtime, async {
        run(&socket, &mut rng).await;
        let status = status_of(&socket);
        assert_eq!((status.clients.len(), status.cut_off), (1, 0), "{status:?}");
        assert!(status.spaces.iter().all(|space| space.clients == 0), "{status:?}");
        check(&socket).await;
    });
    server.drain();
    server.wait().expect("a whole store");
}

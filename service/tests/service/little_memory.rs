//! Clients that load the same blocks at once, with less host memory than these blocks need.

use std::{
    sync::{Arc, Barrier},
    thread,
    time::Instant,
};

use kvhoist::{BlockKey, Config, DirectIo, DiskPath, Segment, SharedMemory, Tier, block_on};
use kvhoist_service::{Client, Server, ServerConfig};

use crate::{
    common::{key, payload},
    node::{BLOCK_BYTES, HANG, options_of},
};

const CLIENTS: usize = 8;
const BLOCKS: usize = 64;
const HOST_BLOCKS: u64 = 16;
/// Times that all of them come at once.
const ROUNDS: u64 = 8;

struct Reader {
    client: Client,
    pool: Arc<SharedMemory>,
}

impl Reader {
    fn new(client: Client) -> Self {
        let pool = Arc::new(SharedMemory::new(BLOCKS * BLOCK_BYTES).expect("memory"));
        // SAFETY: nothing touches it while a call on it is in flight.
        block_on(client.register(unsafe { kvhoist::Memory::shared(Arc::clone(&pool)) })).expect("registered");
        Reader { client, pool }
    }

    fn places(&self) -> Vec<Vec<Segment>> {
        let place = |at: usize| Segment { ptr: self.pool.as_ptr().wrapping_add(at * BLOCK_BYTES), len: BLOCK_BYTES };
        (0..BLOCKS).map(|at| vec![place(at)]).collect()
    }
}

#[test]
fn a_block_that_clients_wait_for_at_once_is_read_once_with_little_host_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut config = ServerConfig::new(folder.path().join("socket"));
    config.paths = vec![folder.path().to_owned()];
    config.capacity_bytes = DiskPath::file_bytes(4 * BLOCKS as u64, BLOCK_BYTES as u64);
    config.host_bytes = HOST_BLOCKS * BLOCK_BYTES as u64;
    config.cache = Config::default().bypass_host(true).direct_io(DirectIo::Prefer);
    let socket = config.socket.clone();
    let server = Server::start(config).expect("a service");
    let mut options = options_of("tests");
    (options.capacity_bytes, options.host_bytes) = (0, 0);
    let connect = || Reader::new(block_on(Client::connect(&socket, options.clone())).expect("a service"));
    let readers: Vec<Reader> = (0..CLIENTS).map(|_| connect()).collect();
    let keys: Vec<BlockKey> = (0..BLOCKS as u64).map(key).collect();
    let payloads: Vec<u8> = (0..BLOCKS as u64).flat_map(|at| payload(at, BLOCK_BYTES)).collect();
    readers[0].pool.write(0, &payloads);
    let stored = block_on(readers[0].client.store_from(&keys, None, &readers[0].places())).expect("a service");
    assert!(stored.iter().all(|result| matches!(result, Ok(true))));
    let read =
        || block_on(readers[0].client.stats()).expect("a service").tier(Tier::Disk).bytes_out / BLOCK_BYTES as u64;
    let (together, begun) = (Barrier::new(CLIENTS), Instant::now());
    let load_together = || {
        let before = read();
        thread::scope(|scope| {
            for reader in &readers {
                scope.spawn(|| {
                    together.wait();
                    let loaded = block_on(reader.client.load_into(&keys, &reader.places())).expect("a service");
                    assert!(loaded.iter().all(|result| matches!(result, Ok(true))), "{loaded:?}");
                    let mut bytes = vec![0; BLOCKS * BLOCK_BYTES];
                    reader.pool.read(0, &mut bytes);
                    assert!(bytes == payloads, "WRONG BYTES");
                    reader.pool.write(0, &vec![0xa5; BLOCKS * BLOCK_BYTES]);
                });
            }
        });
        read() - before
    };
    // A client that comes late finds the block evicted. Those that wait for it when it is read all get it.
    let mut rounds = 0;
    while rounds < ROUNDS {
        let reads = load_together();
        rounds += u64::from(reads < 2 * BLOCKS as u64);
        assert!(begun.elapsed() < 2 * HANG, "{reads} reads of {BLOCKS} blocks, {rounds} times fewer than two each");
    }
    server.drain();
    server.wait().expect("a whole store");
}

//! Memory that a service had, and that the one after it refuses: its client does without it, and with all else.

use std::{path::Path, sync::Arc, thread, time::Instant};

use kvhoist::{Config, DirectIo, Error, Memory, Segment, ServiceFault, SharedMemory, block_on};
use kvhoist_service::{Client, ClientRegion, Server, ServerConfig};

use crate::{
    common::{self, key},
    node::{BLOCK_BYTES, DISK_BLOCKS, HANG, HOST_BLOCKS, connect},
    pool_client::{POOL_BLOCKS, PoolClient},
};

const LARGE_BYTES: usize = 64 << 20;

/// A service to which a client may lend so much, and all clients as much as `total`.
fn start(folder: &Path, region_bytes_max: usize, total: Option<usize>) -> Server {
    let mut config = ServerConfig::new(folder.join("socket"));
    config.paths = vec![folder.to_owned()];
    config.capacity_bytes = 2 * DISK_BLOCKS * BLOCK_BYTES as u64;
    config.host_bytes = 2 * HOST_BLOCKS * BLOCK_BYTES as u64;
    config.cache = Config::default().bypass_host(true).direct_io(DirectIo::Prefer);
    config.region_bytes_max = region_bytes_max as u64;
    config.region_bytes_total_max = total.map(|bytes| bytes as u64);
    Server::start(config).expect("a service")
}

fn wait(client: &Client, is_connected: bool) {
    let hang = Instant::now() + HANG;
    while client.is_connected() != is_connected {
        assert!(Instant::now() < hang, "the client is away: {}", !client.is_connected());
        thread::yield_now();
    }
}

#[test]
fn memory_that_is_refused_when_the_service_is_back_keeps_its_client_from_nothing_else() {
    let (folder, room) = (common::directory(), POOL_BLOCKS as usize * BLOCK_BYTES + LARGE_BYTES);
    let mut server = start(folder.path(), room, None);
    let pool_client = PoolClient::new(server.socket());
    let large = Arc::new(SharedMemory::new(LARGE_BYTES).expect("memory"));
    // SAFETY: nobody touches it while a block is on its way.
    let lent = unsafe { Memory::shared(Arc::clone(&large)) };
    let region = block_on(pool_client.client.register(lent)).expect("registered");
    let place = [vec![Segment { ptr: large.as_ptr(), len: BLOCK_BYTES }]];
    for (room, is_taken) in [(room / 2, false), (room, true)] {
        server.drain();
        server.wait().expect("a whole store");
        wait(&pool_client.client, false);
        match block_on(pool_client.client.load_into(&[key(0)], &place)) {
            Err(Error::Service { fault: ServiceFault::Away, .. }) => {}
            other => panic!("no service refuses it now: {other:?}"),
        }
        server = start(folder.path(), room, None);
        wait(&pool_client.client, true);
        pool_client.store(0, 4).expect("a service").into_iter().for_each(|result| assert!(result.expect("stored")));
        assert_eq!(pool_client.load(0, 4).expect("a service"), [true; 4]);
        match block_on(pool_client.client.load_into(&[key(0)], &place)) {
            Err(Error::Service { fault: ServiceFault::Busy, text }) if !is_taken => {
                assert!(text.contains("region 2: refused") && text.contains(" at most"), "{text}");
            }
            Ok(results) if is_taken => assert!(matches!(results[..], [Ok(true)]), "{results:?}"),
            other => panic!("{other:?}"),
        }
    }
    block_on(pool_client.client.unregister(&region)).expect("a service");
    drop(pool_client);
    server.drain();
    server.wait().expect("a whole store");
}

/// A client with memory, from which it loads a block that is nowhere.
struct Lender(Client, Arc<SharedMemory>, ClientRegion);

impl Lender {
    fn new(socket: &Path) -> Self {
        let (client, memory) = (connect(socket), Arc::new(SharedMemory::new(LARGE_BYTES).expect("memory")));
        // SAFETY: nobody touches it while a block is on its way.
        let lent = unsafe { Memory::shared(Arc::clone(&memory)) };
        let region = block_on(client.register(lent)).expect("registered");
        Lender(client, memory, region)
    }

    /// Whether the service does not refuse the memory.
    fn is_taken(&self) -> bool {
        let place = [vec![Segment { ptr: self.1.as_ptr(), len: BLOCK_BYTES }]];
        match block_on(self.0.load_into(&[key(0)], &place)) {
            Ok(results) => {
                assert!(matches!(results[..], [Ok(false)]), "{results:?}");
                true
            }
            Err(Error::Service { fault: ServiceFault::Busy, text }) if text.contains("refused") => false,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn refused_memory_is_taken_once_the_others_have_given_back_theirs() {
    let folder = common::directory();
    let server = start(folder.path(), LARGE_BYTES, None);
    let lenders = [(); 2].map(|()| Lender::new(server.socket()));
    server.drain();
    server.wait().expect("a whole store");
    lenders.iter().for_each(|lender| wait(&lender.0, false));
    // Of the half that is not divided equally a user takes no more than is left to others: one of the two.
    let server = start(folder.path(), LARGE_BYTES, Some(4 * LARGE_BYTES));
    lenders.iter().for_each(|lender| wait(&lender.0, true));
    let (taken, refused): (Vec<_>, Vec<_>) = lenders.iter().partition(|lender| lender.is_taken());
    let ([taken], [refused]) = (&taken[..], &refused[..]) else { panic!("{} of 2 were taken", taken.len()) };
    block_on(taken.0.unregister(&taken.2)).expect("a service");
    let hang = Instant::now() + HANG;
    while !refused.is_taken() {
        assert!(Instant::now() < hang, "it was not offered again");
        thread::yield_now();
    }
    block_on(refused.0.unregister(&refused.2)).expect("a service");
    drop(lenders);
    server.drain();
    server.wait().expect("a whole store");
}

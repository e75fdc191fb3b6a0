//! What clients do: blocks in and out, every byte compared.

use std::{path::Path, sync::Arc};

use kvhoist::{BlockKey, DeviceKind, Error, Segment, ServiceFault, SharedMemory, block_on};
use kvhoist_service::{Client, ClientRegion};

use crate::{
    common::{Rng, key, payload},
    node::{BLOCK_BYTES, connect, options, say},
};

/// Blocks that all clients store and load.
pub const BLOCKS: u64 = 64;
/// Blocks behind these, which clients that are killed remove and store anew.
pub const PASSING_BLOCKS: u64 = 32;
/// Blocks that fit into a client's pool.
pub const POOL_BLOCKS: u64 = 16;

/// A client, and its pool.
pub struct PoolClient {
    pub client: Client,
    pub pool: Arc<SharedMemory>,
    pub region: ClientRegion,
}

impl PoolClient {
    pub fn new(socket: &Path) -> Self {
        PoolClient::of(connect(socket))
    }

    /// Of a space with a simulated device, whose memory the pool is.
    pub fn with_device(socket: &Path) -> Self {
        let mut options = options();
        options.device = Some(DeviceKind::Simulated);
        let client = block_on(Client::connect(socket, options)).expect("a service");
        let pool = Arc::new(SharedMemory::new(POOL_BLOCKS as usize * BLOCK_BYTES).expect("memory"));
        // SAFETY: nobody touches a block of it while the block is on its way.
        let lent = unsafe { kvhoist::Memory::shared(Arc::clone(&pool)) };
        let region = block_on(client.register_device(lent)).expect("registered");
        PoolClient { client, pool, region }
    }

    pub fn of(client: Client) -> Self {
        Self::try_of(client).expect("registered")
    }

    /// # Errors
    /// Of a call that registers the pool.
    pub fn try_of(client: Client) -> Result<Self, Error> {
        let pool = Arc::new(SharedMemory::new(POOL_BLOCKS as usize * BLOCK_BYTES).expect("memory"));
        // SAFETY: nobody touches a block of it while the block is on its way.
        let lent = unsafe { kvhoist::Memory::shared(Arc::clone(&pool)) };
        let region = block_on(client.register(lent.pinned(true)))?;
        Ok(PoolClient { client, pool, region })
    }

    pub fn place(&self, at: u64) -> Vec<Segment> {
        vec![Segment { ptr: self.pool.as_ptr().wrapping_add(at as usize * BLOCK_BYTES), len: BLOCK_BYTES }]
    }

    /// Stores the blocks `first..first + count`.
    pub fn store(&self, first: u64, count: u64) -> Result<Vec<Result<bool, Error>>, Error> {
        let numbers: Vec<u64> = (first..first + count).collect();
        for (at, number) in numbers.iter().enumerate() {
            self.pool.write(at * BLOCK_BYTES, &payload(*number, BLOCK_BYTES));
        }
        let keys: Vec<BlockKey> = numbers.iter().map(|number| key(*number)).collect();
        let places: Vec<_> = (0..count).map(|at| self.place(at)).collect();
        let parent = first.checked_sub(1).map(key);
        block_on(self.client.store_from(&keys, parent.as_ref(), &places))
    }

    /// Loads the blocks `first..first + count` and compares their bytes; which were there.
    pub fn load(&self, first: u64, count: u64) -> Result<Vec<bool>, Error> {
        self.pool.write(0, &vec![0xa5; count as usize * BLOCK_BYTES]);
        let keys: Vec<BlockKey> = (first..first + count).map(key).collect();
        let places: Vec<_> = (0..count).map(|at| self.place(at)).collect();
        let results = block_on(self.client.load_into(&keys, &places))?;
        let mut there = Vec::new();
        for (at, result) in results.into_iter().enumerate() {
            let found = result?;
            if found {
                let mut bytes = vec![0; BLOCK_BYTES];
                self.pool.read(at * BLOCK_BYTES, &mut bytes);
                assert!(bytes == payload(first + at as u64, BLOCK_BYTES), "WRONG BYTES of block {}", first + at as u64);
            }
            there.push(found);
        }
        Ok(there)
    }

    /// As [`load`](PoolClient::load), layer by layer: compares each layer's bytes when it is complete.
    pub fn load_layers(&self, first: u64, count: u64) -> Result<Vec<bool>, Error> {
        self.pool.write(0, &vec![0x5a; count as usize * BLOCK_BYTES]);
        let keys: Vec<BlockKey> = (first..first + count).map(key).collect();
        let segments: Vec<_> = (0..count).map(|at| cut(&self.place(at)[0])).collect();
        let load = self.client.load_layers(&keys, &segments, &LAYER_OF)?;
        for layer in 0..load.layers() {
            let (leading, _) = block_on(load.layer(layer)).expect("there is such a layer");
            for at in 0..leading {
                for segment in (0..LAYER_OF.len()).filter(|&segment| LAYER_OF[segment] == layer) {
                    let mut bytes = vec![0; SEGMENT_BYTES];
                    self.pool.read(at * BLOCK_BYTES + segment * SEGMENT_BYTES, &mut bytes);
                    let expected = &payload(first + at as u64, BLOCK_BYTES)[segment * SEGMENT_BYTES..][..SEGMENT_BYTES];
                    assert!(bytes == expected, "WRONG BYTES of layer {layer} of block {}", first + at as u64);
                }
            }
        }
        block_on(load.blocks()).into_iter().collect()
    }
}

/// The layer of each segment of a block: keys and values of two layers.
pub const LAYER_OF: [usize; 4] = [0, 1, 0, 1];
pub const SEGMENT_BYTES: usize = BLOCK_BYTES / LAYER_OF.len();

/// The segments of a block.
pub fn cut(block: &Segment) -> Vec<Segment> {
    let segment = |at| Segment { ptr: block.ptr.wrapping_add(at * SEGMENT_BYTES), len: SEGMENT_BYTES };
    (0..LAYER_OF.len()).map(segment).collect()
}

/// The process of a client that stores all blocks.
pub fn store_all(socket: &str) {
    let pool_client = PoolClient::new(socket.as_ref());
    for first in (0..BLOCKS).step_by(POOL_BLOCKS as usize) {
        let results = pool_client.store(first, POOL_BLOCKS).expect("a service");
        assert!(results.iter().all(|result| matches!(result, Ok(true))), "{results:?}");
    }
    block_on(pool_client.client.close()).expect("closed");
    say("done");
}

/// The process of a client that loads all blocks.
pub fn load_all(socket: &str) {
    let pool_client = PoolClient::new(socket.as_ref());
    for first in (0..BLOCKS).step_by(POOL_BLOCKS as usize) {
        assert_eq!(pool_client.load(first, POOL_BLOCKS).expect("a service"), [true; POOL_BLOCKS as usize]);
    }
    say("done");
}

/// The process of a client that draws its calls from a seed until it is killed. Where `may_be_away`, calls that fail
/// because the service is away are followed by others.
pub fn run(socket: &str, seed: u64, may_be_away: bool) {
    let client = match block_on(Client::connect(socket, options())) {
        Ok(client) => client,
        Err(error) => {
            assert!(may_be_away && is_away(&error), "{error}");
            return say("next");
        }
    };
    let pool = Arc::new(SharedMemory::new(POOL_BLOCKS as usize * BLOCK_BYTES).expect("memory"));
    let checked = |result: Result<(), Error>| {
        if let Err(error) = result {
            assert!(may_be_away && is_away(&error), "{error}");
        }
    };
    let region = loop {
        // SAFETY: nobody touches a block of it while the block is on its way.
        let lent = unsafe { kvhoist::Memory::shared(Arc::clone(&pool)) };
        match block_on(client.register(lent.pinned(true))) {
            Ok(region) => break region,
            error => checked(error.map(drop)),
        }
        say("next");
    };
    let (pool_client, mut rng) = (PoolClient { client, pool, region }, Rng(seed));
    loop {
        say("next");
        checked(draw_call(&pool_client, &mut rng));
    }
}

/// One of a client's calls.
fn draw_call(pool_client: &PoolClient, rng: &mut Rng) -> Result<(), Error> {
    let count = 1 + rng.below(POOL_BLOCKS);
    let shared = rng.below(BLOCKS - count);
    // Removed and stored again by all that are drawn from, so that stores write.
    let passing = BLOCKS + rng.below(PASSING_BLOCKS - POOL_BLOCKS);
    match rng.below(8) {
        0 => {
            (passing..passing + 4)
                .try_for_each(|number| block_on(pool_client.client.remove(&key(number))).map(drop))?;
            pool_client.store(passing, count).map(drop)
        }
        1 => pool_client.store(passing, count).map(drop),
        2 => pool_client.load(passing, count).map(drop),
        3 | 4 => pool_client.load(shared, count).map(drop),
        6 => pool_client.load_layers(shared, count).map(drop),
        5 => {
            let more = Arc::new(SharedMemory::new(1 << 20).expect("memory"));
            // SAFETY: nobody touches a block of it while the block is on its way.
            let lent = unsafe { kvhoist::Memory::shared(Arc::clone(&more)) };
            let region = block_on(pool_client.client.register(lent.pinned(true)))?;
            block_on(pool_client.client.unregister(&region))
        }
        _ => block_on(pool_client.client.prefetch(&[key(shared), key(passing)])).map(drop),
    }
}

/// Whether a call failed because the service is gone or going.
pub fn is_away(error: &Error) -> bool {
    matches!(error, Error::Service { fault: ServiceFault::Away | ServiceFault::Draining | ServiceFault::Canceled, .. })
}

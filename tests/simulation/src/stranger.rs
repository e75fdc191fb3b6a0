//! Another cache of the same process, for values that a cache must refuse.

use std::rc::Rc;

use crate::sim::{self, Rng, Simulated, World};
use kvhoist::{Cache, Config, DeviceLease, Segment};

use crate::{
    context::Context,
    foreign::{Memory, Pool},
};

/// Another cache of the same process, and what it gave.
pub struct Stranger {
    pub lease: DeviceLease,
    pub memory: Memory,
    /// All of the memory, as one block.
    pub places: Vec<Vec<Segment>>,
    _cache: Cache,
}

impl Stranger {
    /// Opens a cache that has a block in a device slot of its own, and a region.
    pub async fn open(context: &Context, rng: &mut Rng, pool: &mut Pool) -> Result<Rc<Stranger>, kvhoist::Error> {
        let block_bytes = context.plan.config.block_bytes;
        let config = Config::default().block_bytes(block_bytes).host_blocks(2).device_blocks(1);
        let Simulated { cache, .. } = sim::open(config, &World::new(rng.next_u64(), Vec::new())).await?;
        let key = context.plan.universe.key(0);
        cache.store(&key, None, &vec![0x33; block_bytes]).await?;
        let lease = cache.fetch_to_device(&key).await?.expect("it was just stored");
        let mut memory = pool.take(block_bytes, 1, false, 0);
        memory.register(&cache, false).await?;
        let places = vec![memory.layers(0, 1)];
        Ok(Rc::new(Stranger { lease, memory, places, _cache: cache }))
    }
}

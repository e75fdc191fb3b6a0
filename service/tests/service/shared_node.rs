//! A service that a hostile client shares with a neighbor.

use std::path::Path;

use crate::{
    node::Node,
    pool_client::{POOL_BLOCKS, PoolClient},
    raw::Raw,
};

/// A service with a neighbor, who must have the right bytes and no error after everything that another does.
pub struct SharedNode {
    pub node: Node,
    pub neighbor: PoolClient,
    /// Whether the neighbor's memory is a device's.
    has_device: bool,
}

impl SharedNode {
    pub fn new(settings: &str) -> Self {
        Self::of(settings, PoolClient::new, false)
    }

    /// With a neighbor that lends memory of a device.
    pub fn with_device(settings: &str) -> Self {
        Self::of(settings, PoolClient::with_device, true)
    }

    fn of(settings: &str, neighbor: fn(&Path) -> PoolClient, has_device: bool) -> Self {
        let node = Node::with(settings);
        let neighbor = neighbor(&node.socket());
        neighbor.store(0, POOL_BLOCKS).expect("a service");
        SharedNode { node, neighbor, has_device }
    }

    pub fn check(&self) {
        let load = if self.has_device { PoolClient::load_layers } else { PoolClient::load };
        assert_eq!(load(&self.neighbor, 0, POOL_BLOCKS).expect("a service"), [true; POOL_BLOCKS as usize]);
    }

    pub fn attached(&self) -> Raw {
        Raw::attached(&self.node.socket())
    }
}

//! Requests of a client.

use std::fmt;

use kvhoist::{
    BlockKey,
    internals::service::{IPC_HANDLE_BYTES, uuid_text},
};

use super::{
    places::BlockPlaces,
    table::{get, messages, put},
    wire::{Malformed, NAMESPACE_BYTES_MAX, PATH_BYTES_MAX, Reader, Wire, Writer, malformed},
};

/// Blocks to move, each with its places in the client's memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Blocks {
    /// The blocks' keys.
    pub keys: Vec<BlockKey>,
    /// For each key its places, in the order of the block's bytes.
    pub places: BlockPlaces,
}

impl Blocks {
    /// The same in parts of at most so many blocks, in order; one of none.
    pub(crate) fn parts(self, most: usize) -> Vec<Blocks> {
        if self.keys.len() <= most {
            return vec![self];
        }
        let part = |(at, keys): (usize, &[BlockKey])| {
            let first = at * most;
            Blocks { keys: keys.to_vec(), places: self.places.part(first..first + keys.len()) }
        };
        self.keys.chunks(most).enumerate().map(part).collect()
    }
}

/// The direction of a movement of blocks.
#[derive(Debug, Clone, Copy)]
pub enum Way {
    /// Into the client's memory.
    Load,
    /// Out of it, with the key before the first one in its prefix chain.
    Store(Option<BlockKey>),
}

impl Way {
    /// The same for the blocks from `first` on: their parent is the block before them.
    pub fn of_part(self, keys: &[BlockKey], first: usize) -> Self {
        match (self, first.checked_sub(1)) {
            (Way::Store(_), Some(before)) => Way::Store(Some(keys[before])),
            (way, _) => way,
        }
    }

    /// The request that moves blocks this way.
    pub fn request(self, blocks: Blocks) -> Request {
        match self {
            Way::Load => Request::Load(blocks),
            Way::Store(parent) => Request::Store { parent, blocks },
        }
    }
}

/// A client's request.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
pub enum Request {
    /// Attaches the connection to a space, which is made if there is none.
    Attach {
        /// The space's name.
        namespace: String,
        /// Bytes of every block.
        block_bytes: u64,
        /// Disk for a space that is made now, bytes; 0 for all that is left.
        capacity_bytes: u64,
        /// Host memory for a space that is opened now, bytes; 0 for all that is left.
        host_bytes: u64,
        /// Whether the space is the one that all users share, instead of this user's own.
        shared: bool,
        /// Whose memory clients of the space lend beside host memory.
        device: SpaceDevice,
    },
    /// Lends memory: the descriptor that comes with the frame.
    Register {
        /// The client's number for it, which no other region of the connection has.
        region: u32,
        /// The kind of memory that the descriptor stands for.
        kind: RegionKind,
        /// Whether the kernel is to keep it pinned.
        pin: bool,
        /// Where in the memfd it begins, bytes; a multiple of the page size.
        offset: u64,
        /// Its bytes.
        len: u64,
    },
    /// Lends memory of the client's GPU, of which the service makes a mapping of its own.
    RegisterDevice {
        /// The client's number for it, which no other region of the connection has.
        region: u32,
        /// Where in the allocation it begins, bytes.
        offset: u64,
        /// Its bytes.
        len: u64,
        /// The allocation, as the client's driver names it to that of another process.
        #[cfg_attr(test, proptest(strategy = "super::tests::handle()"))]
        handle: [u8; IPC_HANDLE_BYTES],
    },
    /// Takes memory back. The reply comes when nothing uses it any longer.
    Unregister {
        /// The client's number for it.
        region: u32,
    },
    /// How many leading blocks are resident.
    MatchLen {
        /// A prefix chain.
        #[cfg_attr(test, proptest(strategy = "super::tests::keys()"))]
        keys: Vec<BlockKey>,
    },
    /// Which leading blocks are resident, and where.
    MatchPrefix {
        /// A prefix chain.
        #[cfg_attr(test, proptest(strategy = "super::tests::keys()"))]
        keys: Vec<BlockKey>,
    },
    /// Which blocks are resident.
    Contains {
        /// Any keys.
        #[cfg_attr(test, proptest(strategy = "super::tests::keys()"))]
        keys: Vec<BlockKey>,
    },
    /// Loads blocks into the client's memory.
    Load(Blocks),
    /// Stores blocks from the client's memory.
    Store {
        /// The key before the first one in its prefix chain.
        #[cfg_attr(test, proptest(strategy = "super::tests::maybe_key()"))]
        parent: Option<BlockKey>,
        /// The blocks, one prefix chain.
        blocks: Blocks,
    },
    /// Starts to bring blocks into host memory.
    Prefetch {
        /// Any keys.
        #[cfg_attr(test, proptest(strategy = "super::tests::keys()"))]
        keys: Vec<BlockKey>,
    },
    /// Forgets blocks.
    Remove {
        /// Whether the removal is to survive a power cut.
        durable: bool,
        /// Any keys.
        #[cfg_attr(test, proptest(strategy = "super::tests::keys()"))]
        keys: Vec<BlockKey>,
    },
    /// Waits until all that was stored before is written and flushed.
    Sync,
    /// Figures of the space.
    Stats,
    /// Starts nothing more of a request of this connection. It has no reply of its own.
    Cancel {
        /// The request's id.
        request: u64,
    },
    /// Figures of the whole service; needs no space.
    Status,
    /// Removes a space that no connection has, with all its blocks; needs no space.
    RemoveSpace {
        /// The space's name.
        namespace: String,
        /// Bytes of its blocks.
        block_bytes: u64,
        /// Whether it is a space that all users share.
        shared: bool,
    },
    /// Counts a use of every resident block.
    Touch {
        /// A prefix chain.
        #[cfg_attr(test, proptest(strategy = "super::tests::keys()"))]
        keys: Vec<BlockKey>,
    },
    /// Releases a chain, or a part of it: its blocks are evicted first.
    Release {
        /// The key after the last one, where an earlier request released the rest of the chain.
        #[cfg_attr(test, proptest(strategy = "super::tests::maybe_key()"))]
        next: Option<BlockKey>,
        /// A prefix chain.
        #[cfg_attr(test, proptest(strategy = "super::tests::keys()"))]
        keys: Vec<BlockKey>,
    },
    /// Keeps the resident blocks of a chain: they are evicted last.
    Keep {
        /// For how long, milliseconds from the arrival of the request.
        ms: u64,
        /// A prefix chain.
        #[cfg_attr(test, proptest(strategy = "super::tests::keys()"))]
        keys: Vec<BlockKey>,
    },
    /// Holds a file in memory, which the reply comes with; needs no space.
    Hold {
        /// Whether it stays when no client holds it.
        keep: bool,
        /// The device that it is on.
        device: u64,
        /// Its number there.
        inode: u64,
        /// Its length, bytes.
        size: u64,
        /// Its last change, in seconds since 1970, in two's complement.
        changed_s: u64,
        /// And nanoseconds.
        changed_ns: u64,
        /// Its absolute path.
        path: String,
    },
    /// Lets go of a file. It has no reply.
    LetGo {
        /// The id of the request that holds it, which was answered.
        hold: u64,
    },
    /// Loads blocks into the client's memory, layer by layer: [`Reply::Layer`](super::Reply::Layer) for each layer,
    /// then the reply of a load.
    LoadLayers {
        /// The layer of each segment of a block, from 0.
        layer_of: Vec<u16>,
        /// The blocks, all with a place for each of these segments.
        blocks: Blocks,
    },
    /// Pins blocks in host memory until they are let go.
    Pin {
        /// Blocks at most.
        most: u32,
        /// Any keys.
        #[cfg_attr(test, proptest(strategy = "super::tests::keys()"))]
        keys: Vec<BlockKey>,
    },
}

/// The device of a space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
pub enum SpaceDevice {
    /// None.
    #[default]
    None,
    /// Host memory plays a device's.
    Simulated,
    /// The GPU that the driver knows by this identifier.
    Cuda([u8; 16]),
}

impl Request {
    /// Whether it waits for drives to write, or may have to follow a request that does.
    pub(crate) fn is_write(&self) -> bool {
        matches!(self, Request::Store { .. } | Request::Remove { .. } | Request::Sync | Request::Unregister { .. })
    }
}

impl SpaceDevice {
    /// Whether a space with this device serves clients of the other one.
    pub fn serves(self, wanted: SpaceDevice) -> bool {
        match (self, wanted) {
            (_, SpaceDevice::None) => true,
            // Each GPU has a copy engine of its own.
            (SpaceDevice::Cuda(_), SpaceDevice::Cuda(_)) => true,
            (own, wanted) => own == wanted,
        }
    }
}

impl fmt::Display for SpaceDevice {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SpaceDevice::None => to.write_str("no device"),
            SpaceDevice::Simulated => to.write_str("a simulated device"),
            SpaceDevice::Cuda(uuid) => write!(to, "the GPU {}", uuid_text(uuid)),
        }
    }
}

/// Kinds of memory that a client can lend as a memfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
pub enum RegionKind {
    /// Host memory.
    Host,
    /// A memfd that plays a device's memory, in a space with a simulated device.
    Simulated,
}

messages!(Request("kind of request", "1 to 23") {
    1 => Attach { block_bytes, capacity_bytes, host_bytes, shared, device, namespace <= NAMESPACE_BYTES_MAX },
    2 => Register { region, pin as u16, kind, offset, len },
    3 => Unregister { region },
    4 => MatchLen { keys },
    5 => MatchPrefix { keys },
    6 => Contains { keys },
    7 => Load(blocks),
    8 => Store { parent, blocks },
    9 => Prefetch { keys },
    10 => Remove { durable, keys },
    11 => Sync,
    12 => Stats,
    13 => Cancel { request },
    14 => Status,
    15 => Touch { keys },
    16 => RemoveSpace { block_bytes, shared, namespace <= NAMESPACE_BYTES_MAX },
    17 => Release { next, keys },
    18 => Keep { ms, keys },
    19 => Hold { keep, device, inode, size, changed_s, changed_ns, path <= PATH_BYTES_MAX },
    20 => LetGo { hold },
    21 => LoadLayers { layer_of, blocks },
    22 => Pin { most, keys },
    23 => RegisterDevice { region, offset, len, handle },
});

impl Wire for RegionKind {
    fn put(&self, writer: &mut Writer) {
        (*self as u16).put(writer);
    }

    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
        match u16::get(reader, what)? {
            0 => Ok(RegionKind::Host),
            1 => Ok(RegionKind::Simulated),
            kind => Err(malformed(what, kind, "0 (host) or 1 (simulated device)")),
        }
    }
}

impl Wire for SpaceDevice {
    fn put(&self, writer: &mut Writer) {
        let code: u16 = match self {
            SpaceDevice::None => 0,
            SpaceDevice::Simulated => 1,
            SpaceDevice::Cuda(_) => 2,
        };
        code.put(writer);
        if let SpaceDevice::Cuda(uuid) = self {
            uuid.put(writer);
        }
    }

    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
        match u16::get(reader, what)? {
            0 => Ok(SpaceDevice::None),
            1 => Ok(SpaceDevice::Simulated),
            2 => Ok(SpaceDevice::Cuda(Wire::get(reader, what)?)),
            device => Err(malformed(what, device, "0 (none), 1 (simulated) or 2 (CUDA)")),
        }
    }
}

impl Wire for Blocks {
    fn put(&self, writer: &mut Writer) {
        self.keys.put(writer);
        self.places.put(writer);
    }

    fn get(reader: &mut Reader<'_>, _: &'static str) -> Result<Self, Malformed> {
        let keys = Vec::<BlockKey>::get(reader, "keys")?;
        let places = BlockPlaces::get(reader, keys.len())?;
        Ok(Blocks { keys, places })
    }
}

//! Requests of a client.

use super::wire::{KEYS_MAX, Malformed, NAMESPACE_BYTES_MAX, PLACES_MAX, Reader, Writer, malformed};
use crate::block::BlockKey;

/// A range of a registered region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The client's number for the region.
    pub region: u32,
    /// Bytes of the range.
    pub len: u32,
    /// Bytes from the region's beginning.
    pub offset: u64,
}

const PLACE_BYTES: usize = 16;

/// Blocks to move, each with its places in the client's memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Blocks {
    /// The blocks' keys.
    pub keys: Vec<BlockKey>,
    /// For each key its places, in the order of the block's bytes.
    pub places: Vec<Vec<Place>>,
}

/// A client's request.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    /// Takes memory back. The reply comes when nothing uses it any longer.
    Unregister {
        /// The client's number for it.
        region: u32,
    },
    /// How many leading blocks are resident.
    MatchLen {
        /// A prefix chain.
        keys: Vec<BlockKey>,
    },
    /// Which leading blocks are resident, and where.
    MatchPrefix {
        /// A prefix chain.
        keys: Vec<BlockKey>,
    },
    /// Which blocks are resident.
    Contains {
        /// Any keys.
        keys: Vec<BlockKey>,
    },
    /// Loads blocks into the client's memory.
    Load(Blocks),
    /// Stores blocks from the client's memory.
    Store {
        /// The key before the first one in its prefix chain.
        parent: Option<BlockKey>,
        /// The blocks, one prefix chain.
        blocks: Blocks,
    },
    /// Starts to bring blocks into host memory.
    Prefetch {
        /// Any keys.
        keys: Vec<BlockKey>,
    },
    /// Forgets blocks.
    Remove {
        /// Whether the removal is to survive a power cut.
        durable: bool,
        /// Any keys.
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
        keys: Vec<BlockKey>,
    },
    /// Releases a chain, or a part of it: its blocks are evicted first.
    Release {
        /// The key after the last one, where an earlier request released the rest of the chain.
        next: Option<BlockKey>,
        /// A prefix chain.
        keys: Vec<BlockKey>,
    },
    /// Keeps the resident blocks of a chain: they are evicted last.
    Keep {
        /// For how long, milliseconds from the arrival of the request.
        ms: u64,
        /// A prefix chain.
        keys: Vec<BlockKey>,
    },
}

/// Kinds of memory that a client can lend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionKind {
    /// Host memory: a memfd.
    Host,
    /// Memory of a GPU: a handle that the client's driver has exported as a descriptor. No service takes it yet; it is
    /// refused with [`ServiceFault::Memory`](crate::service::ServiceFault::Memory).
    Device,
}

const ATTACH: u16 = 1;
const REGISTER: u16 = 2;
const UNREGISTER: u16 = 3;
const MATCH_LEN: u16 = 4;
const MATCH_PREFIX: u16 = 5;
const CONTAINS: u16 = 6;
const LOAD: u16 = 7;
const STORE: u16 = 8;
const PREFETCH: u16 = 9;
const REMOVE: u16 = 10;
const SYNC: u16 = 11;
const STATS: u16 = 12;
const CANCEL: u16 = 13;
const STATUS: u16 = 14;
const TOUCH: u16 = 15;
const REMOVE_SPACE: u16 = 16;
const RELEASE: u16 = 17;
const KEEP: u16 = 18;

impl Request {
    fn kind(&self) -> u16 {
        match self {
            Request::Attach { .. } => ATTACH,
            Request::Register { .. } => REGISTER,
            Request::Unregister { .. } => UNREGISTER,
            Request::MatchLen { .. } => MATCH_LEN,
            Request::MatchPrefix { .. } => MATCH_PREFIX,
            Request::Contains { .. } => CONTAINS,
            Request::Load(_) => LOAD,
            Request::Store { .. } => STORE,
            Request::Prefetch { .. } => PREFETCH,
            Request::Remove { .. } => REMOVE,
            Request::Sync => SYNC,
            Request::Stats => STATS,
            Request::Cancel { .. } => CANCEL,
            Request::Status => STATUS,
            Request::Touch { .. } => TOUCH,
            Request::RemoveSpace { .. } => REMOVE_SPACE,
            Request::Release { .. } => RELEASE,
            Request::Keep { .. } => KEEP,
        }
    }

    /// The whole frame.
    pub fn encode(&self, id: u64) -> Vec<u8> {
        let mut writer = Writer::frame(self.kind(), id);
        match self {
            Request::Attach { namespace, block_bytes, capacity_bytes, host_bytes, shared } => {
                writer.u64(*block_bytes);
                writer.u64(*capacity_bytes);
                writer.u64(*host_bytes);
                writer.u8(u8::from(*shared));
                writer.text(namespace, NAMESPACE_BYTES_MAX);
            }
            Request::Register { region, kind, pin, offset, len } => {
                writer.u32(*region);
                writer.u16(u16::from(*pin));
                writer.u16(*kind as u16);
                writer.u64(*offset);
                writer.u64(*len);
            }
            Request::Unregister { region } => writer.u32(*region),
            Request::MatchLen { keys }
            | Request::MatchPrefix { keys }
            | Request::Contains { keys }
            | Request::Prefetch { keys }
            | Request::Touch { keys } => writer.keys(keys),
            Request::Load(blocks) => encode_blocks(&mut writer, blocks),
            Request::Store { parent, blocks } => {
                encode_key(&mut writer, parent.as_ref());
                encode_blocks(&mut writer, blocks);
            }
            Request::Release { next, keys } => {
                encode_key(&mut writer, next.as_ref());
                writer.keys(keys);
            }
            Request::Keep { ms, keys } => {
                writer.u64(*ms);
                writer.keys(keys);
            }
            Request::Remove { durable, keys } => {
                writer.u8(u8::from(*durable));
                writer.keys(keys);
            }
            Request::Cancel { request } => writer.u64(*request),
            Request::RemoveSpace { namespace, block_bytes, shared } => {
                writer.u64(*block_bytes);
                writer.u8(u8::from(*shared));
                writer.text(namespace, NAMESPACE_BYTES_MAX);
            }
            Request::Sync | Request::Stats | Request::Status => {}
        }
        writer.finish()
    }

    /// Reads the body of a frame of `kind`.
    ///
    /// # Errors
    /// [`Malformed`] for anything but a request, and past every limit.
    pub fn decode(kind: u16, body: &[u8]) -> Result<Request, Malformed> {
        let mut reader = Reader::new(body);
        let request = match kind {
            ATTACH => Request::Attach {
                block_bytes: reader.u64("block size")?,
                capacity_bytes: reader.u64("capacity")?,
                host_bytes: reader.u64("host memory")?,
                shared: reader.flag("shared")?,
                namespace: reader.text("name", NAMESPACE_BYTES_MAX)?,
            },
            REGISTER => Request::Register {
                region: reader.u32("region")?,
                pin: match reader.u16("flags")? {
                    flags @ (0 | 1) => flags == 1,
                    flags => return Err(malformed("flags", flags, "0 or 1")),
                },
                kind: match reader.u16("kind of memory")? {
                    0 => RegionKind::Host,
                    1 => RegionKind::Device,
                    kind => return Err(malformed("kind of memory", kind, "0 (host) or 1 (device)")),
                },
                offset: reader.u64("offset")?,
                len: reader.u64("length")?,
            },
            UNREGISTER => Request::Unregister { region: reader.u32("region")? },
            MATCH_LEN => Request::MatchLen { keys: reader.keys()? },
            MATCH_PREFIX => Request::MatchPrefix { keys: reader.keys()? },
            CONTAINS => Request::Contains { keys: reader.keys()? },
            LOAD => Request::Load(decode_blocks(&mut reader)?),
            STORE => Request::Store { parent: decode_key(&mut reader, "parent")?, blocks: decode_blocks(&mut reader)? },
            PREFETCH => Request::Prefetch { keys: reader.keys()? },
            REMOVE => Request::Remove { durable: reader.flag("durable")?, keys: reader.keys()? },
            SYNC => Request::Sync,
            STATS => Request::Stats,
            CANCEL => Request::Cancel { request: reader.u64("request id")? },
            STATUS => Request::Status,
            TOUCH => Request::Touch { keys: reader.keys()? },
            REMOVE_SPACE => Request::RemoveSpace {
                block_bytes: reader.u64("block size")?,
                shared: reader.flag("shared")?,
                namespace: reader.text("name", NAMESPACE_BYTES_MAX)?,
            },
            RELEASE => Request::Release { next: decode_key(&mut reader, "next")?, keys: reader.keys()? },
            KEEP => Request::Keep { ms: reader.u64("time")?, keys: reader.keys()? },
            other => return Err(malformed("kind of request", other, format!("{ATTACH} to {KEEP}"))),
        };
        reader.end()?;
        Ok(request)
    }
}

/// A key, if there is one, after a byte that says so.
fn encode_key(writer: &mut Writer, key: Option<&BlockKey>) {
    writer.u8(u8::from(key.is_some()));
    if let Some(key) = key {
        writer.bytes(key.as_bytes());
    }
}

fn decode_key(reader: &mut Reader<'_>, what: &'static str) -> Result<Option<BlockKey>, Malformed> {
    if reader.flag(what)? { reader.key().map(Some) } else { Ok(None) }
}

fn encode_blocks(writer: &mut Writer, blocks: &Blocks) {
    let places: usize = blocks.places.iter().map(Vec::len).sum();
    writer.keys(&blocks.keys);
    writer.reserve(4 + blocks.places.len() * 4 + places * PLACE_BYTES);
    writer.count(places);
    for places in &blocks.places {
        writer.count(places.len());
    }
    for place in blocks.places.iter().flatten() {
        writer.u32(place.region);
        writer.u32(place.len);
        writer.u64(place.offset);
    }
}

fn decode_blocks(reader: &mut Reader<'_>) -> Result<Blocks, Malformed> {
    let keys = reader.keys()?;
    debug_assert!(keys.len() <= KEYS_MAX, "checked when they were read");
    let total = reader.count("number of places", PLACES_MAX, PLACE_BYTES)?;
    let mut counts = Vec::with_capacity(keys.len());
    let mut sum = 0usize;
    for _ in 0..keys.len() {
        let count = reader.u32("places of a block")? as usize;
        sum = sum.saturating_add(count);
        counts.push(count);
    }
    if sum != total {
        return Err(malformed("places of all blocks", sum, format!("{total}, the number before them")));
    }
    let mut places = Vec::with_capacity(keys.len());
    for count in counts {
        let mut of_block = Vec::with_capacity(count);
        for _ in 0..count {
            let (region, len) = (reader.u32("region")?, reader.u32("length")?);
            of_block.push(Place { region, len, offset: reader.u64("offset")? });
        }
        places.push(of_block);
    }
    Ok(Blocks { keys, places })
}

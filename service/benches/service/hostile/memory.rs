//! Clients that lend memory that is too much, goes away or changes, or name places that are wrong or many.

use std::{
    os::fd::AsFd,
    path::Path,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
};

use kvhoist::SharedMemory;
use kvhoist_service::internals::protocol::{Blocks, PLACES_MAX, Place, RegionKind, Reply, Request};

use super::raw::{BLOCK_BYTES, Raw, SPACE, attach, memfd, register};
use crate::{options::Outcome, pool::key};

const TIB: u64 = 1 << 40;
const PAGE: u64 = 4096;
/// Parts of a block, one for each page.
pub const PARTS: u64 = BLOCK_BYTES as u64 / PAGE;
/// Blocks of a request with as many places as it may have, one for each page.
const BLOCKS_OF_PAGES: u64 = PLACES_MAX as u64 / PARTS;
/// Keys of blocks that no other client has.
const FOREIGN: u64 = 1 << 40;

fn registered(reply: &Reply) -> Outcome<()> {
    match reply {
        Reply::Registered { .. } => Ok(()),
        other => Err(format!("a region: {other:?}").into()),
    }
}

pub fn truncated(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let mut raw = Raw::attached(socket)?;
    let memory = memfd(false, PAGE)?;
    let said = Request::Register { region: 1, kind: RegionKind::Host, pin: true, offset: 0, len: 1 << 20 };
    while !stop.load(Relaxed) {
        raw.ask_with(&said, memory.as_fd())?;
    }
    Ok(())
}

pub fn wrong_offsets(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let mut raw = Raw::attached(socket)?;
    let memory = memfd(false, 1 << 20)?;
    registered(&raw.ask_with(&register(1, 0, 1 << 20), memory.as_fd())?)?;
    let wrong = [(1, (1 << 20) - 1), (1, u64::MAX), (9, 0)];
    for (region, offset) in wrong.into_iter().cycle().take_while(|_| !stop.load(Relaxed)) {
        let place = Place { region, offset, len: BLOCK_BYTES as u32 };
        raw.ask(&Request::Load(Blocks { keys: vec![key(0)], places: [[place]].into_iter().collect() }))?;
    }
    Ok(())
}

/// Connections that lend a sparse tebibyte after the other, each until it is refused.
pub fn huge(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    const CONNECTIONS: usize = 167;
    while !stop.load(Relaxed) {
        let mut held = Vec::new();
        while held.len() < CONNECTIONS && !stop.load(Relaxed) {
            let mut raw = Raw::attached(socket)?;
            for region in (0..).take_while(|_| !stop.load(Relaxed)) {
                match raw.ask_with(&register(region, 0, TIB), memfd(true, TIB)?.as_fd())? {
                    Reply::Registered { .. } => {}
                    Reply::Failed(_) => break,
                    other => return Err(format!("a tebibyte: {other:?}").into()),
                }
            }
            held.push(raw);
        }
    }
    Ok(())
}

/// Stores of every second part of memory that takes no seal, in a space of other clients, as many blocks as a request
/// may name in such parts. `taken_away`: the memory is cut off before each of them.
pub fn stores(socket: &Path, stop: &AtomicBool, parts: u64, taken_away: bool) -> Outcome<()> {
    let mut raw = Raw::attached(socket)?;
    let (part_bytes, len) = (BLOCK_BYTES as u64 / parts, 2 * BLOCKS_OF_PAGES * BLOCK_BYTES as u64);
    let place = |at: u64| Place { region: 1, len: part_bytes as u32, offset: 2 * at * part_bytes };
    let block = |at: u64| (0..parts).map(move |of| place(at * parts + of));
    let lasting = memfd(false, len)?;
    for round in (0..).take_while(|_| !stop.load(Relaxed)) {
        let memory = if taken_away { memfd(false, len)? } else { lasting.try_clone()? };
        registered(&raw.ask_with(&register(1, 0, len), memory.as_fd())?)?;
        if taken_away {
            memory.set_len(0)?;
        }
        let first = FOREIGN + round * BLOCKS_OF_PAGES;
        let keys = (first..first + BLOCKS_OF_PAGES).map(key).collect();
        let blocks = Blocks { keys, places: (0..BLOCKS_OF_PAGES).map(block).collect() };
        match raw.ask(&Request::Store { parent: None, blocks })? {
            Reply::Results(results) if results.iter().all(|result| result.is_err() == taken_away) => {}
            other => return Err(format!("a store, of memory that is gone: {taken_away}: {other:?}").into()),
        }
        // A region that is known as taken away has left its number.
        drop(raw.ask(&Request::Unregister { region: 1 })?);
    }
    Ok(())
}

/// Look-ups of blocks that are nowhere, into as many places as a request may have, each in another region.
pub fn many_places(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    const REGIONS: u64 = 256;
    let mut raw = Raw::attached(socket)?;
    let len = PLACES_MAX as u64 / REGIONS * PAGE;
    let memory = memfd(true, REGIONS * len)?;
    let mut regions = 0;
    while regions < REGIONS && !stop.load(Relaxed) {
        match raw.ask_with(&register(regions as u32, regions * len, len), memory.as_fd())? {
            Reply::Registered { .. } => regions += 1,
            other => return Err(format!("region {regions}: {other:?}").into()),
        }
    }
    let place = |at: u64| Place { region: (at % REGIONS) as u32, len: PAGE as u32, offset: at / REGIONS * PAGE };
    let block = |at: u64| (0..PARTS).map(move |of| place(at * PARTS + of));
    let keys = (FOREIGN..FOREIGN + BLOCKS_OF_PAGES).map(key).collect();
    let load = Request::Load(Blocks { keys, places: (0..BLOCKS_OF_PAGES).map(block).collect() });
    while !stop.load(Relaxed) {
        match raw.ask(&load)? {
            Reply::Results(_) => {}
            other => return Err(format!("a load into {PLACES_MAX} places: {other:?}").into()),
        }
    }
    Ok(())
}

/// Stores and loads in the measured client's space; where the memory `changes`, it is written to while it is stored.
pub fn stores_and_loads(socket: &Path, stop: &AtomicBool, changes: bool) -> Outcome<()> {
    const BLOCKS: u64 = 8;
    /// Stores of a connection: past the first ones the service copies what it stores.
    const STORES: usize = 32;
    let memory = SharedMemory::new(BLOCKS as usize * BLOCK_BYTES)?;
    let keys: Vec<_> = (FOREIGN..FOREIGN + BLOCKS).map(key).collect();
    let place = |at: u64| [Place { region: 1, len: BLOCK_BYTES as u32, offset: at * BLOCK_BYTES as u64 }];
    let blocks = Blocks { keys: keys.clone(), places: (0..BLOCKS).map(place).collect() };
    let [remove, store, load] = [
        Request::Remove { durable: false, keys },
        Request::Store { parent: None, blocks: blocks.clone() },
        Request::Load(blocks),
    ];
    while !stop.load(Relaxed) {
        let mut raw = Raw::attached_to(socket, SPACE, 0)?;
        registered(&raw.ask_with(&register(1, 0, memory.len() as u64), memory.as_fd())?)?;
        for _ in (0..STORES).take_while(|_| !stop.load(Relaxed)) {
            raw.ask(&remove)?;
            let ended = AtomicBool::new(false);
            let stored = thread::scope(|scope| {
                if changes {
                    scope.spawn(|| change(&memory, &ended));
                }
                let stored = raw.ask(&store);
                ended.store(true, Relaxed);
                stored
            });
            if !matches!(stored?, Reply::Results(_)) {
                return Err("a store of memory that changes: found no results".into());
            }
            raw.ask(&load)?;
        }
    }
    Ok(())
}

/// Writes to every page, until it is told that the store has ended.
fn change(memory: &SharedMemory, ended: &AtomicBool) {
    let mut byte = 0u8;
    while !ended.load(Relaxed) {
        byte = byte.wrapping_add(1);
        (0..memory.len()).step_by(PAGE as usize).for_each(|at| memory.write(at, &[byte; 8]));
    }
}

/// Attaches that are refused: for host memory, for disk, and for a disk that has no room for a block.
pub fn refused_attaches(socket: &Path, stop: &AtomicBool) -> Outcome<()> {
    let mut raw = Raw::greeted(socket)?;
    let (small, large) = (4 << 20, 1 << 50);
    let wrong = [attach("refused", small, large), attach("refused", large, small), attach("refused", 1, small)];
    for request in wrong.iter().cycle().take_while(|_| !stop.load(Relaxed)) {
        match raw.ask(request)? {
            Reply::Failed(_) => {}
            other => return Err(format!("a space that there is no room for: {other:?}").into()),
        }
    }
    Ok(())
}

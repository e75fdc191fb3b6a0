//! The calls of a caller on blocks and on the whole cache, and the checks of their answers.

use std::{collections::BTreeSet, time::Duration};

use kvhoist::{BlockKey, Error, Tier};

use crate::{
    caller::{Caller, End, Kept},
    cancel::Cancel,
    chains::check_prompt,
    model::{Began, RemoveEnd, StoreEnd},
};
use tokio::time::Instant;

pub async fn store(caller: &mut Caller, cancel: Cancel) -> End {
    let block = caller.draw_block();
    let (with_parent, wrong_length) = (caller.rng.chance(0.8), caller.rng.chance(0.01));
    let universe = &caller.context.plan.universe;
    let (key, payload) = (universe.key(block), &universe.block(block).payload);
    let parent = universe.parent_key(block).filter(|_| with_parent);
    if wrong_length {
        return match caller.cache.store(&key, parent.as_ref(), &payload[1..]).await {
            Err(Error::Argument { .. }) => End::Done(9),
            other => {
                caller.context.fail(format!("a store of a block too short came to {other:?}"));
                End::Done(10)
            }
        };
    }
    store_block(caller, block, parent, cancel).await
}

pub async fn store_block(caller: &Caller, block: usize, parent: Option<BlockKey>, cancel: Cancel) -> End {
    let universe = &caller.context.plan.universe;
    let (key, payload) = (universe.key(block), &universe.block(block).payload);
    caller.context.say(|| format!("caller {} stores block {block}", caller.number));
    let began = caller.context.model.borrow_mut().store_begins(block);
    let result = caller.run_call(cancel, caller.cache.store(&key, parent.as_ref(), payload)).await;
    end_store(caller, began, result)
}

fn end_store(caller: &Caller, began: Began, result: Option<Result<(), Error>>) -> End {
    let (end, store_end) = match result {
        Some(Ok(())) => (End::Done(1), StoreEnd::Acknowledged),
        Some(Err(error)) => (End::Error(error), StoreEnd::Failed),
        None => (End::Dropped, StoreEnd::Dropped),
    };
    caller.context.model.borrow_mut().store_ends(began, store_end);
    end
}

pub async fn reserve(caller: &mut Caller, cancel: Cancel) -> End {
    let block = caller.draw_block();
    let (commits, clears, hold_ms) = (caller.rng.chance(0.8), caller.rng.chance(0.5), caller.rng.below(20));
    let reserved = match clears {
        true => caller.run_call(cancel, caller.cache.reserve()).await,
        false => caller.run_call(cancel, caller.cache.reserve_for_overwrite()).await,
    };
    let mut reservation = match reserved {
        None => return End::Dropped,
        Some(Err(error)) => return End::Error(error),
        Some(Ok(reservation)) => reservation,
    };
    if clears && reservation.iter().any(|byte| *byte != 0) {
        caller.context.fail("a reservation showed what its slot held before");
    }
    tokio::time::sleep(Duration::from_millis(hold_ms)).await;
    if !commits {
        return End::Done(2);
    }
    let universe = &caller.context.plan.universe;
    reservation.copy_from_slice(&universe.block(block).payload);
    caller.context.say(|| format!("caller {} commits block {block}", caller.number));
    let began = caller.context.model.borrow_mut().store_begins(block);
    let (key, parent) = (universe.key(block), universe.parent_key(block));
    let result = caller.run_call(cancel, reservation.commit(&key, parent.as_ref())).await;
    end_store(caller, began, result)
}

pub async fn fetch(caller: &mut Caller, cancel: Cancel) -> End {
    let block = caller.draw_block();
    let key = caller.context.plan.universe.key(block);
    caller.context.say(|| format!("caller {} fetches block {block}", caller.number));
    let (began, asked) = (caller.context.model.borrow().begin(block), Instant::now());
    match caller.run_call(cancel, caller.cache.fetch(&key)).await {
        None => End::Dropped,
        Some(Err(error)) => End::Error(error),
        Some(Ok(found)) => {
            check_prompt(caller, block, asked);
            check_found(caller, began, found.is_some());
            let hit = found.is_some();
            if let Some(lease) = found {
                caller.keep(Kept::Host { lease, block });
            }
            End::Done(3 + u64::from(hit))
        }
    }
}

pub async fn fetch_to_device(caller: &mut Caller, cancel: Cancel) -> End {
    let block = caller.draw_block();
    let key = caller.context.plan.universe.key(block);
    caller.context.say(|| format!("caller {} fetches block {block} to the device", caller.number));
    let began = caller.context.model.borrow().begin(block);
    let found = match caller.run_call(cancel, caller.cache.fetch_to_device(&key)).await {
        None => return End::Dropped,
        Some(Err(error)) => return End::Error(error),
        Some(Ok(found)) => found,
    };
    check_found(caller, began, found.is_some());
    let Some(lease) = found else { return End::Done(3) };
    if caller.rng.chance(0.3) {
        match caller.run_call(cancel, caller.cache.read_device(&lease, Vec::new())).await {
            // The block was removed meanwhile, which ends new uses.
            Some(Err(Error::Argument { what: "lease", .. })) => return End::Done(5),
            Some(Err(error)) => return End::Error(error),
            Some(Ok(bytes)) if bytes != caller.context.plan.universe.block(block).payload => {
                caller.context.fail(format!("block {block} read from the device shows wrong bytes"));
            }
            _ => {}
        }
    }
    caller.keep(Kept::Device { lease, block });
    End::Done(4)
}

/// Asks the model about an answer.
pub fn check_found(caller: &Caller, began: Began, found: bool) {
    let context = &caller.context;
    let claims = context.claims(&caller.cache, &caller.world);
    let model = context.model.borrow_mut();
    context.check(model.answered(began, found, claims));
    let mut report = context.report.borrow_mut();
    match found {
        true => report.hits += 1,
        false => report.misses += 1,
    }
    report.hits_promised += u64::from(found && began.must_hit && claims.keeps);
    report.misses_promised += u64::from(!found && began.must_miss);
}

pub fn prefetch(caller: &mut Caller) -> End {
    let blocks: Vec<usize> = (0..caller.rng.between(1, 5)).map(|_| caller.draw_block()).collect();
    caller.context.say(|| format!("caller {} prefetches {blocks:?}", caller.number));
    let keys: Vec<BlockKey> = blocks.iter().map(|&block| caller.context.plan.universe.key(block)).collect();
    match caller.cache.prefetch(&keys) {
        Ok(started) if started <= keys.len() => End::Done(200 + started as u64),
        Ok(started) => {
            caller.context.fail(format!("a prefetch of {} blocks started {started}", keys.len()));
            End::Done(6)
        }
        Err(error) => End::Error(error),
    }
}

/// Removes a block; `durably`: also for after a power cut.
pub async fn remove(caller: &mut Caller, cancel: Cancel, durably: bool) -> End {
    let block = caller.draw_block();
    let key = caller.context.plan.universe.key(block);
    caller.context.say(|| format!("caller {} removes block {block}", caller.number));
    let began = caller.context.model.borrow_mut().remove_begins(block);
    let (result, done) = match durably {
        true => (caller.run_call(cancel, caller.cache.remove_durably(&key)).await, RemoveEnd::Durable),
        false => (caller.run_call(cancel, caller.cache.remove(&key)).await, RemoveEnd::Recorded),
    };
    let (end, remove_end) = match result {
        None => (End::Dropped, RemoveEnd::Unknown),
        Some(Ok(resident)) => (End::Done(7 + u64::from(resident)), done),
        Some(Err(error @ (Error::Io { .. } | Error::Timeout { .. }))) => (End::Error(error), RemoveEnd::Forgotten),
        Some(Err(error)) => (End::Error(error), RemoveEnd::Unknown),
    };
    caller.context.model.borrow_mut().remove_ends(began, remove_end);
    if remove_end == done {
        caller.context.removal_ended();
    }
    end
}

pub fn match_prefix(caller: &mut Caller) -> End {
    let block = caller.draw_block();
    let universe = &caller.context.plan.universe;
    let path = universe.path(block);
    let keys: Vec<BlockKey> = path.iter().map(|&block| universe.key(block)).collect();
    let (found, length) = (caller.cache.match_prefix(&keys), caller.cache.match_len(&keys));
    if found.len() != length || length > keys.len() {
        caller.context.fail(format!("of {path:?} {} blocks were matched, and {length} counted", found.len()));
    }
    if caller.context.closing.get() && length == 0 {
        // A closed cache matches nothing.
        return End::Done(999);
    }
    // A store beyond the node may offer a long chain and none of its blocks alone.
    let alone = if caller.context.plan.remote.is_some() { 0 } else { length + 1 };
    for (at, key) in keys.iter().enumerate().take(alone) {
        if caller.cache.contains(key) != (at < length) {
            caller.context.fail(format!("of {path:?} {length} blocks were matched, and number {at} is not so"));
        }
    }
    let model = caller.context.model.borrow();
    let claims = caller.context.claims(&caller.cache, &caller.world);
    for (at, &block) in path.iter().enumerate().take(length + 1) {
        caller.context.check(model.answered(model.begin(block), at < length, claims));
    }
    let tiers = found.iter().fold(0, |sum, tier| sum * 3 + *tier as u64);
    End::Done(1000 + tiers % 1000)
}

pub async fn sync(caller: &mut Caller, cancel: Cancel) -> End {
    caller.context.say(|| format!("caller {} syncs", caller.number));
    let began = caller.context.sync_begins(&caller.cache);
    match caller.run_call(cancel, caller.cache.sync()).await {
        None => End::Dropped,
        Some(Err(error)) => {
            if matches!(error, Error::Refused { .. }) {
                caller.context.model.borrow_mut().sync_reports();
            }
            End::Error(error)
        }
        Some(Ok(())) => {
            caller.context.model.borrow_mut().sync_ends(began);
            End::Done(11)
        }
    }
}

pub fn stats(caller: &Caller) -> End {
    let stats = caller.cache.stats();
    for tier in Tier::ALL {
        let of = stats.tier(tier);
        if of.resident + of.free > of.slots {
            caller.context.fail(format!("{tier}: {} resident and {} free of {} slots", of.resident, of.free, of.slots));
        }
    }
    let keys: BTreeSet<BlockKey> = caller.cache.keys().collect();
    if keys.len() != caller.cache.keys().count() || keys.iter().any(|key| !caller.cache.contains(key)) {
        caller.context.fail("the keys that are resident are not each listed once");
    }
    // A disk that is out of service keeps blocks that no call serves.
    if keys.len() > caller.cache.len() || (stats.disk_retired.is_none() && keys.len() != caller.cache.len()) {
        caller.context.fail(format!("{} keys of {} blocks are listed", keys.len(), caller.cache.len()));
    }
    End::Done(12)
}

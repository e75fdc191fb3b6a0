//! Calls on several blocks at a time, one by one: chains under leases, and what was prefetched.

use std::{collections::VecDeque, time::Duration};

use kvhoist::BlockKey;
use tokio::time::Instant;

use crate::{
    caller::{Caller, End, Kept},
    calls::{check_found, store_block},
    cancel::Cancel,
    trial::{Trial, WALK_LEASES_MAX},
};

/// An awaited read waits for no write.
pub fn check_prompt(caller: &Caller, block: usize, asked: Instant) {
    let (plan, took) = (&caller.context.plan, asked.elapsed());
    let reads = match plan.transfers_max {
        // A block that is removed while it is read may be read again.
        None => 3,
        // A transfer in flight, and the reads that all callers wait for: stores of what earlier runs wrote read too.
        Some(_) => 2 * plan.callers as u32 + 2,
    };
    // Timers round up.
    let most = reads * plan.disk_latency_max + 2 * plan.copy_latency_max + Duration::from_millis(10);
    if plan.trial == Some(Trial::PromptReads) && took > most && !caller.context.closing.get() {
        caller.context.fail(format!(
            "a fetch of block {block} took {} ms, for {reads} reads at most of {} ms",
            took.as_millis(),
            plan.disk_latency_max.as_millis()
        ));
    }
}

/// Prefetches blocks, and fetches them while that is under way.
pub async fn hurry(caller: &mut Caller, cancel: Cancel) -> End {
    let most = if caller.context.plan.transfers_max.is_some() { 60 } else { 4 };
    let blocks: Vec<usize> = (0..caller.rng.between(1, most)).map(|_| caller.draw_block()).collect();
    let (pauses, pause_ms) = (caller.rng.chance(0.5), caller.rng.below(10));
    let keys: Vec<BlockKey> = blocks.iter().map(|&block| caller.context.plan.universe.key(block)).collect();
    caller.context.say(|| format!("caller {} prefetches and fetches {blocks:?}", caller.number));
    if let Err(error) = caller.cache.prefetch(&keys) {
        return End::Error(error);
    }
    if pauses {
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
    }
    let mut code = 500;
    for (block, key) in blocks.into_iter().zip(keys).rev().take(4) {
        let (began, asked) = (caller.context.model.borrow().begin(block), Instant::now());
        match caller.run_call(cancel, caller.cache.fetch(&key)).await {
            None => return End::Dropped,
            Some(Err(error)) => return End::Error(error),
            Some(Ok(found)) => {
                check_prompt(caller, block, asked);
                check_found(caller, began, found.is_some());
                code = code * 2 + u64::from(found.is_some());
                if let Some(lease) = found {
                    caller.keep(Kept::Host { lease, block });
                }
            }
        }
    }
    End::Done(code)
}

/// Attaches a chain as an engine does: each block is fetched, or else stored, under the leases of those before it.
pub async fn walk(caller: &mut Caller, cancel: Cancel) -> End {
    let (block, leases_max) = (caller.draw_block(), caller.rng.between(1, WALK_LEASES_MAX) as usize);
    let path = caller.context.plan.universe.path(block);
    caller.context.say(|| format!("caller {} walks {path:?}", caller.number));
    let (mut held, mut code) = (VecDeque::new(), 600);
    for block in path {
        let key = caller.context.plan.universe.key(block);
        let began = caller.context.model.borrow().begin(block);
        let found = match caller.run_call(cancel, caller.cache.fetch(&key)).await {
            None => return End::Dropped,
            Some(Err(error)) => return End::Error(error),
            Some(Ok(found)) => found,
        };
        check_found(caller, began, found.is_some());
        code = code * 2 + u64::from(found.is_some());
        let Some(lease) = found else {
            let parent = caller.context.plan.universe.parent_key(block);
            match store_block(caller, block, parent, cancel).await {
                End::Done(_) => continue,
                end => return end,
            }
        };
        if *lease != *caller.context.plan.universe.block(block).payload {
            caller.context.fail(format!("a lease on block {block} shows wrong bytes"));
        }
        held.push_back(lease);
        if held.len() > leases_max {
            held.pop_front();
        }
    }
    End::Done(code)
}

/// Releases the chain that ends with a block, or keeps it for a while.
pub fn hint(caller: &mut Caller) -> End {
    let universe = &caller.context.plan.universe;
    let block = caller.hints.below(universe.len() as u64) as usize;
    let keys: Vec<BlockKey> = universe.path(block).into_iter().map(|block| universe.key(block)).collect();
    let (keeps, ms) = (caller.hints.chance(0.3), caller.hints.below(200));
    let marked = match keeps {
        true => caller.cache.keep(&keys, Duration::from_millis(ms)),
        false => caller.cache.release(&keys),
    };
    let hint = if keeps { "kept" } else { "released" };
    caller.context.say(|| format!("caller {}: {marked} blocks of the chain to {block} are {hint}", caller.number));
    if marked > keys.len() {
        caller.context.fail(format!("{marked} of {} blocks are {hint}", keys.len()));
    }
    End::Done(700 + marked as u64)
}

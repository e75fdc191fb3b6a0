//! Calls on many blocks, or on all of them.

use kvhoist::{BlockKey, Error};

use crate::{
    caller::{Caller, End, Kept},
    calls::check_found,
    cancel::Cancel,
    model::{Began, RemoveEnd},
    trial::{Trial, WALK_LEASES_MAX},
};

/// Forgets all blocks.
pub async fn clear(caller: &mut Caller, cancel: Cancel) -> End {
    let universe = &caller.context.plan.universe;
    caller.context.say(|| format!("caller {} clears the cache", caller.number));
    let began: Vec<Began> =
        (0..universe.len()).map(|block| caller.context.model.borrow_mut().remove_begins(block)).collect();
    let result = caller.run_call(cancel, caller.cache.clear()).await;
    let outcome = match result {
        Some(Ok(_)) => RemoveEnd::Recorded,
        Some(Err(Error::Io { .. } | Error::Timeout { .. })) => RemoveEnd::Forgotten,
        _ => RemoveEnd::Unknown,
    };
    for began in began {
        caller.context.model.borrow_mut().remove_ends(began, outcome);
    }
    match result {
        None => End::Dropped,
        Some(Err(error)) => End::Error(error),
        Some(Ok(removed)) => {
            if removed > universe.len() as u64 {
                caller.context.fail(format!("{removed} of {} blocks were cleared", universe.len()));
            }
            caller.context.removal_ended();
            End::Done(800 + removed)
        }
    }
}

pub async fn fetch_many(caller: &mut Caller, cancel: Cancel) -> End {
    let plan = &caller.context.plan;
    // Callers that hold leases and want more wait for each other until the deadline, unless there are slots for all.
    let most = if plan.may_time_out() || plan.trial == Some(Trial::Walks) { WALK_LEASES_MAX + 1 } else { 1 };
    let (slots, wrong) = (u64::from(plan.config.host_slots()), caller.rng.chance(0.02));
    let count = if wrong { slots + 1 } else { caller.rng.between(1, most.min(slots)) };
    let blocks: Vec<usize> = (0..count).map(|_| caller.draw_block()).collect();
    let keys: Vec<BlockKey> = blocks.iter().map(|&block| caller.context.plan.universe.key(block)).collect();
    caller.context.say(|| format!("caller {} fetches {blocks:?} at a time", caller.number));
    let began: Vec<Began> = blocks.iter().map(|&block| caller.context.model.borrow().begin(block)).collect();
    let Some(results) = caller.run_call(cancel, caller.cache.fetch_many(&keys)).await else { return End::Dropped };
    let refused = |result: &Result<_, Error>| matches!(result, Err(Error::Argument { what: "keys", .. }));
    if wrong && results.iter().all(refused) {
        return End::Done(900);
    }
    if wrong || results.len() != blocks.len() {
        caller.context.fail(format!("{} results for {} blocks and {slots} slots", results.len(), blocks.len()));
    }
    let mut code = 901;
    for ((result, began), block) in results.into_iter().zip(began).zip(blocks) {
        code *= 2;
        match result {
            Ok(found) => {
                check_found(caller, began, found.is_some());
                code += u64::from(found.is_some());
                if let Some(lease) = found {
                    caller.keep(Kept::Host { lease, block });
                }
            }
            Err(error) => caller.check_one("a fetch", &error),
        }
    }
    End::Done(code)
}

/// Counts a use of a chain: nothing comes and nothing goes.
pub fn touch(caller: &mut Caller) -> End {
    let block = caller.draw_block();
    let universe = &caller.context.plan.universe;
    let keys: Vec<BlockKey> = universe.path(block).into_iter().map(|block| universe.key(block)).collect();
    let tiers = |caller: &Caller| -> Vec<bool> { keys.iter().map(|key| caller.cache.contains(key)).collect() };
    let before = tiers(caller);
    caller.cache.touch(&keys);
    if tiers(caller) != before {
        caller.context.fail(format!("a touch of the chain to block {block} changed what is resident"));
    }
    End::Done(700)
}

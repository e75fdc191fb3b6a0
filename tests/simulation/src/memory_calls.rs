//! The calls of a caller that move blocks between the cache and the caller's memory, and the checks of their answers.

use std::time::Duration;

use kvhoist::{BlockKey, Cache, Error, Segment};
use tokio::task::spawn_local;

use crate::{
    caller::{Caller, End},
    calls::check_found,
    cancel::Cancel,
    context::Context,
    foreign::Memory,
    model::{Began, StoreEnd},
};

/// Layers of a load that goes layer by layer.
const LAYERS: usize = 3;

/// Draws blocks and their places in the caller's memory.
fn draw_jobs(caller: &mut Caller, chain: bool) -> (Vec<usize>, Vec<BlockKey>, Vec<Vec<Segment>>) {
    let room = caller.memory.blocks();
    let blocks: Vec<usize> = match chain {
        true => {
            let last = caller.draw_block();
            let path = caller.context.plan.universe.path(last);
            path[path.len().saturating_sub(room)..].to_vec()
        }
        false => (0..caller.rng.between(1, room as u64)).map(|_| caller.draw_block()).collect(),
    };
    let keys = blocks.iter().map(|&block| caller.context.plan.universe.key(block)).collect();
    let segments = (0..blocks.len()).map(|at| caller.memory.segments(at, &mut caller.rng)).collect();
    (blocks, keys, segments)
}

/// Registers the memory, where it is not.
async fn prepare(caller: &mut Caller) -> Result<(), Error> {
    if caller.memory.is_registered() {
        return Ok(());
    }
    caller.memory.register(&caller.cache, false).await
}

pub async fn load(caller: &mut Caller, cancel: Cancel) -> End {
    if let Err(error) = prepare(caller).await {
        return End::Error(error);
    }
    let (blocks, keys, segments) = draw_jobs(caller, false);
    (0..blocks.len()).for_each(|at| caller.memory.clear(at));
    caller.context.say(|| format!("caller {} loads {blocks:?}", caller.number));
    let began: Vec<Began> = blocks.iter().map(|&block| caller.context.model.borrow().begin(block)).collect();
    let loaded = match caller.context.plan.layered {
        true => {
            let load = load_by_layer(&caller.cache, &caller.memory, &caller.context, &blocks, &keys);
            caller.run_call(cancel, load).await
        }
        false => caller.run_call(cancel, caller.cache.load_into(&keys, &segments)).await,
    };
    let results = match loaded {
        Some(Ok(results)) => results,
        Some(Err(error)) => return End::Error(error),
        None => {
            caller.memory.unregister(&caller.cache).await;
            return End::Dropped;
        }
    };
    End::Done(check_loaded(caller, &caller.memory, &blocks, began, results))
}

/// Checks what a load says of each block, and what is in the memory; a number that tells answers apart.
pub fn check_loaded(
    caller: &Caller,
    memory: &Memory,
    blocks: &[usize],
    began: Vec<Began>,
    results: Vec<Result<bool, Error>>,
) -> u64 {
    if results.len() != blocks.len() {
        caller.context.fail(format!("{} results for {} blocks", results.len(), blocks.len()));
    }
    let (mut code, config) = (300, &caller.context.plan.config);
    for (at, ((result, block), began)) in results.into_iter().zip(blocks).zip(began).enumerate() {
        match result {
            Ok(found) => {
                check_found(caller, began, found);
                let right = match found {
                    true => memory.holds(at, &caller.context.plan.universe.block(*block).payload),
                    // Where it went there at once it may have been found out to be damaged, or was removed.
                    false => memory.takes_unverified(config) || memory.is_clear(at),
                };
                if !right {
                    caller.context.fail(format!("block {block}, loaded: {found}, left wrong bytes"));
                }
                code = code * 2 + u64::from(found);
            }
            Err(error) => caller.check_one("a load", &error),
        }
    }
    code
}

/// What is said of every layer holds at that moment.
async fn load_by_layer(
    cache: &Cache,
    memory: &Memory,
    context: &Context,
    blocks: &[usize],
    keys: &[BlockKey],
) -> Result<Vec<Result<bool, Error>>, Error> {
    let segments: Vec<_> = (0..blocks.len()).map(|at| memory.layers(at, LAYERS)).collect();
    let load = cache.load_layers(keys, &segments, &std::array::from_fn::<usize, LAYERS, _>(|layer| layer)).await?;
    for layer in 0..LAYERS {
        let (leading, _) = load.layer(layer).await?;
        for (at, &block) in blocks.iter().enumerate().take(leading) {
            if !memory.holds_layer(at, layer, LAYERS, &context.plan.universe.block(block).payload) {
                context.fail(format!("layer {layer} of block {block} is said to be there and is not"));
            }
        }
    }
    Ok(load.blocks().await)
}

pub async fn store_from(caller: &mut Caller, cancel: Cancel) -> End {
    if let Err(error) = prepare(caller).await {
        return End::Error(error);
    }
    let (blocks, keys, segments) = draw_jobs(caller, true);
    for (at, &block) in blocks.iter().enumerate() {
        caller.memory.fill(at, &caller.context.plan.universe.block(block).payload);
    }
    let parent = blocks.first().and_then(|&first| caller.context.plan.universe.parent_key(first));
    caller.context.say(|| format!("caller {} stores {blocks:?} from its memory", caller.number));
    let began: Vec<Began> = blocks.iter().map(|&block| caller.context.model.borrow_mut().store_begins(block)).collect();
    let result = caller.run_call(cancel, caller.cache.store_from(&keys, parent.as_ref(), &segments)).await;
    let all = |caller: &Caller, end: StoreEnd| {
        let mut model = caller.context.model.borrow_mut();
        began.iter().for_each(|began| model.store_ends(*began, end));
    };
    let results = match result {
        Some(Ok(results)) => results,
        Some(Err(error)) => {
            all(caller, if matches!(error, Error::Closed) { StoreEnd::GoesOn } else { StoreEnd::Failed });
            return End::Error(error);
        }
        None => {
            caller.memory.unregister(&caller.cache).await;
            // No job reads the memory any longer, but one may be about to become visible.
            all(caller, StoreEnd::GoesOn);
            return End::Dropped;
        }
    };
    End::Done(end_stores(caller, began, results))
}

/// Tells the model what a store says of each block; a number that tells answers apart.
pub fn end_stores(caller: &Caller, began: Vec<Began>, results: Vec<Result<bool, Error>>) -> u64 {
    if results.len() != began.len() {
        caller.context.fail(format!("{} results for {} blocks that were stored", results.len(), began.len()));
    }
    let mut code = 400;
    for (result, began) in results.into_iter().zip(began) {
        code *= 2;
        let end = match result {
            Ok(true) => {
                code += 1;
                StoreEnd::Acknowledged
            }
            Ok(false) => StoreEnd::Failed,
            Err(error) => {
                caller.check_one("a store", &error);
                StoreEnd::Failed
            }
        };
        caller.context.model.borrow_mut().store_ends(began, end);
    }
    code
}

/// Registers memory, has it pinned, loads into it, and takes it back: before, while, or after it is loaded.
pub async fn regions(caller: &mut Caller) -> End {
    let at = caller.rng.below(caller.spares.len() as u64) as usize;
    let mut memory = caller.spares.swap_remove(at);
    let end = use_region(caller, &mut memory).await;
    if !memory.is_left_alone() {
        caller.context.fail("somebody wrote to memory that was given back");
    }
    caller.spares.push(memory);
    end.unwrap_or_else(End::Error)
}

async fn use_region(caller: &mut Caller, memory: &mut Memory) -> Result<End, Error> {
    if !memory.is_left_alone() {
        caller.context.fail("somebody wrote to memory that was given back");
    }
    let pinned = caller.rng.chance(0.6);
    if !memory.is_registered() {
        memory.register(&caller.cache, pinned).await?;
    } else if let Some(region) = memory.region().filter(|_| pinned) {
        kvhoist::internals::pin_region(&caller.cache, region).await?;
    }
    let is_pinned = match memory.region() {
        Some(region) => region.is_pinned(),
        None => false,
    };
    let mut code = 500 + u64::from(is_pinned);
    if caller.rng.chance(0.2) {
        // It stays registered, and pinned, while others come and go.
        return Ok(End::Done(code));
    }
    let blocks: Vec<usize> = (0..memory.blocks()).map(|_| caller.draw_block()).collect();
    let keys: Vec<BlockKey> = blocks.iter().map(|&block| caller.context.plan.universe.key(block)).collect();
    let whole = caller.rng.chance(0.5);
    let segments: Vec<_> = (0..blocks.len())
        .map(|at| if whole { memory.layers(at, 1) } else { memory.segments(at, &mut caller.rng) })
        .collect();
    (0..blocks.len()).for_each(|at| memory.clear(at));
    caller.context.say(|| format!("caller {} loads {blocks:?} into a region", caller.number));
    let began: Vec<Began> = blocks.iter().map(|&block| caller.context.model.borrow().begin(block)).collect();
    let cache = caller.cache.clone();
    let loading = spawn_local(async move { cache.load_into(&keys, &segments).await });
    let (under_way, leaves) = (caller.rng.chance(0.5), caller.rng.chance(0.2));
    if under_way {
        match caller.rng.below(3) {
            0 => {}
            1 => tokio::task::yield_now().await,
            _ => tokio::time::sleep(Duration::from_millis(caller.rng.below(12))).await,
        }
        if leaves {
            loading.abort();
        }
        take_back(caller, memory).await;
    }
    // A load that had not begun when the region went finds none.
    let results = match loading.await {
        Err(_) => return Ok(End::Dropped),
        Ok(Err(Error::Argument { what: "segments", .. })) if under_way => return Ok(End::Done(code + 2)),
        Ok(Err(error)) => return Err(error),
        Ok(Ok(results)) => results,
    };
    for (at, ((result, block), began)) in results.into_iter().zip(&blocks).zip(began).enumerate() {
        code = code * 3 + check_load(caller, memory, under_way, at, *block, began, result);
    }
    if !under_way && caller.rng.chance(0.6) {
        take_back(caller, memory).await;
    }
    Ok(End::Done(code))
}

/// One block's answer. `gone`: its memory is its owner's again.
fn check_load(
    caller: &Caller,
    memory: &Memory,
    gone: bool,
    at: usize,
    block: usize,
    began: Began,
    result: Result<bool, Error>,
) -> u64 {
    let context = &caller.context;
    match result {
        Ok(found) => {
            check_found(caller, began, found);
            if !gone && found && !memory.holds(at, &context.plan.universe.block(block).payload) {
                context.fail(format!("block {block}, loaded into a region, left wrong bytes"));
            }
            u64::from(found)
        }
        Err(error) => {
            let closing = context.closing.get();
            context.check_error(&format_args!("caller {}: a load into a region", caller.number), &error, closing);
            context.mix(crate::context::error_code(&error));
            2
        }
    }
}

async fn take_back(caller: &mut Caller, memory: &mut Memory) {
    match caller.rng.chance(0.4) {
        true => memory.unregister_twice(&caller.cache).await,
        false => memory.unregister(&caller.cache).await,
    }
    memory.use_otherwise();
}

/// Hands this cache what the other one gave: it is refused, and nothing is done.
pub async fn strangers(caller: &mut Caller) -> End {
    let Some(stranger) = caller.stranger.clone() else { return End::Done(600) };
    let (cache, region) = (caller.cache.clone(), stranger.memory.region().expect("registered"));
    let asked = caller.rng.below(4);
    let (name, result) = match asked {
        0 => ("read_device", cache.read_device(&stranger.lease, Vec::new()).await.map(drop)),
        1 => ("pin_region", kvhoist::internals::pin_region(&cache, region).await.map(drop)),
        2 => ("unregister", cache.unregister(region).await),
        _ => {
            let block = caller.draw_block();
            let keys = [caller.context.plan.universe.key(block)];
            ("load_into", cache.load_into(&keys, &stranger.places).await.map(drop))
        }
    };
    let wanted = ["lease", "region", "region", "segments"][asked as usize];
    if !matches!(result, Err(Error::Argument { what, .. }) if what == wanted) {
        caller.context.fail(format!("{name} of what another cache gave came to {result:?}"));
    }
    End::Done(601 + asked)
}

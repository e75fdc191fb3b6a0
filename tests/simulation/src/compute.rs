//! Blocks that callers compute where they are missing, and what is known of each computation.

use std::{cell::RefCell, pin::Pin, rc::Rc, task::Poll, time::Duration};

use bytes::Bytes;
use kvhoist::Error;

use crate::{
    caller::{Caller, End},
    calls::check_found,
    cancel::Cancel,
    context::Context,
    model::{Began, StoreEnd},
};

/// How a computation ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Right,
    Fails,
    TooShort,
}

/// What a call came to that computed nothing, or whose computation failed.
#[derive(Debug)]
enum Wrong {
    Cache(Error),
    /// The number of the caller whose computation it was.
    Computation(u64),
}

impl From<Error> for Wrong {
    fn from(error: Error) -> Self {
        Wrong::Cache(error)
    }
}

/// What a call's own computation came to, where the call made it.
#[derive(Default)]
struct Own {
    called: bool,
    /// The store of what it computed.
    stores: Option<Began>,
}

/// A computation under way; it may be dropped.
struct Running {
    context: Rc<Context>,
    mark: (usize, Option<u64>),
}

impl Running {
    fn begin(context: &Rc<Context>, block: usize) -> Self {
        let began = context.model.borrow().begin(block);
        // After a removal, or beside one, a block may be computed anew beside a computation from before its end.
        let mark = (block, if began.removing { None } else { Some(began.removes) });
        let mut computations = context.computations.borrow_mut();
        if !began.removing && computations.under_way.contains(&mark) {
            context.fail(format!("two callers compute block {block} at a time"));
        }
        computations.under_way.push(mark);
        Running { context: Rc::clone(context), mark }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let under_way = &mut self.context.computations.borrow_mut().under_way;
        let at = under_way.iter().position(|mark| *mark == self.mark);
        under_way.swap_remove(at.expect("it was noted when it began"));
    }
}

pub async fn get_or_fetch_with(caller: &mut Caller, cancel: Cancel) -> End {
    let block = caller.draw_block();
    let outcome = match caller.rng.below(20) {
        0..=2 => Outcome::Fails,
        3 => Outcome::TooShort,
        _ => Outcome::Right,
    };
    let (takes_ms, parks) = (caller.rng.below(30), caller.rng.chance(0.1));
    let doze_ms = if caller.rng.chance(0.3) { caller.rng.below(80) } else { 0 };
    caller.context.say(|| format!("caller {} wants block {block}, and computes it if need be", caller.number));
    let began = caller.context.model.borrow().begin(block);
    let own = Rc::new(RefCell::new(Own::default()));
    let mut call = Box::pin(call(caller, block, began, outcome, takes_ms, Rc::clone(&own)));
    if parks && is_computed_elsewhere(caller, block) {
        // It waits for that computation, and has asked for nothing else.
        if poll_once(&mut call).await.is_none() && !own.borrow().called && is_computed_elsewhere(caller, block) {
            caller.parked.push(Box::pin(async move { drop(call.await) }));
        }
        return End::Dropped;
    }
    let result = caller.run_call(cancel, doze(call, Rc::clone(&own), doze_ms)).await;
    let own = std::mem::take(&mut *own.borrow_mut());
    if let Some(stores) = own.stores {
        // A block that was removed while it was computed is not stored.
        let removed = caller.context.model.borrow().may_be_removed_since(began);
        let end = if removed { StoreEnd::Dropped } else { store_end(caller, &result) };
        caller.context.model.borrow_mut().store_ends(stores, end);
    }
    match result {
        None => End::Dropped,
        Some(Err(Wrong::Computation(number))) => {
            if number != caller.number || !own.called || outcome != Outcome::Fails {
                caller.context.fail(format!("caller {} was told of the computation of caller {number}", caller.number));
            }
            End::Done(950)
        }
        Some(Err(Wrong::Cache(Error::Argument { what: "data", .. }))) if own.called && outcome == Outcome::TooShort => {
            End::Done(951)
        }
        Some(Err(Wrong::Cache(error))) => End::Error(error),
        Some(Ok(bytes)) => {
            check_bytes(caller, block, began, own.called, &bytes);
            End::Done(952 + u64::from(own.called))
        }
    }
}

/// The call itself, which owns all that it needs.
fn call(
    caller: &Caller,
    block: usize,
    began: Began,
    outcome: Outcome,
    takes_ms: u64,
    own: Rc<RefCell<Own>>,
) -> impl Future<Output = Result<Bytes, Wrong>> + 'static {
    let (context, cache, world, number) =
        (Rc::clone(&caller.context), caller.cache.clone(), caller.world.clone(), caller.number);
    async move {
        let universe = &context.plan.universe;
        let (key, parent) = (universe.key(block), universe.parent_key(block));
        let compute = || {
            own.borrow_mut().called = true;
            // It was looked for, and not found.
            let claims = context.claims(&cache, &world);
            context.check(context.model.borrow().answered(began, false, claims));
            async {
                let running = Running::begin(&context, block);
                tokio::time::sleep(Duration::from_millis(takes_ms)).await;
                drop(running);
                let payload = &universe.block(block).payload;
                match outcome {
                    Outcome::Fails => return Err(Wrong::Computation(number)),
                    Outcome::TooShort => return Ok(Bytes::copy_from_slice(&payload[1..])),
                    Outcome::Right => {}
                }
                let bytes = Bytes::copy_from_slice(payload);
                let stores = context.model.borrow_mut().store_begins(block);
                own.borrow_mut().stores = Some(stores);
                context.computations.borrow_mut().computed.push((stores.at, bytes.clone()));
                Ok(bytes)
            }
        };
        cache.get_or_fetch_with(&key, parent.as_ref(), compute).await
    }
}

/// Another caller computes the block, which is nowhere in the cache.
fn is_computed_elsewhere(caller: &Caller, block: usize) -> bool {
    let computations = caller.context.computations.borrow();
    let is_computed = computations.under_way.iter().any(|(of, _)| *of == block);
    is_computed && !caller.cache.contains(&caller.context.plan.universe.key(block))
}

/// Runs a call whose caller is not resumed for a while after it has computed the block.
async fn doze<F: Future + Unpin>(mut call: F, own: Rc<RefCell<Own>>, doze_ms: u64) -> F::Output {
    let first = std::future::poll_fn(|context| match Pin::new(&mut call).poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending if own.borrow().stores.is_some() => Poll::Ready(None),
        Poll::Pending => Poll::Pending,
    });
    match first.await {
        Some(output) => output,
        None => {
            tokio::time::sleep(Duration::from_millis(doze_ms)).await;
            call.await
        }
    }
}

/// Polls a future once.
async fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    std::future::poll_fn(|context| match Pin::new(&mut *future).poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// How the store of a computed block ended: the call does not say, and returns the block whatever it came to.
fn store_end(caller: &Caller, result: &Option<Result<Bytes, Wrong>>) -> StoreEnd {
    if result.is_none() {
        return StoreEnd::Dropped;
    }
    let stats = caller.cache.stats();
    let refused = stats.busy + stats.timeouts + stats.writes_refused + stats.write_errors > 0
        || stats.disk_read_only.is_some()
        || stats.disk_retired.is_some()
        || caller.context.closing.get();
    // Nobody was told: the next sync says so.
    if refused { StoreEnd::Dropped } else { StoreEnd::Acknowledged }
}

fn check_bytes(caller: &Caller, block: usize, began: Began, computed: bool, bytes: &Bytes) {
    let context = &caller.context;
    if *bytes != context.plan.universe.block(block).payload {
        context.fail(format!("block {block}, computed or found, has wrong bytes"));
    }
    if computed {
        return;
    }
    let when = context.computations.borrow().when(bytes);
    match when {
        // It is the host tier's.
        None => check_found(caller, began, true),
        Some(at) if at < began.removed => {
            context.fail(format!("a caller got block {block} as it was computed before it was removed"));
        }
        Some(_) => {}
    }
}

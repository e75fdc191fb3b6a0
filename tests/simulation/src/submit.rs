//! Memory that is lent for one call, and submissions to a completion queue.

use std::time::Duration;

use kvhoist::{CompletionQueue, Error, Region};

use crate::{
    caller::{Caller, End},
    cancel::Cancel,
    foreign::Memory,
    memory_calls::{check_loaded, end_stores},
    model::StoreEnd,
    submissions::{Job, Submission},
};

/// Longest wait for a completion, in milliseconds of virtual time.
const PATIENCE_MS: u64 = 3_600_000;

/// Draws what is loaded into a piece of memory or stored from it, and tells the model.
fn draw(caller: &mut Caller, memory: &mut Memory) -> Job {
    let loads = caller.rng.chance(0.5);
    let blocks: Vec<usize> = match loads {
        true => (0..caller.rng.between(1, memory.blocks() as u64)).map(|_| caller.draw_block()).collect(),
        false => {
            let last = caller.draw_block();
            let path = caller.context.plan.universe.path(last);
            path[path.len().saturating_sub(memory.blocks())..].to_vec()
        }
    };
    let segments = (0..blocks.len()).map(|at| memory.segments(at, &mut caller.rng)).collect();
    let universe = &caller.context.plan.universe;
    for (at, &block) in blocks.iter().enumerate() {
        match loads {
            true => memory.clear(at),
            false => memory.fill(at, &universe.block(block).payload),
        }
    }
    let keys = blocks.iter().map(|&block| universe.key(block)).collect();
    let parent = blocks.first().and_then(|&first| universe.parent_key(first)).filter(|_| !loads);
    let mut model = caller.context.model.borrow_mut();
    let began = blocks.iter().map(|&block| if loads { model.begin(block) } else { model.store_begins(block) });
    Job { loads, began: began.collect(), blocks, keys, parent, segments }
}

/// Nothing came of it, or it may still become visible.
fn ends(job: &Job, caller: &Caller, end: StoreEnd) {
    if !job.loads {
        let mut model = caller.context.model.borrow_mut();
        job.began.iter().for_each(|began| model.store_ends(*began, end));
    }
}

fn answered(job: Job, caller: &Caller, memory: &Memory, results: Vec<Result<bool, Error>>) -> u64 {
    match job.loads {
        true => check_loaded(caller, memory, &job.blocks, job.began, results),
        false => end_stores(caller, job.began, results),
    }
}

/// Lends memory for one call; when it is unregistered it is its owner's.
pub async fn lend(caller: &mut Caller, cancel: Cancel) -> End {
    let Some(mut memory) = caller.submissions.free.pop() else {
        drain(caller);
        return End::Done(970);
    };
    let end = lend_memory(caller, cancel, &mut memory).await;
    caller.submissions.free.insert(0, memory);
    end
}

async fn lend_memory(caller: &mut Caller, cancel: Cancel, memory: &mut Memory) -> End {
    if !memory.is_left_alone() {
        caller.context.fail("somebody wrote to memory that was given back");
    }
    let region = match memory.lend(&caller.cache) {
        Ok(region) => region,
        Err(error) => return End::Error(error),
    };
    let job = draw(caller, memory);
    let does = if job.loads { "loads into" } else { "stores from" };
    caller.context.say(|| format!("caller {} {does} lent memory: {:?}", caller.number, job.blocks));
    let result = match job.loads {
        true => caller.run_call(cancel, region.load_into(&job.keys, &job.segments)).await,
        false => caller.run_call(cancel, region.store_from(&job.keys, job.parent.as_ref(), &job.segments)).await,
    };
    let end = match result {
        Some(Ok(results)) => End::Done(971 + answered(job, caller, memory, results)),
        Some(Err(error)) => {
            ends(&job, caller, if matches!(error, Error::Closed) { StoreEnd::GoesOn } else { StoreEnd::Failed });
            End::Error(error)
        }
        None => {
            // Some of it may be about to become visible.
            ends(&job, caller, StoreEnd::GoesOn);
            End::Dropped
        }
    };
    caller.cache.unregister(&region).await.expect("its own region");
    if !region.is_unused() {
        caller.context.fail("memory that was unregistered is in use");
    }
    drop(region);
    if !memory.is_registered() {
        memory.use_otherwise();
    }
    end
}

/// Submits a load or a store, or drains what has completed.
pub async fn submit(caller: &mut Caller) -> End {
    let drained = drain(caller);
    if caller.rng.chance(0.2) {
        return End::Done(980 + drained);
    }
    let Some(mut memory) = caller.submissions.free.pop() else { return End::Done(980 + drained) };
    let end = submit_memory(caller, &mut memory).await;
    let end = match end {
        Ok((ticket, job, region)) => {
            caller.submissions.under_way.push(Submission { ticket, job, memory, region });
            End::Done(990)
        }
        Err(end) => {
            caller.submissions.free.insert(0, memory);
            end
        }
    };
    match caller.rng.below(4) {
        0 => wait(caller).await,
        1 => tokio::time::sleep(Duration::from_millis(caller.rng.below(20))).await,
        _ => {}
    }
    end
}

async fn submit_memory(caller: &mut Caller, memory: &mut Memory) -> Result<(u64, Job, Option<Region>), End> {
    let (lends, context) = (caller.rng.chance(0.4), caller.context.clone());
    let region = match lends {
        true => Some(memory.lend(&caller.cache).map_err(End::Error)?),
        false if memory.is_registered() => None,
        false => memory.register(&caller.cache, false).await.map(|()| None).map_err(End::Error)?,
    };
    let job = draw(caller, memory);
    let does = if job.loads { "load" } else { "store" };
    context.say(|| format!("caller {} submits a {does} of {:?}", caller.number, job.blocks));
    let Some((queue, depth)) = &caller.submissions.queue else { return Err(End::Done(981)) };
    let (keys, parent, segments) = (&job.keys, job.parent.as_ref(), &job.segments);
    let submitted = match (&region, job.loads) {
        (Some(region), true) => region.submit_load(queue, keys, segments),
        (Some(region), false) => region.submit_store(queue, keys, parent, segments),
        (None, true) => queue.submit_load(keys, segments),
        (None, false) => queue.submit_store(keys, parent, segments),
    };
    let outstanding = caller.submissions.under_way.len();
    let is_full = outstanding >= *depth;
    match submitted {
        Ok(ticket) => {
            if is_full || queue.outstanding() != outstanding + 1 {
                context.fail(format!("{} submissions to a queue of {depth} are outstanding", queue.outstanding()));
            }
            Ok((ticket, job, region))
        }
        Err(error) => {
            ends(&job, caller, StoreEnd::Failed);
            Err(match error {
                Error::Busy { .. } if is_full => End::Done(982),
                error => End::Error(error),
            })
        }
    }
}

/// Takes the completions there are, and checks each of them; how many there were.
fn drain(caller: &mut Caller) -> u64 {
    let Some((queue, _)) = &caller.submissions.queue else { return 0 };
    let is_readable = is_readable(queue);
    let done = queue.drain();
    if is_readable == done.is_empty() {
        caller.context.fail(format!("{} completions, and that the descriptor is readable: {is_readable}", done.len()));
    }
    let count = done.len() as u64;
    for (ticket, results) in done {
        let Some(at) = caller.submissions.under_way.iter().position(|submission| submission.ticket == ticket) else {
            caller.context.fail(format!("ticket {ticket} completed, and is not submitted or completed before"));
            continue;
        };
        let Submission { job, memory, region, .. } = caller.submissions.under_way.swap_remove(at);
        caller.context.say(|| format!("caller {}: ticket {ticket} completed", caller.number));
        let code = answered(job, caller, &memory, results);
        caller.context.mix(code);
        // What completed uses the memory no longer.
        if region.is_some_and(|region| !region.is_unused()) {
            caller.context.fail("the memory of a submission that completed is in use");
        }
        caller.submissions.free.insert(0, memory);
    }
    count
}

fn is_readable(queue: &CompletionQueue) -> bool {
    use std::os::fd::AsRawFd;
    let mut fd = libc::pollfd { fd: queue.event_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one descriptor, which the queue keeps open, and no wait.
    let ready = unsafe { libc::poll(&raw mut fd, 1, 0) };
    ready == 1
}

/// Waits until everything that was submitted has completed.
async fn wait(caller: &mut Caller) {
    let mut waited_ms = 0;
    while !caller.submissions.under_way.is_empty() && !caller.context.failed() {
        if drain(caller) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
            waited_ms += 1;
        }
        if waited_ms > PATIENCE_MS {
            return caller.context.fail("a submission never completed");
        }
    }
}

/// Waits for all submissions, and takes the memory back.
pub async fn finish(caller: &mut Caller) {
    wait(caller).await;
    for mut memory in std::mem::take(&mut caller.submissions.free) {
        memory.unregister(&caller.cache).await;
        if !memory.is_left_alone() {
            caller.context.fail("somebody wrote to memory that was given back");
        }
    }
}

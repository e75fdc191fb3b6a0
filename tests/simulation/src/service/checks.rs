//! What holds when no client is left: the service has what it had at first, and every block that it must have.

use std::{rc::Rc, time::Duration};

use kvhoist::{Error, Tier};
use kvhoist_service::{
    Client,
    internals::{protocol::ServiceStatus, seams::Service},
};
use tokio::time::{Instant, sleep, timeout};

use super::{actor::Process, memory::Memory, plan::PATIENCE, run::Run, stream::lock};
use crate::{
    cancel::{Cancel, until},
    sim::Rng,
};

/// The share of a space's host memory that its clients may pin.
const PINNED_SHARE: usize = 4;

pub async fn all(run: &Rc<Run>, service: &Service, rng: &mut Rng) {
    at_rest(run, service).await;
    for space in 0..run.plan.spaces.len() {
        if !run.failed() {
            audit(run, space, rng).await;
        }
    }
    if !run.failed() {
        at_rest(run, service).await;
    }
    for ids in run.ids.borrow().iter() {
        if let Some(wrong) = lock(ids).wrong.take() {
            run.fail(wrong);
        }
    }
}

/// Nobody wrote to memory that was given back.
pub fn memory(run: &Run) {
    if !run.given_back.borrow().iter().all(Memory::is_left_alone) {
        run.fail("somebody wrote to memory that was given back");
    }
}

/// No client is connected: nothing of any client is left.
async fn at_rest(run: &Rc<Run>, service: &Service) {
    let give_up = Instant::now() + PATIENCE;
    loop {
        let Ok(Ok(report)) = timeout(PATIENCE, service.report()).await else {
            return run.fail("the service does not answer");
        };
        let left: u32 = report.status.spaces.iter().map(|space| space.clients).sum();
        // A space may still be opened for a client that is gone.
        if report.status.clients.is_empty() && left == 0 && adds_up(&report.status) {
            break;
        }
        if Instant::now() >= give_up {
            return run.fail(format!("no client is left, and something of them is: {:?}", report.status));
        }
        sleep(Duration::from_millis(50)).await;
    }
    let mapped = run.machine.mapped_bytes();
    if mapped > 0 {
        run.fail(format!("no client is left, and {mapped} bytes of their memory are mapped"));
    }
    // Parked slots are taken, as long as the service runs.
    if run.plan.config.move_host {
        return;
    }
    run.check(run.machine.settle().await.map_err(|what| format!("no client is left: {what}")));
}

/// What no space has, and what the spaces have, is all there is.
fn adds_up(status: &ServiceStatus) -> bool {
    let disk: u64 = status.spaces.iter().map(|space| space.capacity_bytes).sum();
    let host: u64 = status.spaces.iter().map(|space| space.host_bytes).sum();
    disk + status.capacity_left == status.capacity_bytes && host + status.host_left == status.host_bytes
}

/// The only client of a space gets every pin that the space gives.
async fn all_pins(run: &Run, space: usize, client: &Client) -> Result<(), Error> {
    let universe = &run.plan.spaces[space].universe;
    let (mut keys, slots) = (Vec::new(), client.stats().await?.tier(Tier::Host).slots);
    for key in (0..universe.len()).map(|block| universe.key(block)) {
        if client.match_prefix(&[key]).await? == [Tier::Host] {
            keys.push(key);
        }
    }
    let expected = keys.len().min(slots as usize / PINNED_SHARE);
    for polls in 1..5 {
        // Pins that were given up come back when the service has answered.
        drop(until(client.pin(&keys, usize::MAX), Cancel::AfterPolls(polls)).await);
        while client.pin(&keys, usize::MAX).await?.count() != expected {
            sleep(Duration::from_millis(20)).await;
        }
    }
    Ok(())
}

/// Loads every block of a space, with nobody else at work.
async fn audit(run: &Rc<Run>, space: usize, rng: &mut Rng) {
    let mut process = None;
    for _ in 0..20 {
        match timeout(PATIENCE, Process::connect(run, space, Duration::from_secs(60), None, rng)).await {
            Err(_) => return run.fail("the last client waits for its connection for ever"),
            Ok(Ok(connected)) => {
                process = Some(connected);
                break;
            }
            Ok(Err(error)) => run.check_error("the last connection", &error),
        }
        sleep(Duration::from_millis(100)).await;
    }
    let Some(Process { client, .. }) = process else { return };
    let mut memory = Memory::new(run.plan.spaces[space].block_bytes, 1);
    if let Err(error) = memory.register(&client, false).await {
        return run.check_error("the last registration", &error);
    }
    for block in 0..run.plan.spaces[space].universe.len() {
        let (life, began) = (run.life.get(), run.models[space].borrow().begin(block));
        let segments = [memory.segments(0, rng)];
        let key = run.plan.spaces[space].universe.key(block);
        memory.clear(0);
        match timeout(PATIENCE, client.load_into(&[key], &segments)).await {
            Err(_) => return run.fail(format!("block {block} of space {space} is waited for for ever")),
            Ok(Err(error)) => return run.check_error("the audit", &error),
            Ok(Ok(results)) => match &results[0] {
                Err(error) => run.check_error("the audit", error),
                Ok(found) => {
                    if *found && !memory.holds(0, &run.plan.spaces[space].universe.block(block).payload) {
                        run.fail(format!("block {block} of space {space} has wrong bytes in the audit"));
                    }
                    assert_eq!(life, run.life.get(), "the service runs during the audit");
                    let claims = run.claims(space);
                    let answered = run.models[space].borrow().answered(began, *found, claims);
                    run.check(answered.map_err(|what| format!("the audit of space {space}: {what}")));
                    let mut report = run.report.borrow_mut();
                    report.hits_promised += u64::from(*found && began.must_hit && claims.keeps);
                }
            },
        }
    }
    // Slots that other spaces have lent it may be asked back at any time.
    if run.plan.by_layer && !run.plan.config.move_host {
        match timeout(PATIENCE, all_pins(run, space, &client)).await {
            Err(_) => return run.fail(format!("space {space}: the only client never gets all pins")),
            Ok(Err(error)) => return run.check_error("the last pins", &error),
            Ok(Ok(())) => {}
        }
    }
    if timeout(PATIENCE, client.close()).await.is_err() {
        return run.fail("the last client never closed");
    }
    memory.take_back();
    run.given_back.borrow_mut().push(memory);
}

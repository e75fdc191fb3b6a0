//! The service's process, from its start to its end, and again.

use std::{rc::Rc, sync::Arc, time::Duration};

use kvhoist::Error;
use kvhoist_service::internals::seams::{self, Service};
use tokio::{
    task::{JoinHandle, LocalSet, spawn_local},
    time::{sleep, timeout},
};

use super::{
    actor, checks, door::Door, hostile, machine::Handle, mappings::Landing, plan::PATIENCE, run::Run, stream::End,
};
use crate::{
    model::{Claims, Ending},
    plan::pick,
    sim::Rng,
};

/// A process of the service.
pub struct Process {
    pub service: Service,
    ended: JoinHandle<Result<(), kvhoist::Error>>,
    task: JoinHandle<()>,
}

impl Process {
    fn start(run: &Run) -> Result<Self, Error> {
        let door = Rc::new(Door::default());
        let at_door = Rc::clone(&door);
        let accept = async move || at_door.accept().await;
        let (service, serve) = seams::start(run.plan.config.clone(), Rc::new(Handle(Rc::clone(&run.machine))), accept)?;
        // What the service spawns lives in a set of its own, and dies with it.
        let set = LocalSet::new();
        let ended = set.spawn_local(serve);
        let task = spawn_local(set);
        *run.door.borrow_mut() = Some(door);
        run.say(|| "the service starts".into());
        Ok(Process { service, ended, task })
    }

    /// The process ends at this instant. Its drives go on for a while with what they write to clients' memory, and the
    /// clients are told of the death after that.
    async fn kill(self, run: &Run, power_cut: bool, rng: Rng) {
        run.say(|| format!("the service is killed, power cut: {power_cut}"));
        run.door.borrow_mut().take();
        self.task.abort();
        drop(self.task.await);
        run.report.borrow_mut().kills_amid_copies += u64::from(run.machine.copies_in_flight());
        let landings = if power_cut { Vec::new() } else { run.machine.reads_in_flight() };
        run.report.borrow_mut().kills_amid_reads += u64::from(!landings.is_empty());
        spawn_local(hang_up(run.ends.take(), landings, rng));
        end_life(run, if power_cut { Ending::PowerCut } else { Ending::Kill });
        let mut report = run.report.borrow_mut();
        report.kills += u64::from(!power_cut);
        report.power_cuts += u64::from(power_cut);
    }

    /// The service is drained, and ends by itself.
    async fn drain(self, run: &Run, power_cut: bool) {
        run.say(|| "the service is drained".into());
        let began: Vec<_> = run.models.iter().map(|model| model.borrow().sync_begins()).collect();
        self.service.drain();
        let result = timeout(PATIENCE, self.ended).await;
        run.door.borrow_mut().take();
        match result {
            Err(_) => return run.fail("the service never ended"),
            Ok(Err(_)) => return run.fail("the service panicked"),
            Ok(Ok(Ok(()))) => {
                for (model, began) in run.models.iter().zip(began) {
                    model.borrow_mut().sync_ends(began);
                }
            }
            Ok(Ok(Err(error))) if run.plan.has_faults() => run.say(|| format!("the drain failed: {error}")),
            // Stored by value, and not written: one report of each.
            Ok(Ok(Err(error @ Error::Refused { .. }))) if run.plan.by_value() => {
                run.say(|| format!("the drain failed: {error}"));
            }
            Ok(Ok(Err(error))) => run.fail(format!("the drain failed: {error}")),
        }
        run.check(run.machine.settle().await.map_err(|what| format!("after the drain: {what}")));
        // Workers of the simulation outlive their cache.
        self.task.abort();
        drop(self.task.await);
        drop(run.ends.take());
        let left = run.machine.mapped_bytes();
        if left > 0 {
            run.fail(format!("{left} bytes of clients' memory are mapped after the drain"));
        }
        end_life(run, if power_cut { Ending::PowerCut } else { Ending::Kill });
        run.report.borrow_mut().closes += 1;
    }
}

/// Waits until a client's memory is read or copied into, or for a while.
async fn some_moves(run: &Run, copies: bool) {
    for _ in 0..200 {
        let found = if copies { run.machine.copies_in_flight() } else { !run.machine.reads_in_flight().is_empty() };
        if found {
            return;
        }
        sleep(Duration::from_millis(1)).await;
    }
}

/// Ends the reads in flight of a killed service, then its connections.
async fn hang_up(ends: Vec<Arc<End>>, landings: Vec<Landing>, mut rng: Rng) {
    for mut landing in landings {
        loop {
            sleep(Duration::from_millis(rng.below(60))).await;
            if landing.land().is_none() {
                break;
            }
        }
    }
    drop(ends);
}

/// The process is gone: what the next one must find.
fn end_life(run: &Run, ending: Ending) {
    let untouched = Claims { keeps: true, keeps_synced: true, honest: true };
    for (space, model) in run.models.iter().enumerate() {
        let claims = run.machine.claims(space).unwrap_or(untouched);
        model.borrow_mut().restart(ending, claims);
    }
    run.life.set(run.life.get() + 1);
    run.report.borrow_mut().lives += 1;
    run.mix(run.machine.end_process(ending == Ending::PowerCut));
}

/// Lets stalled operations go on, sooner or later.
async fn release_stalled(run: Rc<Run>, mut rng: Rng) {
    loop {
        sleep(Duration::from_millis(rng.between(1, 800))).await;
        run.machine.release();
    }
}

/// A run, from the first start of the service to its last end.
pub async fn live(run: &Rc<Run>, mut rng: Rng) {
    spawn_local(release_stalled(Rc::clone(run), rng.fork()));
    let mut process = match Process::start(run) {
        Ok(process) => process,
        Err(error) => return run.fail(format!("the service does not start: {error}")),
    };
    let spaces = run.plan.spaces.len() as u64;
    let mut actors = Vec::new();
    for number in 0..run.plan.clients {
        let space = rng.below(spaces) as usize;
        actors.push(spawn_local(actor::live(Rc::clone(run), number, space, rng.fork())));
    }
    for number in 0..run.plan.hostile {
        let space = rng.below(spaces) as usize;
        actors.push(spawn_local(hostile::live(Rc::clone(run), number, space, rng.fork())));
    }
    for _ in 0..run.plan.ends {
        let longest = pick(&mut rng, &[5, 40, 300]);
        sleep(Duration::from_millis(rng.below(longest))).await;
        let power_cut = rng.chance(0.4);
        match rng.chance(0.7) {
            true => {
                if rng.chance(0.6) {
                    let copies = run.plan.by_layer && rng.chance(0.5);
                    some_moves(run, copies).await;
                }
                process.kill(run, power_cut, rng.fork()).await;
            }
            false => process.drain(run, power_cut).await,
        }
        let pause = if rng.chance(0.5) { 0 } else { rng.below(400) };
        sleep(Duration::from_millis(pause)).await;
        process = match Process::start(run) {
            Ok(process) if !run.failed() => process,
            Ok(_) => return,
            Err(error) => return run.fail(format!("the service does not start again: {error}")),
        };
    }
    for actor in actors {
        match timeout(PATIENCE, actor).await {
            Err(_) => return run.fail("a client waits for ever"),
            Ok(Err(error)) if error.is_panic() => return run.fail("a client panicked"),
            Ok(_) => {}
        }
    }
    run.machine.calm();
    checks::all(run, &process.service, &mut rng).await;
    if !run.failed() {
        process.drain(run, rng.chance(0.5)).await;
    }
    checks::memory(run);
    run.machine.add_to(&mut run.report.borrow_mut());
}

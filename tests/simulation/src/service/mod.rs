//! The node's service in virtual time: its sessions, spaces and regions, and its clients, all of production, over
//! simulated streams, drives and mappings. One seed decides the spaces, the clients and their calls, who hangs up, what
//! hostile clients send, how bytes arrive, and when the service is killed, drained and started again.

mod actor;
mod asked;
mod calls;
mod checks;
mod door;
mod hostile;
mod layers;
mod machine;
mod mappings;
mod memory;
mod node;
mod pins;
mod plan;
mod run;
mod stream;

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use tokio::time::Instant;

use self::{machine::Machine, plan::Plan, run::Run};
use crate::{
    model::Model,
    report::Report,
    sim::{self, Rng},
};

/// Seeds from here on are runs of the service with several clients.
pub const SERVICE_SEEDS: u64 = 6_000_000;

/// Seeds from here on are such runs with spaces that have a device, loads layer by layer and pins.
pub const DEVICE_SEEDS: u64 = 7_000_000;

/// Runs `seed`: the numbers, or what was wrong.
pub fn run(seed: u64, verbose: bool) -> Result<Report, String> {
    let mut rng = Rng::new(seed);
    let plan = Plan::draw(&mut rng, seed >= DEVICE_SEEDS);
    let failure = Rc::new(RefCell::new(None));
    let machine = Machine::new(&plan, rng.fork(), Rc::clone(&failure));
    let result = sim::block_on(async {
        let models = plan
            .spaces
            .iter()
            .map(|space| RefCell::new(Model::new(space.universe.len(), true, !plan.by_value(), false)));
        let run = Rc::new(Run {
            models: models.collect(),
            plan,
            machine: Rc::clone(&machine),
            door: RefCell::default(),
            ends: RefCell::default(),
            given_back: RefCell::default(),
            ids: RefCell::default(),
            life: Cell::new(0),
            report: RefCell::new(Report { runs: 1, ..Report::default() }),
            failure: Rc::clone(&failure),
            digest: Cell::new(0xcbf2_9ce4_8422_2325),
            began: Instant::now(),
            verbose,
        });
        run.say(|| format!("{:#?}", run.plan));
        node::live(&run, rng).await;
        let mut report = run.report.borrow().clone();
        report.digest = run.digest.get();
        report
    });
    // After the runtime: whatever could use a client's memory is gone.
    if let Err(what) = machine.mappings.check() {
        failure.borrow_mut().get_or_insert(what);
    }
    failure.take().map_or(Ok(result), Err)
}

//! The simulated storage has the properties of every storage engine.

#[path = "../../storage_engines/memory.rs"]
mod memory;
#[path = "../../storage_engines/properties.rs"]
mod properties;

use std::{rc::Rc, sync::Arc};

use kvhoist_simulation::sim::{self, FaultRates, Sim, SimOptions};
use memory::Arena;

fn on_sim(property: impl AsyncFnOnce(Rc<Sim>, Arc<Arena>)) {
    let rates = FaultRates { short: 0.05, ..FaultRates::default() };
    let options = SimOptions { align_bytes: 1, memory_align_bytes: 1, rates, ..SimOptions::default() };
    let engine = Rc::new(Sim::new(1, vec![Vec::new(); 3], options));
    sim::block_on(property(engine, Arena::new()));
}

macro_rules! on_the_simulated_engine {
    ($($property:ident),* $(,)?) => { $(#[test] fn $property() { on_sim(properties::$property) })* };
}

properties!(on_the_simulated_engine);

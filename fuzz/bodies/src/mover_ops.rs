//! A whole cache in simulation: the input makes the choices of the run, which a seed makes otherwise. A model checks
//! every answer.

/// Runs the simulation whose settings, calls, faults and exits `data` chooses.
pub fn run(data: &[u8]) {
    if let Err(what) = kvhoist_simulation::run_bytes(data, false) {
        panic!("{what}\n  every call: cargo run -p kvhoist-simulation -- --verbose --input FILE");
    }
}

//! A whole cache in simulation: the input makes the choices of the run, which a seed makes otherwise. A model checks
//! every answer.

/// Runs the simulation whose settings, calls, faults and exits `data` chooses. `KVHOIST_FUZZ_VERBOSE` prints every call.
pub fn run(data: &[u8]) {
    let verbose = std::env::var_os("KVHOIST_FUZZ_VERBOSE").is_some();
    if let Err(what) = kvhoist_simulation::run_bytes(data, verbose) {
        panic!("{what}");
    }
}

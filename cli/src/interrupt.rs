//! Ctrl-C, SIGTERM and the end of the terminal, as a flag.

use std::sync::{Arc, atomic::AtomicBool};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::failure::Failure;

/// A flag that is set by a signal to end the command. The second signal ends it at once.
pub fn catch() -> Result<Arc<AtomicBool>, Failure> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let status = Failure::interrupted().exit_status().into();
        signal_hook::flag::register_conditional_shutdown(signal, status, Arc::clone(&interrupted))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&interrupted)))
            .map_err(|error| Failure::run(format!("cannot catch signals: {error}")))?;
    }
    Ok(interrupted)
}

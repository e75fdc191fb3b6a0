//! Ctrl-C and SIGTERM, as a flag.

use std::sync::{Arc, atomic::AtomicBool};

use crate::failure::Failure;

/// A flag that is set when somebody wants the command to end.
pub fn catch() -> Result<Arc<AtomicBool>, Failure> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted))
            .map_err(|error| Failure::run(format!("cannot catch signals: {error}")))?;
    }
    Ok(interrupted)
}

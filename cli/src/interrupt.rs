//! Ctrl-C, SIGTERM and the end of the terminal, as a flag.

use std::{
    io,
    sync::{Arc, atomic::AtomicBool, mpsc},
    thread,
    time::Duration,
};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
    iterator::Signals,
    low_level,
};

use crate::{failure::Failure, scratch};

const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// How long a second signal waits for the removal of temporary folders.
const REMOVAL: Duration = Duration::from_secs(2);

/// A flag that is set by a signal to end the command. The second signal removes its temporary folders, and ends it.
pub fn catch() -> Result<Arc<AtomicBool>, Failure> {
    let failed = |error: io::Error| Failure::run(format!("cannot catch signals: {error}"));
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in SIGNALS {
        flag::register(signal, Arc::clone(&interrupted)).map_err(failed)?;
    }
    let mut signals = Signals::new(SIGNALS).map_err(failed)?;
    let end = move || {
        if signals.forever().nth(1).is_some() {
            // On a thread of its own: on a file system that hangs it never ends.
            let (tell, removed) = mpsc::channel();
            let remove = move || {
                scratch::remove_all();
                let _ = tell.send(());
            };
            drop(thread::Builder::new().spawn(remove));
            let _ = removed.recv_timeout(REMOVAL);
            low_level::exit(Failure::interrupted().exit_status().into());
        }
    };
    thread::Builder::new().name("kvhoist-signals".into()).spawn(end).map_err(failed)?;
    Ok(interrupted)
}

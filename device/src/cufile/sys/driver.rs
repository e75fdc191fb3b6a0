//! Initializes libcufile. That can take seconds, and in some versions never returns, so it runs on a thread of its own
//! that can be abandoned.

use std::{
    path::Path,
    sync::{Condvar, Mutex, PoisonError},
    thread,
    time::Duration,
};

use super::library::{Library, RawProperties, check};

/// Longer registrations were seen to go through libcufile's own buffers.
const DIRECT_BYTES_MAX: usize = 16 << 20;

/// libcufile, initialized until the process ends. It is never closed: other code in the process may use it.
#[derive(Debug)]
pub struct Driver {
    library: &'static Library,
    properties: RawProperties,
}

/// State of the initialization.
enum Opening {
    NotTried,
    /// The thread runs; `given_up` once the first caller has timed out.
    InProgress {
        given_up: bool,
    },
    Open(&'static Driver),
    Failed(String),
}

static OPENING: Mutex<Opening> = Mutex::new(Opening::NotTried);
static OPENED: Condvar = Condvar::new();

impl Driver {
    /// Initializes libcufile once per process, and waits at most `limit`. Blocks the thread.
    ///
    /// # Errors
    /// Names the missing library or function, libcufile's own error, or the timeout. After a timeout, a later call
    /// returns the driver if libcufile has returned since.
    pub fn open(limit: Duration) -> Result<&'static Driver, String> {
        let library = Library::get()?;
        // 1.16 to 1.20 read /proc/modules in an endless loop if it does not exist.
        if library.version().is_some_and(|version| version >= 1160) && !Path::new("/proc/modules").exists() {
            return Err("this libcufile never returns from cuFileDriverOpen if /proc/modules does not exist; \
                        mount it, or use libcufile 1.15"
                .into());
        }
        let mut opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*opening, Opening::NotTried) {
            let thread = thread::Builder::new().name("kvhoist-cufile-open".into());
            thread.spawn(move || finish(library)).map_err(|error| format!("no thread to open libcufile: {error}"))?;
            *opening = Opening::InProgress { given_up: false };
        }
        // Only the first caller waits; after a timeout, later calls only check.
        let awaited = |opening: &mut Opening| matches!(opening, Opening::InProgress { given_up: false });
        let waited = OPENED.wait_timeout_while(opening, limit, awaited);
        let (mut opening, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &mut *opening {
            Opening::Open(driver) => return Ok(driver),
            Opening::Failed(reason) => return Err(reason.clone()),
            Opening::InProgress { given_up } => *given_up |= !limit.is_zero(),
            Opening::NotTried => {}
        }
        Err("cuFileDriverOpen has not returned; look at cufile.log, and try another version of libcufile".into())
    }

    pub(super) fn library(&self) -> &'static Library {
        self.library
    }

    /// Name of the library, with its version if it reports one.
    pub fn name(&self) -> String {
        let name = self.library.name();
        self.library.version().map_or_else(|| name.to_owned(), |v| format!("{name} {}.{}", v / 1000, v % 1000 / 10))
    }

    /// Capacity of a batch.
    pub fn batch_max(&self) -> u32 {
        self.properties.batch_max
    }

    /// Version of nvidia-fs; `None` if it is not loaded.
    pub fn nvfs_version(&self) -> Option<(u32, u32)> {
        let RawProperties { nvfs_major, nvfs_minor, .. } = self.properties;
        (nvfs_major > 0).then_some((nvfs_major, nvfs_minor))
    }

    /// Largest direct transfer in bytes; no transfer uses more of a registration.
    pub fn direct_bytes_max(&self) -> usize {
        // libcufile counts in KiB.
        self.properties.max_direct_io.saturating_mul(1024).min(DIRECT_BYTES_MAX)
    }
}

/// Initializes libcufile on this thread, and wakes the waiting callers.
fn finish(library: &'static Library) {
    let opened = open(library);
    let mut opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    *opening = match opened {
        Ok(driver) => Opening::Open(Box::leak(Box::new(driver))),
        Err(reason) => Opening::Failed(reason),
    };
    OPENED.notify_all();
}

fn open(library: &'static Library) -> Result<Driver, String> {
    let mut properties = RawProperties::default();
    // SAFETY: the functions of these names; the second writes one structure, for which there is room.
    unsafe {
        check("cuFileDriverOpen", (library.functions.driver_open)()).map_err(|fault| fault.to_string())?;
        check("cuFileDriverGetProperties", (library.functions.driver_properties)(&mut properties))
            .map_err(|fault| fault.to_string())?;
    }
    Ok(Driver { library, properties })
}

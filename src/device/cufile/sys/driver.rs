//! The library, initialised. That may take seconds, and some versions never come back from it, so a thread of its own
//! does it, which may be given up on.

use std::{
    fmt,
    path::Path,
    sync::{Condvar, Mutex, PoisonError},
    thread,
    time::Duration,
};

use super::library::{Library, RawProperties, check};

/// Ranges of longer registrations were seen to go through buffers of the library's own.
const DIRECT_BYTES_MAX: usize = 16 << 20;

/// libcufile, initialised for the rest of the process. Nobody closes it: others in the process may use it too.
pub struct Driver {
    library: &'static Library,
    properties: RawProperties,
}

/// How far opening has come.
enum Opening {
    NotTried,
    /// A thread is at it, and whoever asked first has given up on it, or not yet.
    UnderWay {
        given_up: bool,
    },
    Open(&'static Driver),
    Failed(String),
}

static OPENING: Mutex<Opening> = Mutex::new(Opening::NotTried);
static OPENED: Condvar = Condvar::new();

impl Driver {
    /// Opens it, once a process, and waits for that for no longer than `limit`. Blocks the thread.
    ///
    /// # Errors
    /// In words: no library, a function it lacks, what it said, or that it did not come back. In that last case a later
    /// call finds out whether it has meanwhile.
    pub fn open(limit: Duration) -> Result<&'static Driver, String> {
        let library = Library::get()?;
        // 1.16 to 1.20 read it in a loop without end where it does not exist.
        if library.version().is_some_and(|version| version >= 1160) && !Path::new("/proc/modules").exists() {
            return Err("this libcufile never comes back from cuFileDriverOpen where /proc/modules does not exist; \
                        mount it, or use libcufile 1.15"
                .into());
        }
        let mut opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*opening, Opening::NotTried) {
            let thread = thread::Builder::new().name("kvhoist-cufile-open".into());
            thread.spawn(move || finish(library)).map_err(|error| format!("no thread to open libcufile: {error}"))?;
            *opening = Opening::UnderWay { given_up: false };
        }
        // One wait is enough: who asks later only looks whether it has come back.
        let awaited = |opening: &mut Opening| matches!(opening, Opening::UnderWay { given_up: false });
        let waited = OPENED.wait_timeout_while(opening, limit, awaited);
        let (mut opening, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &mut *opening {
            Opening::Open(driver) => return Ok(driver),
            Opening::Failed(reason) => return Err(reason.clone()),
            Opening::UnderWay { given_up } => *given_up |= !limit.is_zero(),
            Opening::NotTried => {}
        }
        Err("cuFileDriverOpen has not come back; look at cufile.log, and try another version of libcufile".into())
    }

    pub(super) fn library(&self) -> &'static Library {
        self.library
    }

    /// The library's name, and its version where it says.
    pub fn name(&self) -> String {
        let name = self.library.name();
        self.library.version().map_or_else(|| name.to_owned(), |v| format!("{name} {}.{}", v / 1000, v % 1000 / 10))
    }

    /// Transfers that one batch may hold.
    pub fn batch_max(&self) -> u32 {
        self.properties.batch_max
    }

    /// The version of nvidia-fs; `None` where it is not there.
    pub fn nvfs_version(&self) -> Option<(u32, u32)> {
        let RawProperties { nvfs_major, nvfs_minor, .. } = self.properties;
        (nvfs_major > 0).then_some((nvfs_major, nvfs_minor))
    }

    /// Bytes that go to the device in one piece; registrations that are longer are of no use.
    pub fn direct_bytes_max(&self) -> usize {
        // It counts in KiB.
        self.properties.max_direct_io.saturating_mul(1024).min(DIRECT_BYTES_MAX)
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("library", &self.library).field("properties", &self.properties).finish()
    }
}

/// Opens the library on this thread, and tells those who wait.
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

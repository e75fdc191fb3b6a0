//! A file that threads of a caller's own read into device memory through libcufile.

use std::{fs::File, sync::Arc, time::Duration};

use kvhoist_base::block::OpKind;

use super::{
    Part,
    open::self_test,
    sys::{CufileError, Driver, Handle},
};

/// How long a proof waits for another count, which may be of a read that never returns.
const COUNT_WAIT_MAX: Duration = Duration::from_secs(1);

/// A file that libcufile reads straight into device memory, while the calling thread waits.
pub struct CufileReader {
    driver: &'static Driver,
    handle: Handle,
}

// SAFETY: libcufile takes a handle on any thread, and reads by several at once.
unsafe impl Send for CufileReader {}
// SAFETY: as above; the handle is changed by `new` and the drop only.
unsafe impl Sync for CufileReader {}

impl CufileReader {
    /// Registers a file, and waits so long at most for libcufile's first calls of this process.
    ///
    /// # Errors
    /// Why libcufile cannot be used, or not with this file.
    pub fn open(file: Arc<File>, limit: Duration) -> Result<Self, String> {
        let driver = Driver::open(limit)?;
        let handle = Handle::new(driver, file).map_err(|fault: CufileError| fault.to_string())?;
        Ok(CufileReader { driver, handle })
    }

    /// Reads once, and returns whether libcufile's own counters show that the read went directly from the drive; `None`
    /// if they show nothing, for now: others' reads do not end, or were counted with it.
    ///
    /// # Safety
    /// As of [`read`](Self::read).
    ///
    /// # Errors
    /// Why the read failed.
    pub unsafe fn prove(&self, address: usize, len: usize, offset: u64) -> Result<Option<bool>, String> {
        let Ok(_counting) = self.driver.start_counting(COUNT_WAIT_MAX) else { return Ok(None) };
        let probe = Part { ptr: std::ptr::with_exposed_provenance_mut(address), len, offset };
        Ok(self_test(self.driver, std::slice::from_ref(&self.handle), probe)?.direct)
    }

    /// Reads a range of the file. Returns its bytes, which may be fewer.
    ///
    /// # Safety
    /// The range must be memory of the current context's device, and the caller's to write to until this returns.
    ///
    /// # Errors
    /// libcufile's. None is made while [`prove`](Self::prove) or a cache's self-test counts those of its own.
    pub unsafe fn read(&self, address: usize, len: usize, offset: u64) -> Result<usize, String> {
        let Some(_uncounted) = self.driver.read_uncounted() else {
            return Err("the reads of a test are counted".into());
        };
        let ptr = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the caller's promise.
        unsafe { self.handle.transfer(OpKind::Read, ptr, len, offset) }.map_err(|fault| fault.to_string())
    }
}

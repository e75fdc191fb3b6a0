//! Which files libcufile moves from their drives straight into device memory, and their reads.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use crate::{Mode, SourceFile, cuda::Reader, file::Way, memory::Copies, process::PerProcess};

/// What libcufile wants offsets, lengths and addresses to be multiples of, to go straight.
pub(crate) const ALIGN: u64 = 4096;

/// How long its first calls may take; some versions never return from them.
const OPEN_MAX: Duration = Duration::from_secs(10);

/// Bytes that a proof reads at most.
const PROBE_BYTES_MAX: usize = 64 << 10;

/// Whether the way from a drive to a device is a direct one, by the drive's number and the device's: once it was shown.
static PROVEN: PerProcess<BTreeMap<(u64, u32), bool>> = PerProcess::new();

/// The ways of a transfer's files to a device.
pub(crate) struct Routes {
    ordinal: u32,
    /// Each file's, looked for by the first thread that reads it; `None` where there is none.
    readers: Vec<OnceLock<Option<Reader>>>,
    /// Whether the way from a drive is direct, and false where nothing was shown: tried once, by one thread at a time.
    tried: Mutex<BTreeMap<u64, bool>>,
}

/// Bytes of a file, and where they go in device memory.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) offset: u64,
    pub(crate) len: usize,
    pub(crate) address: usize,
}

impl Routes {
    /// For so many files; `None` where none is to be looked for.
    pub(crate) fn new(files: usize, ordinal: u32, mode: Mode) -> Option<Self> {
        let is_wanted = match mode {
            Mode::Auto => Path::new("/proc/driver/nvidia-fs").exists(),
            Mode::Bounce => false,
            Mode::Cufile => true,
        };
        let readers = || (0..files).map(|_| OnceLock::new()).collect();
        is_wanted.then(|| Routes { ordinal, readers: readers(), tried: Mutex::default() })
    }

    /// Reads a range; false if it has to come another way: nothing has come then that counts.
    ///
    /// # Safety
    /// The target must be device memory of the calling thread's context, and nothing else may use it meanwhile.
    pub(crate) unsafe fn read(&self, number: usize, file: &SourceFile, copies: &Copies, target: Target) -> bool {
        let reader = self.readers[number].get_or_init(|| {
            // SAFETY: the caller's promise.
            unsafe { self.open(file, copies, target) }
        });
        let Some(reader) = reader else { return false };
        let Target { mut offset, mut len, mut address } = target;
        while len > 0 {
            // SAFETY: the caller's promise; parts of the target.
            let Ok(read) = (unsafe { reader.read(address, len, offset) }) else { return false };
            // What is left of a short read begins where direct I/O can.
            let read = if read < len { read - read % ALIGN as usize } else { len };
            if read == 0 {
                return false;
            }
            (offset, len, address) = (offset + read as u64, len - read, address + read);
        }
        true
    }

    /// # Safety
    /// As of [`read`](Self::read).
    unsafe fn open(&self, file: &SourceFile, copies: &Copies, target: Target) -> Option<Reader> {
        let (direct, drive) = file.direct()?;
        let mut tried = self.tried.lock().unwrap_or_else(PoisonError::into_inner);
        let way = (drive, self.ordinal);
        let known = tried.get(&drive).copied().or_else(|| PROVEN.lock().get(&way).copied());
        if known == Some(false) {
            return None;
        }
        let reader = Reader::open(Arc::new(direct.try_clone().ok()?), OPEN_MAX).ok()?;
        let is_direct = known.unwrap_or_else(|| {
            // Other transfers do not wait for it: the read may never return.
            // SAFETY: the caller's promise.
            let shown = unsafe { prove(&reader, file, copies, target) };
            // What showed nothing, as beside a cache's reads, is tried again by the next transfer.
            shown.is_some_and(|is_direct| *PROVEN.lock().entry(way).or_insert(is_direct))
        });
        tried.insert(drive, is_direct);
        is_direct.then_some(reader)
    }
}

/// Whether libcufile says that it reads straight, and reads what the file has: not if it fails. `None` if neither was
/// shown.
///
/// # Safety
/// As of [`Routes::read`].
unsafe fn prove(reader: &Reader, file: &SourceFile, copies: &Copies, target: Target) -> Option<bool> {
    let Target { offset, address, len } = Target { len: target.len.min(PROBE_BYTES_MAX), ..target };
    let mut wanted = vec![0; len];
    file.read(Way::Buffered, offset, &mut wanted).ok()?;
    // Other bytes than the read will bring.
    let others: Vec<u8> = wanted.iter().map(|byte| !byte).collect();
    let mut found = others.clone();
    // SAFETY: the caller's promise; the host's memory lives until the copies have finished.
    let is_counted = unsafe {
        copies.put(address, &others).and_then(|()| copies.finish()).ok()?;
        let Ok(is_counted) = reader.prove(address, len, offset) else { return Some(false) };
        copies.get(address, &mut found).and_then(|()| copies.finish()).ok()?;
        is_counted?
    };
    Some(is_counted && found == wanted)
}

//! Loads libcufile and finds its functions, once per process; describes its errors.

use std::{
    ffi::{c_int, c_uint, c_void},
    fmt,
    sync::OnceLock,
};

use super::stats::stop_counting_at_exit;
use crate::dynamic::{Dynamic, functions};

/// Names of the library: the unversioned link is missing where only the run-time package is installed.
const NAMES: [&str; 2] = ["libcufile.so.0", "libcufile.so"];

/// Return value of most functions: libcufile's status, and CUDA's.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RawResult {
    pub(super) status: c_int,
    pub(super) cuda: c_int,
}

/// Description of a file (`CUfileDescr_t`).
#[repr(C)]
pub(super) struct RawDescription {
    pub(super) kind: c_uint,
    /// A union of a descriptor and a pointer.
    pub(super) handle: RawFile,
    pub(super) operations: *const c_void,
}

#[repr(C)]
pub(super) union RawFile {
    pub(super) descriptor: c_int,
    pub(super) _pointer: *mut c_void,
}

/// An entry of a batch (`CUfileIOParams_t`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawEntry {
    pub(super) mode: c_uint,
    pub(super) base: *mut c_void,
    pub(super) file_offset: i64,
    pub(super) base_offset: i64,
    pub(super) size: usize,
    pub(super) file: *mut c_void,
    pub(super) operation: c_uint,
    pub(super) cookie: *mut c_void,
}

/// Result of a batch entry (`CUfileIOEvents_t`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawEvent {
    pub(super) cookie: *mut c_void,
    pub(super) status: c_uint,
    pub(super) bytes: usize,
}

/// `CUfileDrvProps_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RawProperties {
    pub(super) nvfs_major: c_uint,
    pub(super) nvfs_minor: c_uint,
    pub(super) poll_threshold: usize,
    pub(super) max_direct_io: usize,
    pub(super) status_flags: c_uint,
    pub(super) control_flags: c_uint,
    pub(super) feature_flags: c_uint,
    pub(super) cache_max: c_uint,
    pub(super) buffer_cache: c_uint,
    pub(super) pinned_max: c_uint,
    pub(super) batch_max: c_uint,
    pub(super) batch_timeout_ms: c_uint,
    /// Room for fields of later versions.
    pub(super) _more: [u64; 8],
}

type Timespec = libc::timespec;

functions! {
    /// The libcufile functions that this crate calls.
    Functions {
        driver_open = "cuFileDriverOpen": fn() -> RawResult;
        driver_properties = "cuFileDriverGetProperties": fn(*mut RawProperties) -> RawResult;
        handle_register = "cuFileHandleRegister": fn(*mut *mut c_void, *mut RawDescription) -> RawResult;
        handle_deregister = "cuFileHandleDeregister": fn(*mut c_void);
        buffer_register = "cuFileBufRegister": fn(*const c_void, usize, c_int) -> RawResult;
        buffer_deregister = "cuFileBufDeregister": fn(*const c_void) -> RawResult;
        read = "cuFileRead": fn(*mut c_void, *mut c_void, usize, i64, i64) -> isize;
        write = "cuFileWrite": fn(*mut c_void, *const c_void, usize, i64, i64) -> isize;
        batch_set_up = "cuFileBatchIOSetUp": fn(*mut *mut c_void, c_uint) -> RawResult;
        batch_submit = "cuFileBatchIOSubmit": fn(*mut c_void, c_uint, *mut RawEntry, c_uint) -> RawResult;
        batch_status = "cuFileBatchIOGetStatus":
            fn(*mut c_void, u32, *mut u32, *mut RawEvent, *mut Timespec) -> RawResult;
        batch_destroy = "cuFileBatchIODestroy": fn(*mut c_void);
    }
}

functions! {
    /// The functions that show which path transfers took, since libcufile 1.15. Without them no direct path can be
    /// shown.
    Statistics {
        set_level = "cuFileSetStatsLevel": fn(c_int) -> RawResult;
        start = "cuFileStatsStart": fn() -> RawResult;
        stop = "cuFileStatsStop": fn() -> RawResult;
        level_3 = "cuFileGetStatsL3": fn(*mut c_void) -> RawResult;
    }
}

/// libcufile.
pub struct Library {
    pub(super) functions: Functions,
    pub(super) statistics: Option<Statistics>,
    name: &'static str,
    version: Option<u32>,
}

impl Library {
    /// Loads the library on the first call. The error names the missing package.
    pub fn get() -> Result<&'static Library, String> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Library, String> {
        let update = "install a newer libcufile (CUDA 12 or later has it)";
        let library = Dynamic::load(&NAMES, update).ok_or_else(|| {
            "libcufile.so was not found; it comes with the CUDA toolkit (package libcufile or gds-tools)".to_owned()
        })?;
        // Before any call that may return only while the process exits.
        stop_counting_at_exit();
        Ok(Library {
            functions: Functions::find(&library)?,
            statistics: Statistics::find(&library).ok(),
            name: library.name,
            version: version(&library),
        })
    }

    /// File name of the library.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Version, as 1000 * major + 10 * minor: 1.15 is 1150. `None` if the library does not report it.
    pub fn version(&self) -> Option<u32> {
        self.version
    }

    /// True if libcufile can report which path its transfers took.
    pub fn has_statistics(&self) -> bool {
        self.statistics.is_some()
    }
}

debug_fields!(Library, library => name: library.name, version: library.version);

fn version(library: &Dynamic) -> Option<u32> {
    // SAFETY: the type is that of the header.
    let get: unsafe extern "C" fn(*mut c_int) -> RawResult = unsafe { library.find("cuFileGetVersion") }.ok()?;
    let mut version = 0;
    // SAFETY: writes one integer, and needs no initialized driver.
    let result = unsafe { get(&mut version) };
    u32::try_from(version).ok().filter(|&version| result.status == 0 && version > 0)
}

/// A failed call of libcufile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CufileError {
    call: &'static str,
    status: i32,
    cuda: i32,
}

impl CufileError {
    pub(super) fn new(call: &'static str, status: i32) -> Self {
        CufileError { call, status, cuda: 0 }
    }

    /// From the result of `cuFileRead` or `cuFileWrite`: -1 with errno, or a negated status.
    pub(super) fn of_transfer(call: &'static str, given: isize) -> Self {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
        let status = if given == -1 { errno } else { i32::try_from(-given).unwrap_or(i32::MAX) };
        CufileError::new(call, status)
    }

    /// From the bytes of a failed event: a negated status or errno, or an undefined value.
    pub(super) fn of_event(call: &'static str, bytes: isize) -> Self {
        const INTERNAL_ERROR: i32 = 5030;
        let status = if bytes < -1 { i32::try_from(-bytes).unwrap_or(INTERNAL_ERROR) } else { INTERNAL_ERROR };
        CufileError::new(call, status)
    }

    /// libcufile's status (5001 and up), or an errno.
    pub fn status(&self) -> i32 {
        self.status
    }
}

/// Converts a result to an error that names the call.
pub(super) fn check(call: &'static str, result: RawResult) -> Result<(), CufileError> {
    match result.status {
        0 => Ok(()),
        status => Err(CufileError { call, status, cuda: result.cuda }),
    }
}

/// Name of a status in cufile.h, with a hint where one is known.
fn explained(status: i32) -> (&'static str, &'static str) {
    match status {
        5001 => ("DRIVER_NOT_INITIALIZED", "open again; if it stays, look at cufile.log"),
        5002 => ("DRIVER_INVALID_PROPS", "check cufile.json (CUFILE_ENV_PATH_JSON)"),
        5003 => ("DRIVER_UNSUPPORTED_LIMIT", "check the limits in cufile.json"),
        5004 | 5005 => ("DRIVER_VERSION", "install the nvidia-fs that goes with this libcufile"),
        5007 => ("PLATFORM_NOT_SUPPORTED", "this platform has no GPUDirect Storage"),
        5008 => ("IO_NOT_SUPPORTED", "put the store on ext4 or xfs on an NVMe drive"),
        5009 => ("DEVICE_NOT_SUPPORTED", "this GPU has no GPUDirect Storage"),
        5010 => ("NVFS_DRIVER_ERROR", "look at dmesg for nvidia-fs"),
        5011 => ("CUDA_DRIVER_ERROR", "look at nvidia-smi and dmesg"),
        5012..=5015 => ("CUDA_POINTER", "the address is not device memory of this context"),
        5018 => ("INVALID_FILE_TYPE", "put the store on a regular file or a block device"),
        5019 => ("INVALID_FILE_OPEN_FLAG", "the file is open with a flag that libcufile refuses, such as O_NOFOLLOW"),
        5020 => ("DIO_NOT_SET", "the file must be open with O_DIRECT: direct_io = require"),
        5022 => ("INVALID_VALUE", "libcufile refuses this offset, length or address"),
        5023 => ("MEMORY_ALREADY_REGISTERED", "nothing else may register the same memory"),
        5025 => ("PERMISSION_DENIED", "check the rights on /dev/nvidia-fs*"),
        5027 => (
            "HANDLE_NOT_REGISTERED",
            "libcufile finds no udev record of the block device: run udevd, or in a container mount /run/udev; a file \
             /run/udev/data/b<major>:<minor> with E:ID_FS_USAGE=filesystem and E:ID_FS_TYPE=ext4 is enough",
        ),
        5028 => ("HANDLE_ALREADY_REGISTERED", "nothing else may register the same descriptor"),
        5030 => ("INTERNAL_ERROR", "look at cufile.log"),
        5033 => ("NVFS_SETUP_ERROR", "load nvidia-fs, and look at dmesg"),
        5034 => ("IO_DISABLED", "allow it in cufile.json"),
        5035 => ("BATCH_SUBMIT_FAILED", "look at cufile.log"),
        5036 => ("GPU_MEMORY_PINNING_FAILED", "use less device memory, or enlarge BAR1"),
        5037 => ("BATCH_FULL", "raise io_batchsize in cufile.json"),
        _ => ("", "look at cufile.log"),
    }
}

impl fmt::Display for CufileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CufileError { call, status, cuda } = *self;
        if (1..5000).contains(&status) {
            return write!(f, "{call}: {}", std::io::Error::from_raw_os_error(status));
        }
        let (name, fix) = explained(status);
        write!(f, "{call}: {status}")?;
        if !name.is_empty() {
            write!(f, " (CU_FILE_{name})")?;
        }
        if cuda != 0 {
            write!(f, ", CUDA error {cuda}")?;
        }
        write!(f, "; {fix}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_those_of_the_header() {
        assert_eq!(size_of::<RawResult>(), 8);
        assert_eq!(size_of::<RawDescription>(), 24);
        assert_eq!(size_of::<RawEntry>(), 64);
        assert_eq!(size_of::<RawEvent>(), 24);
        assert_eq!(std::mem::offset_of!(RawProperties, batch_max), 48);
    }

    #[test]
    fn an_error_names_its_status_and_the_fix() {
        let text = CufileError::new("cuFileHandleRegister", 5027).to_string();
        assert!(text.starts_with("cuFileHandleRegister: 5027 (CU_FILE_HANDLE_NOT_REGISTERED); "), "{text}");
        assert!(text.contains("/run/udev/data/b<major>:<minor>"), "{text}");
        let text = CufileError { cuda: 700, ..CufileError::new("cuFileRead", 5011) }.to_string();
        assert!(text.contains("5011 (CU_FILE_CUDA_DRIVER_ERROR), CUDA error 700; "), "{text}");
        assert_eq!(CufileError::of_transfer("cuFileRead", -5030).status(), 5030);
        assert!(CufileError::new("cuFileRead", libc::EIO).to_string().contains("Input/output error"));
    }
}

//! Loads and initializes the CUDA driver library.

use std::{
    ffi::{CStr, c_char},
    fmt,
    sync::OnceLock,
};

use cudarc::driver::sys::{self, CUdeviceptr, CUmemcpyAttributes, CUresult, CUstream, CUstreamCaptureMode};
use kvhoist_base::panics::log;

/// Required functions. The binding panics on a missing function, so all are looked up at load.
const REQUIRED: [&str; 35] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceGetPCIBusId",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
    "cuMemcpyAsync",
    "cuStreamCreateWithPriority",
    "cuCtxGetStreamPriorityRange",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventDestroy_v2",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
];

/// The driver, initialized.
#[derive(Debug, Clone, Copy)]
pub(super) struct Driver {
    /// The newest CUDA version that it supports: 13000 is 13.0.
    pub version: i32,
    pub batch: Option<BatchForm>,
    /// Whether streams can wait for a word in memory, and write one.
    pub stream_memory_ops: bool,
    /// Whether threads can choose what a capture of a stream forbids them.
    capture_modes: bool,
}

/// The form of the driver's batch copy.
#[derive(Debug, Clone, Copy)]
pub(super) enum BatchForm {
    /// CUDA 12.8: reports which copy failed. Missing in the binding, which is for CUDA 13.
    V1(BatchV1),
    /// CUDA 13.
    V2,
}

/// `cuMemcpyBatchAsync` of CUDA 12.8. Arguments: destinations, sources, lengths, their count, attributes, the first
/// copy of each attribute, the number of attributes, the failed copy, the stream.
pub(super) type BatchV1 = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    CUstream,
) -> CUresult;

/// A failed call of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CudaError {
    call: &'static str,
    code: CUresult,
}

impl CudaError {
    /// A call of the system's that found no memory.
    pub(super) fn out_of_memory(call: &'static str) -> Self {
        CudaError { call, code: CUresult::CUDA_ERROR_OUT_OF_MEMORY }
    }

    /// True if the error has invalidated the context: every later call on it fails too.
    pub(crate) fn is_sticky(&self) -> bool {
        matches!(
            self.code,
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
                | CUresult::CUDA_ERROR_LAUNCH_FAILED
                | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
                | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
                | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
                | CUresult::CUDA_ERROR_INVALID_PC
                | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
                | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
                | CUresult::CUDA_ERROR_ASSERT
                | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
                | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
                | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
                | CUresult::CUDA_ERROR_CONTAINED
                | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
                | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
                | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
                | CUresult::CUDA_ERROR_DEINITIALIZED
                | CUresult::CUDA_ERROR_UNKNOWN
        )
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |lookup: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
            let mut text = std::ptr::null();
            // SAFETY: a `CudaError` exists only after `Driver::get` found these functions; they write one pointer to a
            // constant string, or leave it.
            let found = unsafe { lookup(self.code, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
            if !found {
                return format!("{:?}", self.code);
            }
            // SAFETY: not null, and a constant of the library.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        write!(f, "{}: {} ({})", self.call, text(sys::cuGetErrorName), text(sys::cuGetErrorString))
    }
}

/// Converts a result code to an error that names the call.
pub(crate) fn check(call: &'static str, code: CUresult) -> Result<(), CudaError> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(CudaError { call, code }) }
}

/// Converts the error to text.
fn text<T>(result: Result<T, CudaError>) -> Result<T, String> {
    result.map_err(|fault| fault.to_string())
}

impl Driver {
    /// Loads the library on the first call. The error names what is missing.
    pub(super) fn get() -> Result<Driver, String> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        DRIVER.get_or_init(Self::load).clone()
    }

    fn load() -> Result<Driver, String> {
        // SAFETY: loads the driver library and runs its constructors, which are trusted like those of any linked
        // library.
        if !unsafe { sys::is_culib_present() } {
            return Err("libcuda.so was not found; it comes with the NVIDIA driver".into());
        }
        if let Some(missing) = REQUIRED.iter().find(|name| !has(name)) {
            return Err(format!("libcuda.so has no {missing}; install a newer NVIDIA driver"));
        }
        // SAFETY: the function exists, and takes no pointers.
        text(check("cuInit", unsafe { sys::cuInit(0) }))?;
        let mut version = 0;
        // SAFETY: the function exists, and writes one integer.
        text(check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) }))?;
        let batch = if has("cuMemcpyBatchAsync_v2") { Some(BatchForm::V2) } else { batch_v1().map(BatchForm::V1) };
        Ok(Driver {
            version,
            batch,
            capture_modes: has("cuThreadExchangeStreamCaptureMode"),
            stream_memory_ops: ["cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"].iter().all(|name| has(name)),
        })
    }
}

impl Driver {
    /// Chooses what a capture of a stream, by any thread, forbids this thread; returns what it had chosen before.
    ///
    /// By default that is much, such as to query an event of another stream, and what is forbidden ends the capture,
    /// too. Nothing that this crate asks for is about a captured stream, so with `RELAXED` the two do not meet.
    pub(super) fn exchange_capture_mode(&self, mode: CUstreamCaptureMode) -> CUstreamCaptureMode {
        let mut other = mode;
        if self.capture_modes {
            // SAFETY: the function exists, and exchanges one number.
            let exchanged = check("cuThreadExchangeStreamCaptureMode", unsafe {
                sys::cuThreadExchangeStreamCaptureMode(&mut other)
            });
            if let Err(fault) = exchanged {
                log(|| tracing::debug!(%fault, "a capture of a stream may make calls fail"));
            }
        }
        other
    }
}

fn batch_v1() -> Option<BatchV1> {
    // SAFETY: the library was found before and is never unloaded; the type is that of the function of this name.
    unsafe { sys::culib().get::<BatchV1>(b"cuMemcpyBatchAsync") }.ok().map(|function| *function)
}

/// True if the loaded library has this function.
pub(super) fn has(name: &str) -> bool {
    // SAFETY: the library was found before; the symbol is looked up but not called.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok()
}

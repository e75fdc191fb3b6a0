//! Device memory of one process in another: CUDA IPC.
//!
//! A handle names a whole allocation. It is mapped once in a process, however many ranges of it are imported.

use std::{
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::sys::{self, CUipcMem_flags, CUipcMemHandle};
use kvhoist_base::error::{Error, Result};

use super::{
    context::{Entered, Gpu},
    driver::{CudaError, check, has},
};

/// Bytes of a handle, which mean something to the driver alone.
pub const IPC_HANDLE_BYTES: usize = 64;

/// What the calls need beyond what every engine needs.
const REQUIRED: [&str; 4] =
    ["cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle", "cuMemGetAddressRange_v2"];

/// A range of another process's device memory, mapped until it is dropped.
///
/// It stays mapped when the other process ends; its bytes are undefined then.
pub struct ImportedMemory {
    gpu: Arc<Gpu>,
    handle: [u8; IPC_HANDLE_BYTES],
    start: *mut u8,
    len: usize,
}

// SAFETY: an address that the host never dereferences, and a handle that may be used from any thread.
unsafe impl Send for ImportedMemory {}
// SAFETY: nothing is changed through `&self`.
unsafe impl Sync for ImportedMemory {}

/// An allocation that this process has mapped.
struct Mapped {
    gpu: [u8; 16],
    handle: [u8; IPC_HANDLE_BYTES],
    allocation: Range<usize>,
    users: usize,
}

/// All of them. Locked while one is mapped or unmapped, so that no handle is mapped twice.
static MAPPED: Mutex<Vec<Mapped>> = Mutex::new(Vec::new());

fn mapped() -> MutexGuard<'static, Vec<Mapped>> {
    MAPPED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unavailable(reason: impl ToString) -> Error {
    Error::unavailable("device memory", reason.to_string())
}

impl Gpu {
    /// The handle of the allocation that a range of this process's device memory lies in, and where in it the range
    /// begins.
    ///
    /// # Errors
    /// [`Error::Argument`] for memory that is not one allocation of `cudaMalloc`. [`Error::Unavailable`] with the
    /// driver's error.
    pub fn export_memory(&self, start: usize, len: usize) -> Result<([u8; IPC_HANDLE_BYTES], u64)> {
        let _entered = self.need_ipc()?;
        let found = format!("{len} bytes at {start:#x}");
        let allocation = self.allocation_of(start).map_err(|fault| {
            let expected = "device memory of this process, of the client's GPU";
            Error::argument("memory", format!("{found} ({fault})"), expected)
        })?;
        if !allocation.contains(&start) || len > allocation.end - start {
            let found = format!("{found}, in an allocation of {} bytes at {:#x}", allocation.len(), allocation.start);
            return Err(Error::argument("memory", found, "a range within one allocation"));
        }
        let mut handle = CUipcMemHandle { reserved: [0; IPC_HANDLE_BYTES] };
        // SAFETY: the function exists (`need_ipc`), the context is current, and the call writes one handle.
        let exported =
            check("cuIpcGetMemHandle", unsafe { sys::cuIpcGetMemHandle(&mut handle, allocation.start as u64) });
        exported.map_err(|fault| {
            let expected = "memory of cudaMalloc, which other processes can map: with PyTorch set \
                            PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False";
            Error::argument("memory", format!("{found}, of which the driver makes no handle ({fault})"), expected)
        })?;
        Ok((handle.reserved.map(|byte| byte as u8), (start - allocation.start) as u64))
    }

    /// Maps a range of another process's allocation.
    ///
    /// # Errors
    /// [`Error::Argument`] for a range that does not lie in it. [`Error::Unavailable`] with the driver's error: the
    /// handle is of this process, say, or of one that has ended.
    pub fn import_memory(
        self: &Arc<Self>,
        handle: &[u8; IPC_HANDLE_BYTES],
        offset: u64,
        len: u64,
    ) -> Result<ImportedMemory> {
        let _entered = self.need_ipc()?;
        let mut all = mapped();
        let uuid = self.device().uuid;
        let known = all.iter().position(|known| known.gpu == uuid && known.handle == *handle);
        let at = match known {
            Some(at) => at,
            None => {
                let allocation = self.map(handle)?;
                all.push(Mapped { gpu: uuid, handle: *handle, allocation, users: 0 });
                all.len() - 1
            }
        };
        let Range { start, end } = all[at].allocation;
        all[at].users += 1;
        // Dropped, it is unmapped; so the lock goes first.
        drop(all);
        let mut memory = ImportedMemory {
            gpu: Arc::clone(self),
            handle: *handle,
            start: std::ptr::with_exposed_provenance_mut(start),
            len: 0,
        };
        match (usize::try_from(offset), usize::try_from(len)) {
            (Ok(offset), Ok(len)) if len > 0 && offset <= end - start && len <= end - start - offset => {
                memory.start = memory.start.wrapping_add(offset);
                memory.len = len;
                Ok(memory)
            }
            _ => {
                let found = format!("{len} bytes from {offset} on");
                Err(Error::argument("memory", found, format!("1 byte or more within an allocation of {}", end - start)))
            }
        }
    }

    /// Makes the context current, if the driver has the calls.
    fn need_ipc(&self) -> Result<Entered> {
        match REQUIRED.iter().find(|name| !has(name)) {
            Some(missing) => Err(unavailable(format!("libcuda.so has no {missing}; install a newer NVIDIA driver"))),
            None => self.enter().map_err(unavailable),
        }
    }

    fn map(&self, handle: &[u8; IPC_HANDLE_BYTES]) -> Result<Range<usize>> {
        let raw = CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: the function exists (`need_ipc`), the context is current, and the call writes one address.
        let opened = check("cuIpcOpenMemHandle", unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, raw, flags) });
        opened.map_err(|fault| {
            unavailable(format!(
                "found a handle that the driver does not map: {fault}; expected one of a process that lives, other \
                 than this one, on the same machine: containers need the same IPC and PID namespaces"
            ))
        })?;
        self.allocation_of(address as usize).map_err(|fault| {
            self.unmap(address as usize);
            unavailable(fault)
        })
    }

    fn unmap(&self, start: usize) {
        // SAFETY: mapped by `map`, unmapped once; the owner of the last range vouches that nothing uses it.
        self.give_back("cuIpcCloseMemHandle", || unsafe { sys::cuIpcCloseMemHandle(start as u64) });
    }

    /// The allocation that an address lies in.
    fn allocation_of(&self, address: usize) -> std::result::Result<Range<usize>, CudaError> {
        let (mut start, mut bytes) = (0, 0);
        // SAFETY: the function exists (`need_ipc`), the context is current, and the call writes two integers.
        check("cuMemGetAddressRange", unsafe { sys::cuMemGetAddressRange_v2(&mut start, &mut bytes, address as u64) })?;
        Ok(start as usize..start as usize + bytes)
    }
}

impl ImportedMemory {
    /// Unmaps it, as its drop does.
    pub fn unmap(self) {}

    /// Its first address on the device.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Its bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

debug_fields!(ImportedMemory, memory => start: memory.start, len: memory.len);

impl Drop for ImportedMemory {
    fn drop(&mut self) {
        let mut all = mapped();
        let uuid = self.gpu.device().uuid;
        let Some(at) = all.iter().position(|known| known.gpu == uuid && known.handle == self.handle) else { return };
        all[at].users -= 1;
        if all[at].users == 0 {
            // Under the lock: the handle may be mapped again at once.
            self.gpu.unmap(all.swap_remove(at).allocation.start);
        }
    }
}

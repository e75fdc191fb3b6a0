//! RAII wrappers of verbs objects: device context, protection domain, memory region, and completion queue with its
//! channel. Each object keeps the objects it depends on alive.

use std::{
    ffi::{c_int, c_void},
    fmt, io,
    os::fd::RawFd,
    ptr::NonNull,
    sync::Arc,
};

use kvhoist_base::panics::log;

use super::{
    library::Library,
    sys::{self, RawContext, RawCq, RawMr, RawPd},
    work::Completion,
};

/// A failed verbs call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VerbsError {
    pub(super) call: &'static str,
    pub(super) errno: i32,
}

impl VerbsError {
    pub(crate) fn errno(&self) -> i32 {
        self.errno
    }
}

impl fmt::Display for VerbsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, io::Error::from_raw_os_error(self.errno))?;
        match (self.call, self.errno) {
            ("ibv_reg_mr" | "ibv_create_cq" | "ibv_create_qp" | "ibv_reg_dmabuf_mr", libc::ENOMEM) => {
                f.write_str(" (the limit of locked memory, `ulimit -l`, must be as large as the memory registered)")
            }
            ("ibv_reg_mr", libc::EFAULT) => {
                f.write_str(" (for device memory: load nvidia-peermem, or use a kernel and driver with dma-buf)")
            }
            ("ibv_open_device", _) => f.write_str(" (the process needs access to /dev/infiniband/uverbs*)"),
            _ => Ok(()),
        }
    }
}

/// Checks a return value: 0 for success, an errno, or -1 with `errno` set.
pub(super) fn check(call: &'static str, given: c_int) -> Result<(), VerbsError> {
    match given {
        0 => Ok(()),
        errno if errno > 0 => Err(VerbsError { call, errno }),
        _ => Err(last(call)),
    }
}

fn last(call: &'static str) -> VerbsError {
    VerbsError { call, errno: io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) }
}

pub(super) fn non_null<T>(call: &'static str, pointer: *mut T) -> Result<NonNull<T>, VerbsError> {
    NonNull::new(pointer).ok_or_else(|| last(call))
}

/// Logs an object that could not be destroyed; nothing else can be done about it.
pub(super) fn log_failure(given: Result<(), VerbsError>) {
    if let Err(fault) = given {
        log(|| tracing::debug!(%fault, "a verbs object was not destroyed"));
    }
}

/// Limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceLimits {
    pub(crate) ports: u8,
    pub(crate) work_requests: u32,
    pub(crate) sges: u32,
    pub(crate) completions: u32,
    pub(crate) region_bytes: u64,
}

/// An open device.
pub(crate) struct Context {
    raw: NonNull<RawContext>,
    pub(super) library: &'static Library,
}

// SAFETY: verbs may be called from any thread (ibv_open_device(3) and rdma-core's documentation of thread safety).
unsafe impl Send for Context {}
// SAFETY: as for `Send`; only the library changes what the pointer leads to.
unsafe impl Sync for Context {}

impl Context {
    /// Opens `device`.
    pub(super) fn open(library: &'static Library, device: *mut sys::RawDevice) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the caller holds the list that `device` is from.
        let raw = non_null("ibv_open_device", unsafe { (library.functions.open_device)(device) })?;
        Ok(Arc::new(Context { raw, library }))
    }

    pub(super) fn raw(&self) -> *mut RawContext {
        self.raw.as_ptr()
    }

    /// Queries the device's limits.
    pub(crate) fn limits(&self) -> Result<DeviceLimits, VerbsError> {
        let mut attributes = std::mem::MaybeUninit::<sys::RawDeviceAttr>::zeroed();
        // SAFETY: an open context; the call writes one structure of this type.
        let given = unsafe { (self.library.functions.query_device)(self.raw(), attributes.as_mut_ptr()) };
        check("ibv_query_device", given)?;
        // SAFETY: plain integers, zeroed above and written by the call.
        let attributes = unsafe { attributes.assume_init() };
        let positive = |number: c_int| u32::try_from(number).unwrap_or(0);
        Ok(DeviceLimits {
            ports: attributes.ports,
            work_requests: positive(attributes.max_qp_wr),
            sges: positive(attributes.max_sge),
            completions: positive(attributes.max_cqe),
            region_bytes: attributes.max_mr_size,
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: open until now; every object made from it has held it and is gone.
        log_failure(check("ibv_close_device", unsafe { (self.library.functions.close_device)(self.raw()) }));
    }
}

/// The protection domain of memory regions and queue pairs.
pub(crate) struct ProtectionDomain {
    pub(super) raw: NonNull<RawPd>,
    pub(super) context: Arc<Context>,
}

// SAFETY: as for `Context`.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as for `Context`.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: an open context.
        let raw = non_null("ibv_alloc_pd", unsafe { (context.library.functions.alloc_pd)(context.raw()) })?;
        Ok(Arc::new(ProtectionDomain { raw, context: Arc::clone(context) }))
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: made in `new`; regions and queue pairs hold the domain, so all of them are gone.
        log_failure(check("ibv_dealloc_pd", unsafe { (self.context.library.functions.dealloc_pd)(self.raw.as_ptr()) }));
    }
}

/// A range of memory registered with the device until dropped.
pub(crate) struct MemoryRegion {
    raw: NonNull<RawMr>,
    lkey: u32,
    rkey: u32,
    domain: Arc<ProtectionDomain>,
}

// SAFETY: as for `Context`.
unsafe impl Send for MemoryRegion {}
// SAFETY: as for `Context`.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers memory that the kernel can pin: host memory, or device memory with nvidia-peermem. Takes time per
    /// page.
    ///
    /// # Safety
    /// The range must be mapped and writable during the call, and stay so until every work request that names the
    /// region has completed.
    pub(crate) unsafe fn new(domain: &Arc<ProtectionDomain>, start: usize, bytes: usize) -> Result<Self, VerbsError> {
        let address: *mut c_void = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: our own domain; the caller vouches for the range.
        let raw = unsafe {
            (domain.context.library.functions.register)(domain.raw.as_ptr(), address, bytes, sys::ACCESS_WRITE)
        };
        Ok(Self::of(non_null("ibv_reg_mr", raw)?, domain))
    }

    /// Registers `bytes` of a dma-buf from `offset` on. Work requests address them from `start` on.
    pub(crate) fn of_dma_buf(
        domain: &Arc<ProtectionDomain>,
        dma_buf: RawFd,
        offset: u64,
        start: usize,
        bytes: usize,
    ) -> Result<Self, VerbsError> {
        let Some(register) = domain.context.library.register_dma_buf else {
            return Err(VerbsError { call: "ibv_reg_dmabuf_mr", errno: libc::ENOSYS });
        };
        // SAFETY: our own domain; the kernel checks the descriptor and keeps the dma-buf's memory while the region
        // exists.
        let raw = unsafe { register(domain.raw.as_ptr(), offset, bytes, start as u64, dma_buf, sys::ACCESS_WRITE) };
        Ok(Self::of(non_null("ibv_reg_dmabuf_mr", raw)?, domain))
    }

    fn of(raw: NonNull<RawMr>, domain: &Arc<ProtectionDomain>) -> Self {
        // SAFETY: a region that the library just made; its keys never change.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        MemoryRegion { raw, lkey, rkey, domain: Arc::clone(domain) }
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: registered in `new` or `of_dma_buf`, deregistered once. A poster of work that names the region holds
        // it until that work is done.
        let given = unsafe { (self.domain.context.library.functions.deregister)(self.raw.as_ptr()) };
        log_failure(check("ibv_dereg_mr", given));
    }
}

/// A completion queue, and the channel whose descriptor becomes readable after [`arm`](Self::arm) when a completion
/// arrives.
pub(crate) struct CompletionQueue {
    pub(super) raw: NonNull<RawCq>,
    channel: NonNull<sys::RawChannel>,
    fd: RawFd,
    entries: u32,
    context: Arc<Context>,
}

impl CompletionQueue {
    /// Makes a queue of at least `entries` entries.
    pub(crate) fn new(context: &Arc<Context>, entries: u32) -> Result<Self, VerbsError> {
        let functions = &context.library.functions;
        // SAFETY: an open context.
        let channel = non_null("ibv_create_comp_channel", unsafe { (functions.create_channel)(context.raw()) })?;
        let give_back = |fault| {
            // SAFETY: made above; nothing uses it yet.
            log_failure(check("ibv_destroy_comp_channel", unsafe { (functions.destroy_channel)(channel.as_ptr()) }));
            fault
        };
        // SAFETY: a channel that the library just made; its descriptor never changes.
        let fd = unsafe { (*channel.as_ptr()).fd };
        // SAFETY: the channel owns the descriptor; only its flags change.
        let given = unsafe { libc::fcntl(fd, libc::F_SETFL, libc::fcntl(fd, libc::F_GETFL) | libc::O_NONBLOCK) };
        check("fcntl", given).map_err(give_back)?;
        let wanted = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: a context and a channel made from it; vector 0 always exists.
        let raw = unsafe { (functions.create_cq)(context.raw(), wanted, std::ptr::null_mut(), channel.as_ptr(), 0) };
        let raw = non_null("ibv_create_cq", raw).map_err(give_back)?;
        // SAFETY: a queue that the library just made; its size is set at creation.
        let entries = u32::try_from(unsafe { (*raw.as_ptr()).entries }).unwrap_or(0).max(entries);
        Ok(CompletionQueue { raw, channel, fd, entries, context: Arc::clone(context) })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd
    }

    pub(crate) fn entries(&self) -> u32 {
        self.entries
    }

    /// Polls for completions and returns how many were written to `into`.
    pub(crate) fn poll(&self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let most = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue of an open context; the call writes at most `into.len()` completions.
        let given = unsafe {
            let poll = (*(*self.raw.as_ptr()).context).ops.poll_cq.expect("every provider can poll");
            poll(self.raw.as_ptr(), most, into.as_mut_ptr())
        };
        usize::try_from(given).map_err(|_| VerbsError { call: "ibv_poll_cq", errno: libc::EIO })
    }

    /// Makes the channel readable at the next completion. A completion that arrived before this call may raise no
    /// event, so poll once more after arming.
    pub(crate) fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: the queue of an open context.
        let given = unsafe {
            let arm = (*(*self.raw.as_ptr()).context).ops.request_notify.expect("every provider can notify");
            arm(self.raw.as_ptr(), 0)
        };
        check("ibv_req_notify_cq", given)
    }

    /// Consumes pending channel events; true if there was one.
    pub(crate) fn take_events(&self) -> bool {
        let functions = &self.context.library.functions;
        let mut taken = 0;
        loop {
            let (mut queue, mut cookie) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: our own nonblocking channel; the call writes two pointers.
            let given = unsafe { (functions.get_cq_event)(self.channel.as_ptr(), &mut queue, &mut cookie) };
            if given != 0 {
                break;
            }
            taken += 1;
        }
        if taken > 0 {
            // SAFETY: acknowledges exactly the events taken, all of the channel's only queue.
            unsafe { (functions.ack_cq_events)(self.raw.as_ptr(), taken) };
        }
        taken > 0
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let functions = &self.context.library.functions;
        // Events that were never taken need no acknowledgment.
        // SAFETY: made in `new`; the queue pair that used it is gone, and every event taken was acknowledged.
        log_failure(check("ibv_destroy_cq", unsafe { (functions.destroy_cq)(self.raw.as_ptr()) }));
        // SAFETY: made in `new`; its only queue is gone.
        log_failure(check("ibv_destroy_comp_channel", unsafe { (functions.destroy_channel)(self.channel.as_ptr()) }));
    }
}

/// The name of a completion status, with a hint where one is known.
pub(crate) fn status_text(status: u32) -> &'static str {
    match status {
        0 => "success",
        1 => "local length error",
        2 => "local queue pair operation error",
        4 => "local protection error (an lkey that does not cover the memory)",
        5 => "flushed: the queue pair was in error",
        7 => "bad response",
        8 => "local access error",
        9 => "remote invalid request",
        10 => "remote access error (an rkey that does not cover the memory)",
        11 => "remote operation error",
        12 => "retries exceeded: the port is down, or the path (GID, MTU) does not lead back to it",
        13 => "receiver-not-ready retries exceeded",
        19 => "fatal error of the device",
        20 => "response timeout",
        21 => "general error",
        _ => "unknown status",
    }
}

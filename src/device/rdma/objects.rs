//! A device's objects, each given back when the last who needs it is gone: a context, its protection domain, regions of
//! memory, a completion queue with its channel, and a queue pair.

use std::{
    ffi::{c_int, c_void},
    fmt, io,
    os::fd::RawFd,
    ptr::NonNull,
    sync::Arc,
};

use super::{
    library::Library,
    ports::Path,
    raw::{self, Completion, RawContext, RawCq, RawMr, RawPd, RawQp, WorkRequest, mask},
};

/// What a call of the library came to, other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VerbsFault {
    call: &'static str,
    errno: i32,
}

impl VerbsFault {
    pub(crate) fn errno(&self) -> i32 {
        self.errno
    }
}

impl fmt::Display for VerbsFault {
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

/// The errno of a call that gives one, or -1 and sets it.
fn check(call: &'static str, given: c_int) -> Result<(), VerbsFault> {
    match given {
        0 => Ok(()),
        errno if errno > 0 => Err(VerbsFault { call, errno }),
        _ => Err(last(call)),
    }
}

fn last(call: &'static str) -> VerbsFault {
    VerbsFault { call, errno: io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) }
}

fn made<T>(call: &'static str, made: *mut T) -> Result<NonNull<T>, VerbsFault> {
    NonNull::new(made).ok_or_else(|| last(call))
}

/// Says that a thing was not given back; there is nothing else to be done about it.
fn told(given: Result<(), VerbsFault>) {
    if let Err(fault) = given {
        tracing::debug!(%fault, "a verbs object was not given back");
    }
}

/// What a device can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceLimits {
    pub(crate) ports: u8,
    pub(crate) work_requests: u32,
    pub(crate) pieces: u32,
    pub(crate) completions: u32,
    pub(crate) region_bytes: u64,
    pub(crate) vendor: u32,
    pub(crate) part: u32,
}

/// An open device.
pub(crate) struct Context {
    raw: NonNull<RawContext>,
    pub(super) library: &'static Library,
}

// SAFETY: verbs may be called from any thread (ibv_open_device(3) and rdma-core's documentation of thread safety).
unsafe impl Send for Context {}
// SAFETY: as above; nothing behind the pointer is changed without the library.
unsafe impl Sync for Context {}

impl Context {
    /// Takes ownership of what `ibv_open_device` gave.
    pub(super) fn open(library: &'static Library, device: *mut raw::RawDevice) -> Result<Arc<Self>, VerbsFault> {
        // SAFETY: a device of the list that the caller holds.
        let raw = made("ibv_open_device", unsafe { (library.functions.open_device)(device) })?;
        Ok(Arc::new(Context { raw, library }))
    }

    pub(super) fn raw(&self) -> *mut RawContext {
        self.raw.as_ptr()
    }

    /// What it can take.
    pub(crate) fn limits(&self) -> Result<DeviceLimits, VerbsFault> {
        let mut attributes = std::mem::MaybeUninit::<raw::RawDeviceAttr>::zeroed();
        // SAFETY: an open context; one structure of this type is written.
        let given = unsafe { (self.library.functions.query_device)(self.raw(), attributes.as_mut_ptr()) };
        check("ibv_query_device", given)?;
        // SAFETY: numbers, zeroed before and written by the call.
        let attributes = unsafe { attributes.assume_init() };
        let positive = |number: c_int| u32::try_from(number).unwrap_or(0);
        Ok(DeviceLimits {
            ports: attributes.ports,
            work_requests: positive(attributes.max_qp_wr),
            pieces: positive(attributes.max_sge),
            completions: positive(attributes.max_cqe),
            region_bytes: attributes.max_mr_size,
            vendor: attributes.vendor,
            part: attributes.part,
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: open until now; whatever was made in it held it.
        told(check("ibv_close_device", unsafe { (self.library.functions.close_device)(self.raw()) }));
    }
}

/// What memory and queues belong to.
pub(crate) struct ProtectionDomain {
    raw: NonNull<RawPd>,
    context: Arc<Context>,
}

// SAFETY: as for `Context`.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as for `Context`.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsFault> {
        // SAFETY: an open context.
        let raw = made("ibv_alloc_pd", unsafe { (context.library.functions.alloc_pd)(context.raw()) })?;
        Ok(Arc::new(ProtectionDomain { raw, context: Arc::clone(context) }))
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: made in `new`; regions and queues hold it and are gone.
        told(check("ibv_dealloc_pd", unsafe { (self.context.library.functions.dealloc_pd)(self.raw.as_ptr()) }));
    }
}

/// A range of memory that the device may read and write, until dropped.
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
    /// Registers memory that the kernel can pin: the host's, or a device's with nvidia-peermem. Takes time by the page.
    ///
    /// # Safety
    /// The range must be mapped and writable during the call, and stay so until every work request that names the
    /// region is done.
    pub(crate) unsafe fn new(domain: &Arc<ProtectionDomain>, start: usize, bytes: usize) -> Result<Self, VerbsFault> {
        let address: *mut c_void = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: our own domain; the range is as the caller promises.
        let raw = unsafe {
            (domain.context.library.functions.register)(domain.raw.as_ptr(), address, bytes, raw::ACCESS_WRITE)
        };
        Ok(Self::of(made("ibv_reg_mr", raw)?, domain))
    }

    /// Registers memory by a dma-buf: `bytes` from `offset` of it on, which work requests name by the addresses from
    /// `start` on.
    pub(crate) fn of_dma_buf(
        domain: &Arc<ProtectionDomain>,
        dma_buf: RawFd,
        offset: u64,
        start: usize,
        bytes: usize,
    ) -> Result<Self, VerbsFault> {
        let Some(register) = domain.context.library.functions.register_dma_buf else {
            return Err(VerbsFault { call: "ibv_reg_dmabuf_mr", errno: libc::ENOSYS });
        };
        // SAFETY: our own domain; whatever the descriptor is, the kernel checks it, and keeps the memory of a dma-buf
        // for as long as the region is there.
        let raw = unsafe { register(domain.raw.as_ptr(), offset, bytes, start as u64, dma_buf, raw::ACCESS_WRITE) };
        Ok(Self::of(made("ibv_reg_dmabuf_mr", raw)?, domain))
    }

    fn of(raw: NonNull<RawMr>, domain: &Arc<ProtectionDomain>) -> Self {
        // SAFETY: a region of the library's, whose keys never change.
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
        // SAFETY: registered in one of the two ways above, given back once. Whoever posts work that names it holds it
        // until that work is done.
        let given = unsafe { (self.domain.context.library.functions.deregister)(self.raw.as_ptr()) };
        told(check("ibv_dereg_mr", given));
    }
}

/// Where completions arrive, and the channel whose descriptor becomes readable when one does that was asked for.
pub(crate) struct CompletionQueue {
    raw: NonNull<RawCq>,
    channel: NonNull<raw::RawChannel>,
    fd: RawFd,
    entries: u32,
    context: Arc<Context>,
}

impl CompletionQueue {
    /// A queue of at least so many entries.
    pub(crate) fn new(context: &Arc<Context>, entries: u32) -> Result<Self, VerbsFault> {
        let functions = &context.library.functions;
        // SAFETY: an open context.
        let channel = made("ibv_create_comp_channel", unsafe { (functions.create_channel)(context.raw()) })?;
        let give_back = |fault| {
            // SAFETY: made above, and nothing uses it.
            told(check("ibv_destroy_comp_channel", unsafe { (functions.destroy_channel)(channel.as_ptr()) }));
            fault
        };
        // SAFETY: a channel of the library's, whose descriptor never changes.
        let fd = unsafe { (*channel.as_ptr()).fd };
        // SAFETY: a descriptor that the channel owns; only its flags are changed.
        let given = unsafe { libc::fcntl(fd, libc::F_SETFL, libc::fcntl(fd, libc::F_GETFL) | libc::O_NONBLOCK) };
        check("fcntl", given).map_err(give_back)?;
        let wanted = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: a context, and a channel of it; vector 0 is always there.
        let raw = unsafe { (functions.create_cq)(context.raw(), wanted, std::ptr::null_mut(), channel.as_ptr(), 0) };
        let raw = made("ibv_create_cq", raw).map_err(give_back)?;
        // SAFETY: a queue of the library's; its size was set when it was made.
        let entries = u32::try_from(unsafe { (*raw.as_ptr()).entries }).unwrap_or(0).max(entries);
        Ok(CompletionQueue { raw, channel, fd, entries, context: Arc::clone(context) })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd
    }

    pub(crate) fn entries(&self) -> u32 {
        self.entries
    }

    /// Takes completions out; how many of `into` were written.
    pub(crate) fn poll(&self, into: &mut [Completion]) -> Result<usize, VerbsFault> {
        let most = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue of an open context; at most as many completions are written as there is room for.
        let given = unsafe {
            let poll = (*(*self.raw.as_ptr()).context).ops.poll_cq.expect("every provider can poll");
            poll(self.raw.as_ptr(), most, into.as_mut_ptr())
        };
        usize::try_from(given).map_err(|_| VerbsFault { call: "ibv_poll_cq", errno: libc::EIO })
    }

    /// Asks for the channel to become readable with the next completion. One that came before this call may not count:
    /// poll once more after it.
    pub(crate) fn arm(&self) -> Result<(), VerbsFault> {
        // SAFETY: the queue of an open context.
        let given = unsafe {
            let arm = (*(*self.raw.as_ptr()).context).ops.request_notify.expect("every provider can notify");
            arm(self.raw.as_ptr(), 0)
        };
        check("ibv_req_notify_cq", given)
    }

    /// Takes the events out of the channel; true if there was one.
    pub(crate) fn take_events(&self) -> bool {
        let functions = &self.context.library.functions;
        let mut taken = 0;
        loop {
            let (mut queue, mut cookie) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: our own channel, which does not block; two pointers are written.
            let given = unsafe { (functions.get_cq_event)(self.channel.as_ptr(), &mut queue, &mut cookie) };
            if given != 0 {
                break;
            }
            taken += 1;
        }
        if taken > 0 {
            // SAFETY: as many events as were taken of the channel's only queue.
            unsafe { (functions.ack_cq_events)(self.raw.as_ptr(), taken) };
        }
        taken > 0
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let functions = &self.context.library.functions;
        // An event that was never taken need not be answered.
        // SAFETY: made in `new`; the queue pair that used it is gone, and every event that was taken is answered.
        told(check("ibv_destroy_cq", unsafe { (functions.destroy_cq)(self.raw.as_ptr()) }));
        // SAFETY: made in `new`; its only queue is gone.
        told(check("ibv_destroy_comp_channel", unsafe { (functions.destroy_channel)(self.channel.as_ptr()) }));
    }
}

/// A reliable connection. It holds the completion queue that its work ends in.
pub(crate) struct QueuePair {
    raw: NonNull<RawQp>,
    number: u32,
    depth: u32,
    pieces: u32,
    destroyed: bool,
    domain: Arc<ProtectionDomain>,
    completions: CompletionQueue,
}

/// Why a chain was not posted whole: what went before this place of it is on its way.
pub(crate) struct PostFault {
    pub(crate) fault: VerbsFault,
    /// The first work request that was not taken.
    pub(crate) first: *mut WorkRequest,
}

impl QueuePair {
    /// A queue for at most `depth` work requests of `pieces` pieces each; fewer where the device has no room.
    pub(crate) fn new(
        domain: &Arc<ProtectionDomain>,
        completions: CompletionQueue,
        depth: u32,
        pieces: u32,
    ) -> Result<Self, VerbsFault> {
        const DEPTH_MIN: u32 = 16;
        let mut wanted = depth.min(completions.entries()).max(1);
        loop {
            match Self::create(domain, &completions, wanted, pieces) {
                // What devices say of their depth is for the smallest work requests.
                Err(fault) if wanted > DEPTH_MIN && matches!(fault.errno, libc::EINVAL | libc::ENOMEM) => wanted /= 2,
                Err(fault) => return Err(fault),
                Ok((raw, granted)) => {
                    // SAFETY: a queue pair of the library's, whose number never changes.
                    let number = unsafe { (*raw.as_ptr()).number };
                    // More may be granted than asked for; what the completion queue holds was asked for.
                    let depth = granted.max_send_wr.min(wanted).max(1);
                    let pieces = granted.max_send_sge.clamp(1, pieces.max(1));
                    let domain = Arc::clone(domain);
                    return Ok(QueuePair { raw, number, depth, pieces, destroyed: false, domain, completions });
                }
            }
        }
    }

    fn create(
        domain: &Arc<ProtectionDomain>,
        completions: &CompletionQueue,
        depth: u32,
        pieces: u32,
    ) -> Result<(NonNull<RawQp>, raw::RawQpCap), VerbsFault> {
        let mut attributes = raw::RawQpInitAttr {
            cookie: std::ptr::null_mut(),
            send_cq: completions.raw.as_ptr(),
            recv_cq: completions.raw.as_ptr(),
            srq: std::ptr::null_mut(),
            cap: raw::RawQpCap {
                max_send_wr: depth,
                max_recv_wr: 1,
                max_send_sge: pieces.max(1),
                max_recv_sge: 1,
                max_inline: 0,
            },
            kind: raw::QP_RELIABLE,
            signal_all: 0,
        };
        let create = domain.context.library.functions.create_qp;
        // SAFETY: our own domain and completion queue, of one context; what was granted is written.
        let raw = made("ibv_create_qp", unsafe { create(domain.raw.as_ptr(), &mut attributes) })?;
        Ok((raw, attributes.cap))
    }

    /// Work requests that may be under way.
    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    /// Pieces of memory that one work request may gather.
    pub(crate) fn pieces(&self) -> u32 {
        self.pieces
    }

    pub(crate) fn completions(&self) -> &CompletionQueue {
        &self.completions
    }

    fn modify(&self, attributes: &mut raw::RawQpAttr, mask: i32) -> Result<(), VerbsFault> {
        if self.destroyed {
            return Err(VerbsFault { call: "ibv_modify_qp", errno: libc::ENODEV });
        }
        // SAFETY: our own queue pair, which is there; the structure is read only.
        let given = unsafe { (self.domain.context.library.functions.modify_qp)(self.raw.as_ptr(), attributes, mask) };
        check("ibv_modify_qp", given)
    }

    /// Connects a queue pair that is reset with itself, along `path`.
    pub(crate) fn connect(&self, path: &Path) -> Result<(), VerbsFault> {
        // Some packet number; both ends are this one.
        const FIRST_PACKET: u32 = 1;
        // 4.096 us * 2^14 = 67 ms, seven times: what loops inside one device is not lost for longer.
        const TIMEOUT: u8 = 14;
        const RETRIES: u8 = 7;
        let mut init = raw::RawQpAttr {
            state: raw::QP_INIT,
            port: path.port,
            access: raw::ACCESS_WRITE as u32,
            ..raw::RawQpAttr::default()
        };
        self.modify(&mut init, mask::STATE | mask::PKEY | mask::PORT | mask::ACCESS)?;
        let mut receive = raw::RawQpAttr {
            state: raw::QP_RECEIVE,
            mtu: path.mtu,
            destination: self.number,
            receive_psn: FIRST_PACKET,
            reads_in: 1,
            rnr_timer: 12,
            address: path.address(),
            ..raw::RawQpAttr::default()
        };
        let receiving = mask::STATE
            | mask::ADDRESS
            | mask::MTU
            | mask::DESTINATION
            | mask::RECEIVE_PSN
            | mask::READS_IN
            | mask::RNR_TIMER;
        self.modify(&mut receive, receiving)?;
        let mut send = raw::RawQpAttr {
            state: raw::QP_SEND,
            timeout: TIMEOUT,
            retries: RETRIES,
            rnr_retries: RETRIES,
            send_psn: FIRST_PACKET,
            reads_out: 1,
            ..raw::RawQpAttr::default()
        };
        let sending =
            mask::STATE | mask::TIMEOUT | mask::RETRIES | mask::RNR_RETRIES | mask::SEND_PSN | mask::READS_OUT;
        self.modify(&mut send, sending)
    }

    /// Ends all work: what was posted completes, with an error.
    pub(crate) fn fail(&self) -> Result<(), VerbsFault> {
        self.modify(&mut raw::RawQpAttr { state: raw::QP_ERROR, ..raw::RawQpAttr::default() }, mask::STATE)
    }

    /// Forgets all work: what was posted does not complete, and touches no memory any more.
    pub(crate) fn reset(&self) -> Result<(), VerbsFault> {
        self.modify(&mut raw::RawQpAttr { state: raw::QP_RESET, ..raw::RawQpAttr::default() }, mask::STATE)
    }

    /// Posts a chain.
    ///
    /// # Safety
    /// `first` must begin a chain of valid work requests that name valid pieces. The memory that they name, and its
    /// regions, must stay until they have completed, or [`reset`](Self::reset) or [`destroy`](Self::destroy) has
    /// succeeded. The chain itself may be reused at once.
    pub(crate) unsafe fn post(&self, first: *mut WorkRequest) -> Result<(), PostFault> {
        assert!(!self.destroyed, "nothing connects a queue pair that is gone");
        let mut bad = std::ptr::null_mut();
        // SAFETY: our own queue pair, of an open context; the chain is as the caller promises.
        let given = unsafe {
            let post = (*(*self.raw.as_ptr()).context).ops.post_send.expect("every provider can send");
            post(self.raw.as_ptr(), first, &mut bad)
        };
        let first = if bad.is_null() { first } else { bad };
        check("ibv_post_send", given).map_err(|fault| PostFault { fault, first })
    }

    /// Gives the queue pair back: when it has succeeded, nothing that was posted touches memory any more.
    pub(crate) fn destroy(&mut self) -> Result<(), VerbsFault> {
        if self.destroyed {
            return Ok(());
        }
        // SAFETY: made in `new`, destroyed once.
        let given = unsafe { (self.domain.context.library.functions.destroy_qp)(self.raw.as_ptr()) };
        check("ibv_destroy_qp", given)?;
        self.destroyed = true;
        Ok(())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        told(self.destroy());
    }
}

/// The name of a completion's status, and what is known to help.
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

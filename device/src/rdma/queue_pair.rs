//! The RAII wrapper of a queue pair, connected to itself. It keeps the objects it depends on alive.

use std::{ptr::NonNull, sync::Arc};

use super::{
    ports::LoopbackPath,
    sys::{self, RawQp, mask},
    verbs::{CompletionQueue, ProtectionDomain, VerbsError, check, log_failure, non_null},
    work::WorkRequest,
};

/// A reliable connection (RC queue pair), with the completion queue of its work.
pub(crate) struct QueuePair {
    raw: NonNull<RawQp>,
    number: u32,
    depth: u32,
    sges: u32,
    destroyed: bool,
    domain: Arc<ProtectionDomain>,
    completions: CompletionQueue,
}

/// A chain that was posted only in part: requests before `first` are in flight.
pub(crate) struct PostError {
    pub(crate) fault: VerbsError,
    /// The first work request that the device refused.
    pub(crate) first: *mut WorkRequest,
}

impl QueuePair {
    /// Makes a queue pair of at most `depth` work requests with `sges` scatter/gather entries each; fewer if the device
    /// has no room.
    pub(crate) fn new(
        domain: &Arc<ProtectionDomain>,
        completions: CompletionQueue,
        depth: u32,
        sges: u32,
    ) -> Result<Self, VerbsError> {
        const DEPTH_MIN: u32 = 16;
        let mut wanted = depth.min(completions.entries()).max(1);
        loop {
            match Self::create(domain, &completions, wanted, sges) {
                // Devices report their depth for the smallest work requests.
                Err(fault) if wanted > DEPTH_MIN && matches!(fault.errno, libc::EINVAL | libc::ENOMEM) => wanted /= 2,
                Err(fault) => return Err(fault),
                Ok((raw, granted)) => {
                    // SAFETY: a queue pair that the library just made; its number never changes.
                    let number = unsafe { (*raw.as_ptr()).number };
                    // The device may grant more than requested, but the completion queue was sized for the request.
                    let depth = granted.max_send_wr.min(wanted).max(1);
                    let sges = granted.max_send_sge.clamp(1, sges.max(1));
                    let domain = Arc::clone(domain);
                    return Ok(QueuePair { raw, number, depth, sges, destroyed: false, domain, completions });
                }
            }
        }
    }

    fn create(
        domain: &Arc<ProtectionDomain>,
        completions: &CompletionQueue,
        depth: u32,
        sges: u32,
    ) -> Result<(NonNull<RawQp>, sys::RawQpCap), VerbsError> {
        let mut attributes = sys::RawQpInitAttr {
            cookie: std::ptr::null_mut(),
            send_cq: completions.raw.as_ptr(),
            recv_cq: completions.raw.as_ptr(),
            srq: std::ptr::null_mut(),
            cap: sys::RawQpCap {
                max_send_wr: depth,
                max_recv_wr: 1,
                max_send_sge: sges.max(1),
                max_recv_sge: 1,
                max_inline: 0,
            },
            kind: sys::QP_RELIABLE,
            signal_all: 0,
        };
        let create = domain.context.library.functions.create_qp;
        // SAFETY: our own domain and completion queue, of one context; the call writes the granted limits.
        let raw = non_null("ibv_create_qp", unsafe { create(domain.raw.as_ptr(), &mut attributes) })?;
        Ok((raw, attributes.cap))
    }

    /// Largest number of work requests in flight.
    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    /// Scatter/gather entries per work request.
    pub(crate) fn sges(&self) -> u32 {
        self.sges
    }

    pub(crate) fn completions(&self) -> &CompletionQueue {
        &self.completions
    }

    fn modify(&self, attributes: &mut sys::RawQpAttr, mask: i32) -> Result<(), VerbsError> {
        if self.destroyed {
            return Err(VerbsError { call: "ibv_modify_qp", errno: libc::ENODEV });
        }
        // SAFETY: our own queue pair, not destroyed; the call only reads the structure.
        let given = unsafe { (self.domain.context.library.functions.modify_qp)(self.raw.as_ptr(), attributes, mask) };
        check("ibv_modify_qp", given)
    }

    /// Connects a queue pair in the reset state to itself along `path`.
    pub(crate) fn connect(&self, path: &LoopbackPath) -> Result<(), VerbsError> {
        // An arbitrary packet number: both ends are this queue pair.
        const FIRST_PACKET: u32 = 1;
        // 4.096 us * 2^14 = 67 ms, seven times: a loopback inside one device never takes longer unless the packet is
        // lost.
        const TIMEOUT: u8 = 14;
        const RETRIES: u8 = 7;
        let mut init = sys::RawQpAttr {
            state: sys::QP_INIT,
            port: path.port,
            access: sys::ACCESS_WRITE as u32,
            ..sys::RawQpAttr::default()
        };
        self.modify(&mut init, mask::STATE | mask::PKEY | mask::PORT | mask::ACCESS)?;
        let mut receive = sys::RawQpAttr {
            state: sys::QP_RECEIVE,
            mtu: path.mtu,
            destination: self.number,
            receive_psn: FIRST_PACKET,
            reads_in: 1,
            rnr_timer: 12,
            address: path.address(),
            ..sys::RawQpAttr::default()
        };
        let receiving = mask::STATE
            | mask::ADDRESS
            | mask::MTU
            | mask::DESTINATION
            | mask::RECEIVE_PSN
            | mask::READS_IN
            | mask::RNR_TIMER;
        self.modify(&mut receive, receiving)?;
        let mut send = sys::RawQpAttr {
            state: sys::QP_SEND,
            timeout: TIMEOUT,
            retries: RETRIES,
            rnr_retries: RETRIES,
            send_psn: FIRST_PACKET,
            reads_out: 1,
            ..sys::RawQpAttr::default()
        };
        let sending =
            mask::STATE | mask::TIMEOUT | mask::RETRIES | mask::RNR_RETRIES | mask::SEND_PSN | mask::READS_OUT;
        self.modify(&mut send, sending)
    }

    /// Moves the queue pair to the error state: posted work completes with an error.
    pub(crate) fn fail(&self) -> Result<(), VerbsError> {
        self.modify(&mut sys::RawQpAttr { state: sys::QP_ERROR, ..sys::RawQpAttr::default() }, mask::STATE)
    }

    /// Moves the queue pair to the reset state: posted work never completes and no longer touches memory.
    pub(crate) fn reset(&self) -> Result<(), VerbsError> {
        self.modify(&mut sys::RawQpAttr { state: sys::QP_RESET, ..sys::RawQpAttr::default() }, mask::STATE)
    }

    /// Posts a chain of work requests.
    ///
    /// # Safety
    /// `first` must begin a chain of valid work requests with valid entries. The memory they name and its regions must
    /// stay until they have completed, or until [`reset`](Self::reset) or [`destroy`](Self::destroy) has succeeded. The
    /// chain itself may be reused at once.
    pub(crate) unsafe fn post(&self, first: *mut WorkRequest) -> Result<(), PostError> {
        assert!(!self.destroyed, "a destroyed queue pair is never posted to");
        let mut bad = std::ptr::null_mut();
        // SAFETY: our own queue pair, of an open context; the caller vouches for the chain.
        let given = unsafe {
            let post = (*(*self.raw.as_ptr()).context).ops.post_send.expect("every provider can send");
            post(self.raw.as_ptr(), first, &mut bad)
        };
        let first = if bad.is_null() { first } else { bad };
        check("ibv_post_send", given).map_err(|fault| PostError { fault, first })
    }

    /// Destroys the queue pair. Once this succeeds, posted work no longer touches memory.
    pub(crate) fn destroy(&mut self) -> Result<(), VerbsError> {
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
        log_failure(self.destroy());
    }
}

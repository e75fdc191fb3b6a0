//! Work requests and their completions, as infiniband/verbs.h (rdma-core) lays them out.

use std::ffi::{c_int, c_uint};

const WR_RDMA_WRITE: c_uint = 0;
/// `IBV_SEND_SIGNALED`.
pub(crate) const SIGNALLED: c_uint = 2;

/// `struct ibv_sge`: a range of registered memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sge {
    pub(crate) address: u64,
    pub(crate) bytes: u32,
    pub(crate) lkey: u32,
}

/// `struct ibv_send_wr`, with the fields of an RDMA operation.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkRequest {
    pub(crate) id: u64,
    pub(crate) next: *mut WorkRequest,
    pub(crate) sges: *mut Sge,
    pub(crate) sge_count: c_int,
    pub(super) opcode: c_uint,
    pub(crate) flags: c_uint,
    pub(super) _immediate: u32,
    pub(crate) remote_address: u64,
    pub(crate) rkey: u32,
    pub(super) _rest: [u64; 9],
}

impl WorkRequest {
    /// An empty RDMA WRITE.
    pub(crate) const WRITE: WorkRequest = WorkRequest {
        id: 0,
        next: std::ptr::null_mut(),
        sges: std::ptr::null_mut(),
        sge_count: 0,
        opcode: WR_RDMA_WRITE,
        flags: 0,
        _immediate: 0,
        remote_address: 0,
        rkey: 0,
        _rest: [0; 9],
    };
}

/// `struct ibv_wc`: the result of a work request.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Completion {
    pub(crate) id: u64,
    pub(crate) status: c_uint,
    pub(crate) opcode: c_uint,
    pub(crate) vendor_error: u32,
    pub(crate) bytes: u32,
    pub(super) _immediate: u32,
    pub(crate) qp: u32,
    pub(super) _source: u32,
    pub(super) _flags: c_uint,
    pub(super) _rest: u64,
}

impl Completion {
    /// An unused entry.
    pub(crate) const NONE: Completion = Completion {
        id: 0,
        status: 0,
        opcode: 0,
        vendor_error: 0,
        bytes: 0,
        _immediate: 0,
        qp: 0,
        _source: 0,
        _flags: 0,
        _rest: 0,
    };
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// Offsets and sizes printed by a C compiler for rdma-core 44's infiniband/verbs.h on x86-64.
    #[test]
    fn structures_are_those_of_the_header() {
        assert_eq!(size_of::<Sge>(), 16);
        assert_eq!(offset_of!(Sge, lkey), 12);
        assert_eq!(size_of::<WorkRequest>(), 128);
        assert_eq!(offset_of!(WorkRequest, sges), 16);
        assert_eq!(offset_of!(WorkRequest, sge_count), 24);
        assert_eq!(offset_of!(WorkRequest, opcode), 28);
        assert_eq!(offset_of!(WorkRequest, flags), 32);
        assert_eq!(offset_of!(WorkRequest, remote_address), 40);
        assert_eq!(offset_of!(WorkRequest, rkey), 48);
        assert_eq!(size_of::<Completion>(), 48);
        assert_eq!(offset_of!(Completion, status), 8);
        assert_eq!(offset_of!(Completion, vendor_error), 16);
        assert_eq!(offset_of!(Completion, qp), 28);
    }
}

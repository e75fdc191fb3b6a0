//! The structures of infiniband/verbs.h (rdma-core) that this crate uses. Their layout is a stable ABI: new fields go
//! to the end, or behind functions.

use std::{
    ffi::{c_int, c_uint, c_void},
    marker::{PhantomData, PhantomPinned},
};

use super::work::{Completion, WorkRequest};

/// Declares types that only the library looks into.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            pub(super) struct $name {
                _opaque: [u8; 0],
                _pinned: PhantomData<(*mut u8, PhantomPinned)>,
            }
        )*
    };
}

opaque! {
    /// `struct ibv_device`.
    RawDevice;
    /// `struct ibv_pd`.
    RawPd;
}

/// `struct ibv_context`, up to the last field used.
#[repr(C)]
pub(super) struct RawContext {
    pub(super) device: *mut RawDevice,
    pub(super) ops: RawOps,
}

/// `struct ibv_context_ops`: the calls that the C header has inline. Entries kept for old programs have no name here.
#[repr(C)]
pub(super) struct RawOps {
    _before_poll: [*const c_void; 11],
    pub(super) poll_cq: Option<unsafe extern "C" fn(*mut RawCq, c_int, *mut Completion) -> c_int>,
    pub(super) request_notify: Option<unsafe extern "C" fn(*mut RawCq, c_int) -> c_int>,
    _before_send: [*const c_void; 12],
    pub(super) post_send: Option<unsafe extern "C" fn(*mut RawQp, *mut WorkRequest, *mut *mut WorkRequest) -> c_int>,
    _rest: [*const c_void; 6],
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawDeviceAttr {
    pub(super) firmware: [u8; 64],
    _guids: [u64; 2],
    pub(super) max_mr_size: u64,
    _page_sizes: u64,
    pub(super) vendor: u32,
    pub(super) part: u32,
    _version: u32,
    _max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    _flags: c_uint,
    pub(super) max_sge: c_int,
    _max_sge_rd: c_int,
    _max_cq: c_int,
    pub(super) max_cqe: c_int,
    pub(super) max_mr: c_int,
    _more: [c_int; 21],
    _max_pkeys: u16,
    _ack_delay: u8,
    pub(super) ports: u8,
    _end: u32,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawPortAttr {
    pub(super) state: c_uint,
    pub(super) max_mtu: c_uint,
    pub(super) active_mtu: c_uint,
    pub(super) gids: c_int,
    _capabilities: u32,
    pub(super) max_message: u32,
    _counters: [u32; 2],
    _pkeys: u16,
    pub(super) lid: u16,
    _sm_lid: u16,
    _lmc_to_physical_state: [u8; 8],
    pub(super) link_layer: u8,
    _flags: u8,
    _capabilities_2: u16,
    // Room for fields of newer library versions.
    _more: [u32; 8],
}

/// `struct ibv_gid_entry`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawGidEntry {
    pub(super) gid: [u8; 16],
    pub(super) index: u32,
    pub(super) port: u32,
    pub(super) kind: u32,
    pub(super) interface: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(super) struct RawMr {
    _context: *mut RawContext,
    _pd: *mut RawPd,
    _address: *mut c_void,
    _length: usize,
    _handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
pub(super) struct RawChannel {
    _context: *mut RawContext,
    pub(super) fd: c_int,
    _references: c_int,
}

/// `struct ibv_cq`, up to the last field used.
#[repr(C)]
pub(super) struct RawCq {
    pub(super) context: *mut RawContext,
    _channel: *mut RawChannel,
    _cookie: *mut c_void,
    _handle: u32,
    pub(super) entries: c_int,
}

/// `struct ibv_qp`, up to the last field used.
#[repr(C)]
pub(super) struct RawQp {
    pub(super) context: *mut RawContext,
    _cookie: *mut c_void,
    _pd: *mut RawPd,
    _queues: [*mut c_void; 3],
    _handle: u32,
    pub(super) number: u32,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RawQpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(super) struct RawQpInitAttr {
    pub(super) cookie: *mut c_void,
    pub(super) send_cq: *mut RawCq,
    pub(super) recv_cq: *mut RawCq,
    pub(super) srq: *mut c_void,
    pub(super) cap: RawQpCap,
    pub(super) kind: c_uint,
    pub(super) signal_all: c_int,
}

/// `struct ibv_ah_attr`, with `struct ibv_global_route` at its start.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct RawAddress {
    pub(super) gid: [u64; 2],
    pub(super) flow_label: u32,
    pub(super) gid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
    pub(super) lid: u16,
    pub(super) service_level: u8,
    pub(super) path_bits: u8,
    pub(super) rate: u8,
    pub(super) is_global: u8,
    pub(super) port: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct RawQpAttr {
    pub(super) state: c_uint,
    pub(super) current_state: c_uint,
    pub(super) mtu: c_uint,
    pub(super) migration: c_uint,
    pub(super) qkey: u32,
    pub(super) receive_psn: u32,
    pub(super) send_psn: u32,
    pub(super) destination: u32,
    pub(super) access: c_uint,
    pub(super) cap: RawQpCap,
    pub(super) address: RawAddress,
    pub(super) alternate_address: RawAddress,
    pub(super) pkey_index: u16,
    pub(super) alternate_pkey_index: u16,
    pub(super) notify_drained: u8,
    pub(super) draining: u8,
    pub(super) reads_out: u8,
    pub(super) reads_in: u8,
    pub(super) rnr_timer: u8,
    pub(super) port: u8,
    pub(super) timeout: u8,
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    pub(super) alternate_port: u8,
    pub(super) alternate_timeout: u8,
    pub(super) rate_limit: u32,
}

/// `IBV_QPT_RC`.
pub(super) const QP_RELIABLE: c_uint = 2;
pub(super) const QP_RESET: c_uint = 0;
pub(super) const QP_INIT: c_uint = 1;
pub(super) const QP_RECEIVE: c_uint = 2;
pub(super) const QP_SEND: c_uint = 3;
pub(super) const QP_ERROR: c_uint = 6;
/// `IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE`.
pub(super) const ACCESS_WRITE: c_int = 3;
/// `IBV_PORT_ACTIVE`.
pub(super) const PORT_ACTIVE: c_uint = 4;
/// `IBV_LINK_LAYER_ETHERNET`.
pub(super) const LINK_ETHERNET: u8 = 2;

/// Bits of `enum ibv_qp_attr_mask`.
pub(super) mod mask {
    pub(crate) const STATE: i32 = 1;
    pub(crate) const ACCESS: i32 = 1 << 3;
    pub(crate) const PKEY: i32 = 1 << 4;
    pub(crate) const PORT: i32 = 1 << 5;
    pub(crate) const ADDRESS: i32 = 1 << 7;
    pub(crate) const MTU: i32 = 1 << 8;
    pub(crate) const TIMEOUT: i32 = 1 << 9;
    pub(crate) const RETRIES: i32 = 1 << 10;
    pub(crate) const RNR_RETRIES: i32 = 1 << 11;
    pub(crate) const RECEIVE_PSN: i32 = 1 << 12;
    pub(crate) const READS_OUT: i32 = 1 << 13;
    pub(crate) const RNR_TIMER: i32 = 1 << 15;
    pub(crate) const SEND_PSN: i32 = 1 << 16;
    pub(crate) const READS_IN: i32 = 1 << 17;
    pub(crate) const DESTINATION: i32 = 1 << 20;
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// Offsets and sizes printed by a C compiler for rdma-core 44's infiniband/verbs.h on x86-64.
    #[test]
    fn structures_are_those_of_the_header() {
        assert_eq!(offset_of!(RawContext, ops), 8);
        assert_eq!(offset_of!(RawOps, poll_cq), 88);
        assert_eq!(offset_of!(RawOps, request_notify), 96);
        assert_eq!(offset_of!(RawOps, post_send), 200);
        assert_eq!(size_of::<RawOps>(), 256);
        assert_eq!(size_of::<RawDeviceAttr>(), 232);
        assert_eq!(offset_of!(RawDeviceAttr, max_mr_size), 80);
        assert_eq!(offset_of!(RawDeviceAttr, vendor), 96);
        assert_eq!(offset_of!(RawDeviceAttr, max_qp_wr), 112);
        assert_eq!(offset_of!(RawDeviceAttr, max_sge), 120);
        assert_eq!(offset_of!(RawDeviceAttr, max_cqe), 132);
        assert_eq!(offset_of!(RawDeviceAttr, max_mr), 136);
        assert_eq!(offset_of!(RawDeviceAttr, ports), 227);
        assert!(size_of::<RawPortAttr>() >= 52);
        assert_eq!(offset_of!(RawPortAttr, gids), 12);
        assert_eq!(offset_of!(RawPortAttr, max_message), 20);
        assert_eq!(offset_of!(RawPortAttr, lid), 34);
        assert_eq!(offset_of!(RawPortAttr, link_layer), 46);
        assert_eq!(offset_of!(RawPortAttr, _capabilities_2), 48);
        assert_eq!(size_of::<RawGidEntry>(), 32);
        assert_eq!(size_of::<RawMr>(), 48);
        assert_eq!(offset_of!(RawMr, lkey), 36);
        assert_eq!(offset_of!(RawMr, rkey), 40);
        assert_eq!(size_of::<RawChannel>(), 16);
        assert_eq!(offset_of!(RawChannel, fd), 8);
        assert_eq!(offset_of!(RawCq, entries), 28);
        assert_eq!(offset_of!(RawQp, number), 52);
    }

    #[test]
    fn structures_of_queue_pairs_are_those_of_the_header() {
        assert_eq!(size_of::<RawQpCap>(), 20);
        assert_eq!(size_of::<RawQpInitAttr>(), 64);
        assert_eq!(offset_of!(RawQpInitAttr, cap), 32);
        assert_eq!(offset_of!(RawQpInitAttr, kind), 52);
        assert_eq!(offset_of!(RawQpInitAttr, signal_all), 56);
        assert_eq!(size_of::<RawQpAttr>(), 144);
        assert_eq!(offset_of!(RawQpAttr, mtu), 8);
        assert_eq!(offset_of!(RawQpAttr, access), 32);
        assert_eq!(offset_of!(RawQpAttr, cap), 36);
        assert_eq!(offset_of!(RawQpAttr, address), 56);
        assert_eq!(offset_of!(RawQpAttr, alternate_address), 88);
        assert_eq!(offset_of!(RawQpAttr, pkey_index), 120);
        assert_eq!(offset_of!(RawQpAttr, reads_out), 126);
        assert_eq!(offset_of!(RawQpAttr, port), 129);
        assert_eq!(offset_of!(RawQpAttr, rate_limit), 136);
        assert_eq!(size_of::<RawAddress>(), 32);
        assert_eq!(offset_of!(RawAddress, flow_label), 16);
        assert_eq!(offset_of!(RawAddress, gid_index), 20);
        assert_eq!(offset_of!(RawAddress, hop_limit), 21);
        assert_eq!(offset_of!(RawAddress, lid), 24);
        assert_eq!(offset_of!(RawAddress, is_global), 29);
        assert_eq!(offset_of!(RawAddress, port), 30);
    }
}

//! Loads libibverbs and finds its functions, once per process.

use std::{
    ffi::{c_char, c_int, c_void},
    sync::OnceLock,
};

use super::sys::{
    RawChannel, RawContext, RawCq, RawDevice, RawDeviceAttr, RawGidEntry, RawMr, RawPd, RawPortAttr, RawQp, RawQpAttr,
    RawQpInitAttr,
};
use crate::dynamic::{Dynamic, functions};

/// The runtime name that every distribution installs; the unversioned name is for linking only.
const NAME: &str = "libibverbs.so.1";

type RegisterDmaBuf = unsafe extern "C" fn(*mut RawPd, u64, usize, u64, c_int, c_int) -> *mut RawMr;
type QueryGidEx = unsafe extern "C" fn(*mut RawContext, u32, u32, *mut RawGidEntry, u32, usize) -> c_int;

functions! {
    /// The libibverbs functions that this crate calls.
    Functions {
        get_device_list = "ibv_get_device_list": fn(*mut c_int) -> *mut *mut RawDevice;
        free_device_list = "ibv_free_device_list": fn(*mut *mut RawDevice);
        get_device_name = "ibv_get_device_name": fn(*mut RawDevice) -> *const c_char;
        open_device = "ibv_open_device": fn(*mut RawDevice) -> *mut RawContext;
        close_device = "ibv_close_device": fn(*mut RawContext) -> c_int;
        query_device = "ibv_query_device": fn(*mut RawContext, *mut RawDeviceAttr) -> c_int;
        query_port = "ibv_query_port": fn(*mut RawContext, u8, *mut RawPortAttr) -> c_int;
        query_gid = "ibv_query_gid": fn(*mut RawContext, u8, c_int, *mut [u8; 16]) -> c_int;
        alloc_pd = "ibv_alloc_pd": fn(*mut RawContext) -> *mut RawPd;
        dealloc_pd = "ibv_dealloc_pd": fn(*mut RawPd) -> c_int;
        register = "ibv_reg_mr": fn(*mut RawPd, *mut c_void, usize, c_int) -> *mut RawMr;
        deregister = "ibv_dereg_mr": fn(*mut RawMr) -> c_int;
        create_channel = "ibv_create_comp_channel": fn(*mut RawContext) -> *mut RawChannel;
        destroy_channel = "ibv_destroy_comp_channel": fn(*mut RawChannel) -> c_int;
        create_cq = "ibv_create_cq": fn(*mut RawContext, c_int, *mut c_void, *mut RawChannel, c_int) -> *mut RawCq;
        destroy_cq = "ibv_destroy_cq": fn(*mut RawCq) -> c_int;
        get_cq_event = "ibv_get_cq_event": fn(*mut RawChannel, *mut *mut RawCq, *mut *mut c_void) -> c_int;
        ack_cq_events = "ibv_ack_cq_events": fn(*mut RawCq, u32);
        create_qp = "ibv_create_qp": fn(*mut RawPd, *mut RawQpInitAttr) -> *mut RawQp;
        modify_qp = "ibv_modify_qp": fn(*mut RawQp, *mut RawQpAttr, c_int) -> c_int;
        destroy_qp = "ibv_destroy_qp": fn(*mut RawQp) -> c_int;
    }
}

/// libibverbs.
pub(crate) struct Library {
    pub(super) functions: Functions,
    /// Since rdma-core 34 (IBVERBS_1.12).
    pub(super) register_dma_buf: Option<RegisterDmaBuf>,
    /// Since rdma-core 33 (IBVERBS_1.11): a GID with its type.
    pub(super) query_gid_ex: Option<QueryGidEx>,
}

impl Library {
    /// Loads the library on the first call. The error names the missing package.
    pub(crate) fn get() -> Result<&'static Library, String> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Library, String> {
        let library = Dynamic::load(&[NAME], "install a newer rdma-core").ok_or_else(|| {
            format!("{NAME} was not found; it comes with rdma-core (package libibverbs1, with ibverbs-providers)")
        })?;
        let functions = Functions::find(&library)?;
        // SAFETY: the types are those of the header.
        let (register_dma_buf, query_gid_ex) =
            unsafe { (library.find("ibv_reg_dmabuf_mr").ok(), library.find("_ibv_query_gid_ex").ok()) };
        Ok(Library { functions, register_dma_buf, query_gid_ex })
    }

    /// Whether it can register memory by dma-buf (rdma-core 34).
    pub(crate) fn has_dma_buf(&self) -> bool {
        self.register_dma_buf.is_some()
    }
}

debug_fields!(Library, library => dma_buf: library.has_dma_buf());

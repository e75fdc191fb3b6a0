//! What a build without the cargo feature `cufile` has in place of the route by libcufile: an engine without values,
//! and the parts of its interface that its callers build.

#![expect(dead_code, reason = "nothing reads what the callers of an engine without values make for it")]

use std::{
    any::Any,
    fs::File,
    sync::{Arc, atomic::AtomicI64},
    time::Duration,
};

use crate::{
    block::{FileId, OpKind, Segment},
    config::CufileMode,
    device::{cuda::Gpu, not_built},
};

/// The reactor's handle to libcufile: none in this build.
pub(crate) enum Cufile {}

pub(crate) struct Part {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    pub(crate) offset: u64,
}

pub(crate) struct Buffer {
    pub(crate) segment: Segment,
    pub(crate) count: usize,
}

pub(crate) struct Setup {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) files: Vec<Arc<File>>,
    pub(crate) mode: CufileMode,
    pub(crate) probe: Part,
    pub(crate) probe_owner: Box<dyn Any + Send>,
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) keep: Arc<dyn Any + Send + Sync>,
    pub(crate) limit: Duration,
    pub(crate) stuck: Arc<AtomicI64>,
}

pub(crate) struct Opened {
    pub(crate) cufile: Cufile,
    pub(crate) evidence: String,
    pub(crate) direct: bool,
}

pub(crate) enum Ended<O> {
    Done(O),
    Failed(O, String),
    Stuck(String),
}

impl Cufile {
    /// # Safety
    /// None: it only says why there is no engine.
    pub(crate) async unsafe fn open(_setup: Setup) -> Result<Opened, String> {
        Err(not_built("cufile"))
    }

    /// # Safety
    /// None: there is no value to call it on.
    pub(crate) async unsafe fn transfer<O: Send + 'static>(
        &self,
        _kind: OpKind,
        _file: FileId,
        _parts: Vec<Part>,
        _owner: O,
    ) -> Ended<O> {
        match *self {}
    }

    pub(crate) fn retire(&self) {
        match *self {}
    }

    pub(crate) async fn close(&self) -> bool {
        match *self {}
    }
}

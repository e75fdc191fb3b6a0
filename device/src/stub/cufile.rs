//! What a build without the cargo feature `cufile` has in place of the route by libcufile: an engine without values.

#![expect(missing_docs, reason = "said in the module that this one stands in for")]

pub use super::transfer::{Buffer, Ended, Part, SelfTest, Setup};

use std::{fs::File, sync::Arc, time::Duration};

use kvhoist_base::block::{FileId, OpKind};

use super::not_built;

/// The reactor's handle to libcufile: none in this build.
pub enum Cufile {}

impl Cufile {
    /// # Safety
    /// None: it only returns the reason why there is no engine.
    pub async unsafe fn open(_setup: Setup) -> Result<(Self, SelfTest), String> {
        Err(not_built("cufile"))
    }

    /// # Safety
    /// None: there is no value to call it on.
    pub async unsafe fn transfer<O: Send + 'static>(
        &self,
        _kind: OpKind,
        _file: FileId,
        _parts: Vec<Part>,
        _owner: O,
    ) -> Ended<O> {
        match *self {}
    }

    pub fn retire(&self) {
        match *self {}
    }

    pub async fn close(&self) -> bool {
        match *self {}
    }
}

/// A file that libcufile reads: none in this build.
pub enum CufileReader {}

impl CufileReader {
    /// # Errors
    /// Always: there is no engine.
    pub fn open(_file: Arc<File>, _limit: Duration) -> Result<Self, String> {
        Err(not_built("cufile"))
    }

    /// # Safety
    /// None: there is no value to call it on.
    ///
    /// # Errors
    /// None.
    pub unsafe fn prove(&self, _address: usize, _len: usize, _offset: u64) -> Result<Option<bool>, String> {
        match *self {}
    }

    /// # Safety
    /// None: there is no value to call it on.
    ///
    /// # Errors
    /// None.
    pub unsafe fn read(&self, _address: usize, _len: usize, _offset: u64) -> Result<usize, String> {
        match *self {}
    }
}

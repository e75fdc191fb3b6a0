//! In the place of the device's half, where it is not compiled in.

use std::{fs::File, sync::Arc, time::Duration};

use kvhoist::internals::memory::Mapping;

use crate::{Error, Result};

/// There is none.
pub(crate) enum Copier {}

/// There is none.
pub(crate) enum Pinned {}

pub(crate) fn pin(_ordinal: u32, _memory: &Mapping) -> Result<Pinned> {
    Err(Error::Device("this build has no support for CUDA devices (cargo feature `cuda`)".into()))
}

impl Copier {
    pub(crate) fn open(_ordinal: u32) -> Result<Self> {
        Err(Error::Device("this build has no support for CUDA devices (cargo feature `cuda`)".into()))
    }

    /// # Safety
    /// Cannot be called.
    pub(crate) unsafe fn to_device(&self, _address: usize, _from: &[u8]) -> Result<()> {
        match *self {}
    }

    /// # Safety
    /// Cannot be called.
    pub(crate) unsafe fn to_host(&self, _to: &mut [u8], _address: usize) -> Result<()> {
        match *self {}
    }

    pub(crate) fn enter(&self) -> Result<()> {
        match *self {}
    }

    pub(crate) fn is_under_way(&self) -> bool {
        match *self {}
    }

    pub(crate) fn mark(&self) -> Result<()> {
        match *self {}
    }

    pub(crate) fn finish(&self) -> Result<()> {
        match *self {}
    }
}

/// There is none.
pub(crate) enum Reader {}

impl Reader {
    pub(crate) fn open(_file: Arc<File>, _limit: Duration) -> std::result::Result<Self, String> {
        Err("this build has no support for CUDA devices (cargo feature `cuda`)".into())
    }

    /// # Safety
    /// Cannot be called.
    pub(crate) unsafe fn prove(&self, _: usize, _: usize, _: u64) -> std::result::Result<Option<bool>, String> {
        match *self {}
    }

    /// # Safety
    /// Cannot be called.
    pub(crate) unsafe fn read(&self, _: usize, _: usize, _: u64) -> std::result::Result<usize, String> {
        match *self {}
    }
}

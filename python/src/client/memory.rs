//! Memory that a client registers with its service.

use std::{
    os::fd::BorrowedFd,
    sync::{Arc, atomic::Ordering},
};

use kvhoist::{DeviceKind, Error, Memory, ServiceFault, block_on};
use kvhoist_service::{Client, ClientRegion};
use pyo3::prelude::*;

use super::PyClient;
use crate::{
    buffer::Buffer,
    errors::{self, io_error},
    region::PyRegion,
};

/// What memory is registered as.
pub(super) enum Kind {
    Host { pin: bool },
    Device,
}

/// The kind of a device that the Python half has checked.
pub(super) fn device_kind(name: &str) -> DeviceKind {
    if name == "simulated" { DeviceKind::Simulated } else { DeviceKind::Cuda }
}

impl PyClient {
    /// Registers memory. The service maps it if it is a memfd that it can map. `kind`: whether the kernel is to pin it,
    /// or the device's.
    pub(super) fn register(
        &self,
        py: Python<'_>,
        buffer: Option<Buffer>,
        (address, nbytes): (usize, usize),
        memfd: Option<(i32, u64)>,
        kind: Kind,
    ) -> PyResult<PyRegion> {
        let opened = self.opened.get(py)?;
        // Not interruptible: an interrupted call would have registered memory without a handle to unregister it.
        let region = py.detach(|| match kind {
            Kind::Host { pin } => register(&opened.client, (address, nbytes), memfd, pin),
            Kind::Device => register_device(&opened.client, (address, nbytes), memfd),
        });
        let region = region.map_err(|error| errors::to_python(py, &error))?;
        let (pinned, copied) = (region.is_pinned(), !region.is_shared());
        let (client, closed) = (opened.client.clone(), Arc::clone(&self.closed));
        let unregister = Box::pin(async move {
            loop {
                // The caller uses the memory again, or frees it, as soon as this ends without an error.
                match client.unregister(&region).await {
                    Err(error @ Error::Service { fault: ServiceFault::Abandoned, .. }) => {
                        if closed.load(Ordering::Acquire) {
                            return end_of_close(&client).await;
                        }
                        tracing::warn!(%error, "a region is waited for");
                    }
                    Ok(()) | Err(Error::Closed) => return Ok(()),
                    Err(error) => {
                        tracing::warn!(%error, "a region could not be unregistered");
                        return Ok(());
                    }
                }
            }
        });
        Ok(PyRegion::of(&opened.registrations, unregister, buffer, (address, nbytes), pinned, copied))
    }
}

/// What a client's close comes to: an error where the service may still use its memory.
pub(super) async fn end_of_close(client: &Client) -> Result<(), Error> {
    match client.close().await {
        Err(Error::Closed) => Ok(()),
        ended => ended,
    }
}

fn register_device(client: &Client, at: (usize, usize), memfd: Option<(i32, u64)>) -> Result<ClientRegion, Error> {
    let start = std::ptr::with_exposed_provenance_mut(at.0);
    let memory = match memfd {
        Some(memfd) => mapped(at, memfd)?,
        // SAFETY: the caller keeps the memory allocated, as documented.
        None => unsafe { Memory::device(start, at.1) },
    };
    block_on(client.register_device(memory))
}

fn register(client: &Client, at: (usize, usize), memfd: Option<(i32, u64)>, pin: bool) -> Result<ClientRegion, Error> {
    if let Some(memfd) = memfd {
        match block_on(client.register(mapped(at, memfd)?.pinned(pin))) {
            Err(Error::Service { fault: ServiceFault::Memory, text }) => {
                tracing::warn!(reason = %text, "memory cannot be shared with the service: its blocks are copied");
            }
            result => return result,
        }
    }
    // SAFETY: a buffer object keeps the memory mapped, or the caller does, as documented.
    let memory = unsafe { Memory::host(std::ptr::with_exposed_provenance_mut(at.0), at.1) };
    block_on(client.register(memory))
}

/// Memory at an address that is mapped from a memfd, from this offset on.
fn mapped((address, nbytes): (usize, usize), (fd, offset): (i32, u64)) -> Result<Memory, Error> {
    // SAFETY: the Python half has looked the descriptor up; it stays open until the call has duplicated it.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let fd = fd.try_clone_to_owned().map_err(|error| io_error("duplicate", "a memfd", error))?;
    // SAFETY: a buffer object keeps the memory mapped, or the caller does, as documented.
    Ok(unsafe { Memory::memfd(fd, offset, std::ptr::with_exposed_provenance_mut(address), nbytes) })
}

//! How a client learns that a service uses its device memory no longer.
//!
//! The kernel may hang up a killed service's connections before the GPU has ended the service's copies. They have ended
//! when the whole process is gone. A service that lives says when it has let go of the memory.

use std::os::fd::OwnedFd;

use tokio::io::{Interest, unix::AsyncFd};

use crate::error::{Error, Result};

/// What a service passes to a client of device memory.
pub(super) struct DeviceEnd {
    /// Readable once the service's process has ended.
    process: AsyncFd<OwnedFd>,
    /// Readable once the service has let go of the client's memory.
    released: AsyncFd<OwnedFd>,
}

impl DeviceEnd {
    /// Of the descriptors that came; `None` where they are not those of a service with a device.
    pub(super) fn new(descriptors: Vec<OwnedFd>) -> Result<Option<Self>> {
        let Ok([process, released]) = <[OwnedFd; 2]>::try_from(descriptors) else { return Ok(None) };
        let watched = |fd: OwnedFd| {
            // SAFETY: the descriptor is open, and the same file, until it is dropped with its owner.
            let watched = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
            watched.map_err(|error| Error::io("wait for", "the end of a service", error.into()))
        };
        Ok(Some(DeviceEnd { process: watched(process)?, released: watched(released)? }))
    }

    /// Resolves when the service uses none of the client's device memory any longer.
    pub(super) async fn wait(&self) {
        // An error is one of the runtime, which has ended.
        tokio::select! { biased;
            _ = self.released.readable() => {}
            _ = self.process.readable() => {}
        }
    }
}

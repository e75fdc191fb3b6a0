//! How a client learns that a service uses its device memory no longer.
//!
//! The kernel may hang up a killed service's connections before the GPU has ended the service's copies. They have ended
//! when the whole process is gone. A service that lives says when it has let go of the memory.

use std::os::fd::OwnedFd;

use tokio::{
    io::{Interest, unix::AsyncFd},
    time::sleep_until,
};

use super::worker::{Dial, Worker};
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

    async fn wait(&self) {
        // An error is one of the runtime, which has ended.
        tokio::select! { biased;
            _ = self.released.readable() => {}
            _ = self.process.readable() => {}
        }
    }
}

impl<D: Dial> Worker<D> {
    /// After the hang-up: waits until the service uses none of this process's device memory. Calls end at their
    /// deadlines meanwhile, as those of a service that hangs do.
    pub(super) async fn device_memory_is_free(&self, end: &DeviceEnd, why: &Error) {
        self.line.hung_up(why.clone());
        let mut free = std::pin::pin!(end.wait());
        loop {
            let until = self.line.wait().until;
            let deadline = async {
                match until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! { biased;
                () = &mut free => return,
                () = self.line.woken.notified() => {}
                () = deadline => {
                    if self.line.late() {
                        return;
                    }
                }
            }
        }
    }
}

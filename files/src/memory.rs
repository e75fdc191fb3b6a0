//! Where the bytes go to or come from.

use crate::{Result, cuda::Copier};

/// Whose memory the addresses of a transfer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Memory {
    /// This process's.
    #[default]
    Host,
    /// A CUDA device's, by its ordinal: addresses in the device's primary context.
    Cuda(u32),
}

/// What copies between a bounce buffer and the addresses of a transfer, for one thread at a time.
pub(crate) enum Copies {
    Host,
    Cuda(Copier),
}

impl Copies {
    pub(crate) fn open(memory: Memory) -> Result<Self> {
        Ok(match memory {
            Memory::Host => Copies::Host,
            Memory::Cuda(ordinal) => Copies::Cuda(Copier::open(ordinal)?),
        })
    }

    /// Copies from host memory to the transfer's. May end later: see [`finish`](Self::finish).
    ///
    /// # Safety
    /// Both ranges stay valid, and nothing else touches them, until `finish` has returned.
    pub(crate) unsafe fn put(&self, address: usize, from: &[u8]) -> Result<()> {
        match self {
            Copies::Host => {
                // SAFETY: the caller vouches for the target; it does not overlap a bounce buffer.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), address as *mut u8, from.len()) };
                Ok(())
            }
            // SAFETY: the caller's promise.
            Copies::Cuda(copier) => unsafe { copier.to_device(address, from) },
        }
    }

    /// Copies from the transfer's memory to host memory. May end later: see [`finish`](Self::finish).
    ///
    /// # Safety
    /// As of [`put`](Self::put).
    pub(crate) unsafe fn get(&self, address: usize, to: &mut [u8]) -> Result<()> {
        match self {
            Copies::Host => {
                // SAFETY: the caller vouches for the source; it does not overlap a bounce buffer.
                unsafe { std::ptr::copy_nonoverlapping(address as *const u8, to.as_mut_ptr(), to.len()) };
                Ok(())
            }
            // SAFETY: the caller's promise.
            Copies::Cuda(copier) => unsafe { copier.to_host(to, address) },
        }
    }

    /// Makes it the calling thread's: each thread that uses it calls this first.
    pub(crate) fn enter(&self) -> Result<()> {
        match self {
            Copies::Host => Ok(()),
            Copies::Cuda(copier) => copier.enter(),
        }
    }

    /// Whether copies have begun that are not known to have ended.
    pub(crate) fn are_under_way(&self) -> bool {
        match self {
            Copies::Host => false,
            Copies::Cuda(copier) => copier.is_under_way(),
        }
    }

    /// Has [`finish`](Self::finish) wait for those copies only that have begun by now: others' may follow.
    pub(crate) fn mark(&self) -> Result<()> {
        match self {
            Copies::Host => Ok(()),
            Copies::Cuda(copier) => copier.mark(),
        }
    }

    /// Waits for all copies that have begun.
    pub(crate) fn finish(&self) -> Result<()> {
        match self {
            Copies::Host => Ok(()),
            Copies::Cuda(copier) => copier.finish(),
        }
    }
}

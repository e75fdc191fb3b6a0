//! Pins the host arena for the device.

use std::{ops::Range, rc::Rc, sync::Arc};

use kvhoist_base::{error::Result, memory::Arena, panics::log};

use crate::cuda::{Gpu, HostPin};

/// The pins of an arena, and its addresses.
pub(super) type Pins = (Rc<Vec<HostPin>>, Range<usize>);

/// Pins all chunks, or none. Chunks are adjacent, and no copy straddles two, so one range describes them.
pub(super) fn pin(gpu: &Arc<Gpu>, arena: &Arc<Arena>) -> Pins {
    let pin = |&(start, bytes): &(_, usize)| {
        // SAFETY: chunks of the arena, mapped as long as it lives.
        unsafe { HostPin::new(Arc::clone(gpu), start, bytes, Arc::clone(arena) as _) }
    };
    match arena.chunks().iter().map(pin).collect::<Result<Vec<_>>>() {
        Ok(pins) => {
            let start = pins.first().map_or(0, |pin| pin.start().as_ptr().addr());
            let bytes: usize = pins.iter().map(HostPin::bytes).sum();
            (Rc::new(pins), start..start + bytes)
        }
        Err(error) => {
            log(|| tracing::warn!(%error, "host memory is not pinned; device copies go through the driver's buffers"));
            (Rc::default(), 0..0)
        }
    }
}

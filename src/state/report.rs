//! What a sync, or the close, says of refused blocks.

use std::sync::Arc;

use super::{Shared, refusals::Moment};
use crate::error::{Error, Result};

/// The reporter of a sync, or of the close: made when that begins.
pub(crate) struct Reporter {
    /// `None` once it has reported.
    shared: Option<Arc<Shared>>,
    began: Moment,
}

impl Reporter {
    /// Reports the refusals that nobody was told of before this sync began; whoever calls this tells.
    pub(crate) fn report(mut self) -> Result<()> {
        let Some(shared) = self.shared.take() else { return Ok(()) };
        let report = shared.lock().refusals.report(self.began);
        let Some((count, last)) = report else { return Ok(()) };
        let blocks = if count == 1 { "block is" } else { "blocks are" };
        Err(Error::Refused {
            reason: format!(
                "{count} {blocks} stored and not on disk, which this reports once; the last because: {last}"
            ),
        })
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take().and_then(Shared::at_home) {
            shared.lock().refusals.end(self.began);
        }
    }
}

impl Shared {
    /// A sync begins, or the close.
    pub(crate) fn begin_report(self: &Arc<Self>) -> Reporter {
        let began = self.lock().refusals.begin();
        Reporter { shared: Some(Arc::clone(self)), began }
    }
}

//! The state of a service, for the program that runs it.

use kvhoist::Stats;
use tokio::sync::{mpsc, oneshot};

use super::protocol::ServiceStatus;
use crate::error::{Error, Result};

/// The state of a service.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServiceReport {
    /// What clients get as well.
    pub status: ServiceStatus,
    /// The spaces that are open, those to which a client has attached since the service started; and those that are not
    /// served, with the reason in [`Stats::disk_retired`].
    pub spaces: Vec<OpenSpace>,
}

/// A space of a service that is open, or not served.
#[derive(Debug, Clone)]
pub struct OpenSpace {
    /// Its name.
    pub namespace: String,
    /// The folder of its store, below each path of the service. No two spaces have the same.
    pub folder: String,
    /// Whether it is served. Of one that is not only the reason is known.
    pub is_served: bool,
    /// The figures of its cache.
    pub stats: Stats,
}

/// Requests for a report, which the service's thread answers.
pub(super) type Asked = mpsc::UnboundedReceiver<oneshot::Sender<ServiceReport>>;

/// Sends requests for a report.
#[derive(Clone)]
pub(super) struct Ask(mpsc::UnboundedSender<oneshot::Sender<ServiceReport>>);

impl Ask {
    pub(super) fn channel() -> (Ask, Asked) {
        let (ask, asked) = mpsc::unbounded_channel();
        (Ask(ask), asked)
    }

    /// The report comes when the service's thread answers.
    pub(super) fn report(&self) -> Result<oneshot::Receiver<ServiceReport>> {
        let (sender, report) = oneshot::channel();
        self.0.send(sender).map_err(|_| Error::Closed)?;
        Ok(report)
    }
}

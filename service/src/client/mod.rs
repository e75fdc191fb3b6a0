//! A client of a node's service, with the calls of [`Cache`](kvhoist::Cache).

mod bounce;
mod calls;
mod connect;
mod hints;
mod lending;
mod line;
mod moves;
mod options;
mod order;
mod places;
mod queries;
mod worker;

pub use calls::Client;
pub use lending::ClientRegion;
pub use moves::ClientLoan;
pub use options::ClientOptions;
#[cfg(feature = "sim")]
pub(super) use {calls::not_started, worker::Worker};

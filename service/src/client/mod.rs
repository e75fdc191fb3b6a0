//! A client of a node's service, with the calls of [`Cache`](kvhoist::Cache).

mod bounce;
mod calls;
mod connect;
mod device_end;
mod hang_up;
mod hints;
mod layers;
mod lending;
mod line;
mod moves;
mod options;
mod order;
mod pins;
mod places;
mod queries;
mod worker;

pub use calls::Client;
pub use lending::ClientRegion;
pub use options::ClientOptions;
pub use pins::Pins;
#[cfg(feature = "sim")]
pub(super) use {calls::not_started, worker::Worker};

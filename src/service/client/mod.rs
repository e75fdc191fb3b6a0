//! A client of a node's service, with the calls of [`Cache`](crate::Cache).

mod bounce;
mod calls;
mod moves;
mod options;
mod places;
mod worker;

pub use calls::{Client, ClientRegion};
pub use moves::ClientLoan;
pub use options::ClientOptions;

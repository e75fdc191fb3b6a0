//! A client of a node's service, with the calls of [`Cache`](crate::Cache).

mod calls;
mod options;
mod places;
mod worker;

pub use calls::{Client, ClientRegion};
pub use options::ClientOptions;

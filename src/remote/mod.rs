//! Stores beyond the node: object stores and Redis.
//!
//! [`RemoteStore`] is what the cache asks of one. The crate `kvhoist-remote` implements it for the services that users
//! name by a URL.

mod store;

pub use store::{Capabilities, Created, Object, Page, RemoteError, RemoteFuture, RemoteStore};

//! Settings of the remote tier.

use std::{fmt, sync::Arc};

use super::choices::RemotePolicy;
use crate::remote::{Capabilities, RemoteStore};

/// Settings of the remote tier: a store beyond the node.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RemoteConfig {
    /// Where the store is: `s3://bucket/prefix` or `redis://host:6379/0`, say, with its parameters. The service and the
    /// Python package open it; a Rust program opens it by the crate `kvhoist-remote`, and gives it as
    /// [`store`](Self::store). Credentials come from the environment and from files. None: no remote tier.
    pub url: Option<String>,
    /// The store itself.
    pub store: Option<RemoteHandle>,
    /// Which blocks are written to the store. Whatever it says, every block of the store is offered.
    pub policy: RemotePolicy,
    /// Bytes that the store may have of this namespace. Beyond that this cache deletes the oldest objects, at its
    /// listings; where the store does not say how old they are, in the order of their names. `None`: it deletes
    /// nothing.
    pub bytes: Option<u64>,
    /// Bytes a second that may be written to the store. At least 1.
    pub upload_bytes_per_s: u64,
    /// Seconds between two listings of the store, by which blocks of other nodes become known. 1 to 86,400.
    pub interval_s: u64,
    /// Milliseconds after which a read or a write of an object has failed, with its repetitions. Callers that wait for
    /// its blocks miss them then, and also past the deadline of callers (`deadline_ms`). 1 to 86,400,000.
    pub deadline_ms: u64,
    /// Microseconds that it takes to compute a block. Where bringing blocks takes longer by the last measurements, the
    /// remote tier offers none, and tries again now and then. At least 1. `None`: it is not compared.
    pub recompute_us: Option<u64>,
    /// Bytes of memory for what is known of the store: 60 to 70 for a block, and some 200 for an object. Objects beyond
    /// that are not offered. At least 65,536.
    pub index_bytes: u64,
    /// Whose the objects are, beside the namespace: in a service, users' spaces may have one name.
    #[doc(hidden)]
    pub owner: String,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        RemoteConfig {
            url: None,
            store: None,
            policy: RemotePolicy::default(),
            bytes: None,
            upload_bytes_per_s: 128 << 20,
            interval_s: 60,
            deadline_ms: 10_000,
            recompute_us: None,
            index_bytes: 1 << 30,
            owner: String::new(),
        }
    }
}

/// A store beyond the node, as settings have it.
#[derive(Clone)]
pub struct RemoteHandle {
    store: Arc<dyn RemoteStore>,
    /// Asked for once: the store's code is users'.
    capabilities: Capabilities,
}

impl RemoteHandle {
    pub(super) fn new(store: Arc<dyn RemoteStore>) -> Self {
        let capabilities = store.capabilities();
        RemoteHandle { store, capabilities }
    }

    pub(crate) fn store(&self) -> Arc<dyn RemoteStore> {
        Arc::clone(&self.store)
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        self.capabilities
    }
}

impl PartialEq for RemoteHandle {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.store, &other.store)
    }
}

impl fmt::Debug for RemoteHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteHandle({})", self.capabilities.scheme)
    }
}

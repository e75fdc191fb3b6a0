//! The options of a client.

use std::time::Duration;

use kvhoist::DeviceKind;

/// Which space a [`Client`](super::Client) attaches to, and how patient it is.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ClientOptions {
    /// The space's name, the namespace of its keys (as [`Config::namespace`](kvhoist::Config::namespace)). Clients with
    /// the same user, name and block size share a space.
    pub namespace: String,
    /// Bytes of every block. 1 B to 1 GiB.
    pub block_bytes: usize,
    /// Attach to the space of this name and block size that all users of the service share, instead of this user's own.
    /// Each of them can replace and remove its blocks.
    pub shared: bool,
    /// Disk for the space, bytes, if this client is the first that attaches to it. 0: all that is left.
    pub capacity_bytes: u64,
    /// Host memory for the space, bytes, if this client is the first since the service started. 0: all that is left.
    pub host_bytes: u64,
    /// The device whose memory clients of the space register ([`register_device`](super::Client::register_device)), or
    /// `None`. The first client since the service started decides.
    /// [`DeviceKind::Cuda`](kvhoist::DeviceKind::Cuda), or [`DeviceKind::Simulated`](kvhoist::DeviceKind::Simulated):
    /// shared memory that plays a device's.
    pub device: Option<DeviceKind>,
    /// The ordinal of the CUDA device in this process.
    pub device_ordinal: u32,
    /// After this calls are answered with [`ServiceFault::Timeout`](kvhoist::ServiceFault::Timeout). Loads and
    /// stores of registered memory begin no more blocks then, and wait for those that the service is moving.
    pub deadline: Duration,
    /// How long they wait for these. After it their memory is given up: the call fails with
    /// [`ServiceFault::Abandoned`](kvhoist::ServiceFault::Abandoned), and so do all later calls that name the
    /// region. [`unregister`](super::Client::unregister) and [`close`](super::Client::close) fail then, too. `None`:
    /// all
    /// of them wait for as long as the connection lasts, for callers that cannot do without their memory.
    pub give_up: Option<Duration>,
    /// Memory of the client's own for blocks whose memory cannot be passed to the service: taken for the first of them,
    /// one block at least. So much of it moves at a time.
    pub bounce_bytes: usize,
    /// The longest time between two attempts to connect.
    pub backoff_max: Duration,
}

impl ClientOptions {
    /// A space with all that the service has left, a deadline of 60 s and as much until memory is given up, 64 MiB to
    /// copy through, an attempt to connect every second.
    pub fn new(namespace: impl Into<String>, block_bytes: usize) -> Self {
        ClientOptions {
            namespace: namespace.into(),
            block_bytes,
            shared: false,
            capacity_bytes: 0,
            host_bytes: 0,
            device: None,
            device_ordinal: 0,
            deadline: Duration::from_secs(60),
            give_up: Some(Duration::from_secs(60)),
            bounce_bytes: 64 << 20,
            backoff_max: Duration::from_secs(1),
        }
    }
}

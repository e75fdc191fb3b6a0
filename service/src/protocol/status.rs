//! Figures of a service, its spaces and its clients: JSON on the wire, so that a figure more is no new version.

use kvhoist::Stats;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::wire::{FRAME_BYTES_MAX, Malformed, Reader, Wire, Writer, malformed};

/// One space.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
pub struct SpaceStatus {
    /// Its name.
    pub namespace: String,
    /// The folder of its store, below each path of the service.
    pub folder: String,
    /// The user that made it.
    pub uid: u32,
    /// Whether all users share it.
    pub shared: bool,
    /// Bytes of every block.
    pub block_bytes: u64,
    /// Disk that it has, bytes.
    pub capacity_bytes: u64,
    /// Host memory that it has, bytes; 0 while it is closed.
    pub host_bytes: u64,
    /// Clients attached to it.
    pub clients: u32,
    /// Its figures since the service opened it; `None` until the first client attaches.
    #[cfg_attr(test, proptest(strategy = "super::tests::stats()"))]
    pub stats: Option<Stats>,
}

/// One connection.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
pub struct ClientStatus {
    /// The service's number for it.
    pub id: u64,
    /// Its process, as the kernel told when it connected.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// The name of its space; empty before it is attached.
    pub namespace: String,
    /// Regions of its memory that the service has mapped.
    pub regions: u32,
    /// Requests that are not replied to yet.
    pub requests: u32,
    /// Bytes of those regions.
    pub region_bytes: u64,
    /// Bytes of blocks that move between its memory and the tiers now.
    pub bytes_in_flight: u64,
}

/// A service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
pub struct ServiceStatus {
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// It takes no more work.
    pub draining: bool,
    /// What keeps spaces from being opened, and is no space's own; `None` once a space was opened.
    pub trouble: Option<String>,
    /// Disk of all spaces, bytes.
    pub capacity_bytes: u64,
    /// Disk that no space has, bytes.
    pub capacity_left: u64,
    /// Host memory of all spaces, bytes.
    pub host_bytes: u64,
    /// Host memory that no space has, bytes.
    pub host_left: u64,
    /// Files that are held.
    pub files: u32,
    /// Host memory of these, bytes.
    pub file_bytes: u64,
    /// Connections that were cut off because of malformed frames or unread replies.
    pub cut_off: u64,
    /// Its paths, as it was given them.
    pub paths: Vec<String>,
    /// Its spaces.
    pub spaces: Vec<SpaceStatus>,
    /// Its connections, including the one of this request.
    pub clients: Vec<ClientStatus>,
}

/// The rest of a body.
fn read<T: DeserializeOwned>(reader: &mut Reader<'_>, what: &'static str) -> Result<T, Malformed> {
    serde_json::from_slice(reader.rest()).map_err(|error| malformed(what, error, "an object of figures, as JSON"))
}

fn json(figures: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(figures).expect("numbers, texts, and maps by texts")
}

impl Wire for Stats {
    fn put(&self, writer: &mut Writer) {
        writer.bytes(&json(self));
    }

    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
        read(reader, what)
    }
}

/// Rows that no frame has room for are left out, of the longer list first.
impl Wire for ServiceStatus {
    fn put(&self, writer: &mut Writer) {
        let (mut text, mut rows) = (json(self), None);
        while text.len() > FRAME_BYTES_MAX {
            let shorter: &mut ServiceStatus = rows.get_or_insert_with(|| self.clone());
            match shorter.clients.len() >= shorter.spaces.len() {
                true => shorter.clients.truncate(shorter.clients.len() / 2),
                false => shorter.spaces.truncate(shorter.spaces.len() / 2),
            }
            text = json(shorter);
        }
        writer.bytes(&text);
    }

    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
        read(reader, what)
    }
}

//! The settings of a service.

use std::path::PathBuf;

use kvhoist::{Config, DiskPath, Layout, WritePolicy};

use super::{budget::Room, shares::Share};
use crate::error::{Error, Result};

/// Settings of a [`Server`](super::Server).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerConfig {
    /// The socket that the service makes for its clients: mode 0600; 0660 with [`socket_group`](Self::socket_group),
    /// and 0666 with [`uids`](Self::uids). The kernel's word on the user and the groups of each process that connects
    /// decides whether it is admitted.
    pub socket: PathBuf,
    /// Folders for the spaces' stores, on one drive each; blocks are striped over them. The same folders in the same
    /// order every time. None: memory only.
    pub paths: Vec<PathBuf>,
    /// Disk for all spaces, bytes.
    pub capacity_bytes: u64,
    /// Host memory for the blocks of all spaces, bytes.
    pub host_bytes: u64,
    /// Whether host memory that no client reserved moves to the spaces that use it most. Otherwise a space has what the
    /// client that opened it asked for.
    pub move_host: bool,
    /// The settings of every space's cache. `block_bytes`, `host_blocks`, `disks` and `namespace` are the
    /// space's own. The write policy is `write_through` or `by_value`. A write budget is that of the whole service:
    /// each space has the same share of it as of [`capacity_bytes`](Self::capacity_bytes).
    pub cache: Config,
    /// Floors and ceilings of the disk and the host memory that tenants get; what no share names is for all others.
    pub shares: Vec<Share>,
    /// Users that may connect beside the service's own.
    pub uids: Vec<u32>,
    /// A group, by name or number, whose members may connect too.
    pub socket_group: Option<String>,
    /// Whether the kernel keeps clients' regions pinned, if a client asks for it
    /// ([`Memory::pinned`](kvhoist::Memory::pinned)).
    pub pin: bool,
    /// Connections at a time. 1 to 4,096. The service's own user has 8 more, which attach to no space.
    pub connections_max: u32,
    /// Requests that one connection may have in flight. 1 to 4,096.
    pub requests_max: u32,
    /// Regions that one connection may have registered. 1 to 4,096.
    pub regions_max: u32,
    /// Bytes of all regions of one connection.
    pub region_bytes_max: u64,
    /// Bytes of all regions of all connections. `None`: half of the address space that the process has left when the
    /// service starts, which is the most. Half of it is divided equally between `connections_max` connections, which
    /// get their part in any case; the other half goes to those that want more, and no user's connections get more of
    /// it than they leave to others.
    pub region_bytes_total_max: Option<u64>,
    /// Regions of all connections, divided in the same way. `None`: a quarter of the mappings that the process has left
    /// (`vm.max_map_count`) when the service starts, which is the most: a region takes up to three.
    pub regions_total_max: Option<u32>,
    /// Bytes of blocks that move for one connection at a time. At least one block moves, whatever its size.
    pub bytes_in_flight_max: u64,
    /// Milliseconds within which a client must read a part of its replies, and a new connection must say hello, before
    /// it is cut off. 1 to 86,400,000.
    pub stall_ms: u64,
    /// Milliseconds without a client after which the service ends by itself: without a connection that has attached to
    /// a space or held a file. `None`: it does not. 1 to 86,400,000.
    pub linger_ms: Option<u64>,
}

impl ServerConfig {
    /// Settings for a service at `socket`, with room for nothing yet: blocks go straight between clients' memory and
    /// disk.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        ServerConfig {
            socket: socket.into(),
            paths: Vec::new(),
            capacity_bytes: 0,
            host_bytes: 0,
            move_host: true,
            cache: Config::default().bypass_host(true),
            shares: Vec::new(),
            uids: Vec::new(),
            socket_group: None,
            pin: true,
            connections_max: 1024,
            requests_max: 128,
            regions_max: 256,
            region_bytes_max: 1 << 40,
            region_bytes_total_max: None,
            regions_total_max: None,
            bytes_in_flight_max: 256 << 20,
            stall_ms: 10_000,
            linger_ms: None,
        }
    }

    /// Checks every field, also those of [`cache`](Self::cache), and against what this process has left; the error
    /// names the first that is wrong.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn validate(&self) -> Result<()> {
        if self.socket.file_name().is_none() {
            return Err(wrong("socket", format!("{:?}", self.socket), "the name of a file in a folder that exists"));
        }
        let limits = [
            ("connections_max", u64::from(self.connections_max), 4096),
            ("requests_max", u64::from(self.requests_max), 4096),
            ("regions_max", u64::from(self.regions_max), 4096),
            ("region_bytes_max", self.region_bytes_max, u64::MAX >> 1),
            ("bytes_in_flight_max", self.bytes_in_flight_max, u64::MAX >> 1),
            ("stall_ms", self.stall_ms, 86_400_000),
            ("linger_ms", self.linger_ms.unwrap_or(1), 86_400_000),
            ("host_bytes", self.host_bytes, u64::MAX >> 1),
            ("capacity_bytes", if self.paths.is_empty() { 1 } else { self.capacity_bytes }, u64::MAX >> 1),
        ];
        for (field, found, max) in limits {
            if found == 0 || found > max {
                return Err(wrong(field, found, format!("1 to {max}")));
            }
        }
        self.check_totals()?;
        if self.paths.len() > 64 {
            return Err(wrong("paths", self.paths.len(), "64 at most"));
        }
        if !matches!(self.cache.disk.write_policy, WritePolicy::WriteThrough | WritePolicy::ByValue) {
            let expected = "write_through or by_value: no client asks for the writes that the others wait for";
            let found = serde_json::to_string(&self.cache.disk.write_policy).expect("a word");
            return Err(wrong("write_policy", found, expected));
        }
        self.smallest_cache().validate()?;
        // Of the smallest space. How large one may be depends on its blocks, which its client chooses.
        let least = DiskPath::file_bytes(1, 1) * self.paths.len() as u64;
        if self.capacity_bytes < least {
            let expected = format!("{least} bytes or more, for one block on each path");
            return Err(wrong("capacity_bytes", format!("{} bytes", self.capacity_bytes), expected));
        }
        let disk = if self.paths.is_empty() { 0 } else { self.capacity_bytes };
        Share::check(&self.shares, disk, self.host_bytes).map_err(|(found, expected)| wrong("shares", found, expected))
    }

    /// The settings of the cache of the smallest space that there may be: where they are wrong, those of every space
    /// are.
    fn smallest_cache(&self) -> Config {
        let block_bytes = self.cache.device.layout.as_ref().map_or(1, Layout::block_bytes);
        let disks = self.paths.first().map(|_| DiskPath::with_blocks("a space", 1));
        let of_space = self.cache.clone().block_bytes(block_bytes).namespace("a space");
        of_space.host_blocks(1).disks(disks.into_iter().collect())
    }

    /// Whether this process can map what clients may lend.
    fn check_totals(&self) -> Result<()> {
        let room = Room::of_process();
        let totals = [
            ("region_bytes_total_max", self.region_bytes_total_max, room.region_bytes(), "address space"),
            ("regions_total_max", self.regions_total_max.map(u64::from), room.regions(), "mappings (vm.max_map_count)"),
        ];
        for (field, found, max, of) in totals {
            if found.unwrap_or(max) == 0 || found > Some(max) {
                let expected = format!("1 to {max}, for the {of} that this process has left");
                return Err(wrong(field, found.unwrap_or(max), expected));
            }
        }
        Ok(())
    }
}

fn wrong(field: &'static str, found: impl ToString, expected: impl Into<String>) -> Error {
    Error::config(field, found, expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_setting_is_named() {
        let good = ServerConfig { host_bytes: 1 << 20, ..ServerConfig::new("socket") };
        good.validate().expect("good");
        let on_disk = ServerConfig { paths: vec!["a".into()], capacity_bytes: 2 << 20, ..good.clone() };
        on_disk.validate().expect("good");
        ServerConfig { capacity_bytes: 100 << 40, ..on_disk.clone() }.validate().expect("drives of 100 TiB");
        type Spoil = fn(&mut ServerConfig);
        let by_value = Config::default().write_policy(WritePolicy::ByValue);
        ServerConfig { cache: by_value, ..on_disk.clone() }.validate().expect("good");
        let layout = Layout::new(vec![4096, 8192]).expect("a layout");
        let cache = Config::default().device_layout(layout);
        ServerConfig { cache, ..on_disk.clone() }.validate().expect("for spaces of such blocks");
        let cases: [(&str, Spoil); 22] = [
            ("socket", |config| config.socket = "".into()),
            ("socket", |config| config.socket = "/".into()),
            ("connections_max", |config| config.connections_max = 5000),
            ("requests_max", |config| config.requests_max = 0),
            ("stall_ms", |config| config.stall_ms = 0),
            ("linger_ms", |config| config.linger_ms = Some(0)),
            ("region_bytes_total_max", |config| config.region_bytes_total_max = Some(1 << 47)),
            ("regions_total_max", |config| config.regions_total_max = Some(u32::MAX)),
            ("host_bytes", |config| config.host_bytes = 0),
            ("capacity_bytes", |config| config.capacity_bytes = 0),
            ("capacity_bytes", |config| config.capacity_bytes = 1 << 20),
            ("write_policy", |config| config.cache.disk.write_policy = WritePolicy::WriteBack),
            ("write_budget", |config| config.cache.disk.write_budget = Some(1 << 40)),
            ("drive_bytes", |config| config.cache.disk.drive_writes_per_day = Some(1.0)),
            ("deadline_ms", |config| config.cache.limits.deadline_ms = 0),
            ("workers", |config| config.cache.workers = Some(1000)),
            ("high_watermark", |config| config.cache.host.high_watermark = 0.05),
            ("spin_us", |config| config.cache.spin_us = 20_000),
            ("movements_max", |config| config.cache.limits.movements_max = 0),
            ("read_bytes_in_flight_max", |config| config.cache.limits.read_bytes_in_flight_max = 0),
            ("blocking_threads", |config| config.cache.disk.blocking_threads = 0),
            ("copy_blocks_max", |config| config.cache.device.copy_blocks_max = 0),
        ];
        for (name, spoil) in cases {
            let mut config = on_disk.clone();
            spoil(&mut config);
            match config.validate() {
                Err(Error::Config { field, .. }) => assert_eq!(field, name),
                other => panic!("{name}: {other:?}"),
            }
        }
    }
}

//! The builder of a cache.

use std::{future::Future, path::PathBuf};

use super::Cache;
use crate::{
    block::Layout,
    config::{Config, DeviceKind, DirectIo, DiskPath, Eviction, StorageKind, WritePolicy},
    error::{Error, Result},
};

/// Builds a [`Config`] from sizes in bytes, and opens it.
#[derive(Debug, Clone, Default)]
pub struct Builder {
    config: Config,
    host_bytes: Option<u64>,
    device_bytes: Option<u64>,
    disks: Vec<(PathBuf, u64)>,
}

impl Builder {
    /// Starts from a configuration.
    pub fn from_config(config: Config) -> Self {
        Builder { config, ..Builder::default() }
    }

    /// Size of every block, bytes.
    #[must_use]
    pub fn block_bytes(mut self, bytes: usize) -> Self {
        self.config.block_bytes = bytes;
        self
    }

    /// Host memory for slots, bytes; rounded down to whole slots.
    #[must_use]
    pub fn host_bytes(mut self, bytes: u64) -> Self {
        self.host_bytes = Some(bytes);
        self
    }

    /// Device memory for slots, bytes; rounded down to whole slots.
    #[must_use]
    pub fn device_bytes(mut self, bytes: u64) -> Self {
        self.device_bytes = Some(bytes);
        self
    }

    /// What the device tier is made of.
    #[must_use]
    pub fn device(mut self, kind: DeviceKind) -> Self {
        self.config.device = kind;
        self
    }

    /// How a block lies in device memory.
    #[must_use]
    pub fn device_layout(mut self, layout: Layout) -> Self {
        self.config.device_layout = Some(layout);
        self
    }

    /// Adds a path to the disk tier, with its bytes for slots; rounded down to whole slots.
    #[must_use]
    pub fn disk(mut self, path: impl Into<PathBuf>, bytes: u64) -> Self {
        self.disks.push((path.into(), bytes));
        self
    }

    /// The name that keys belong to.
    #[must_use]
    pub fn namespace(mut self, name: impl Into<String>) -> Self {
        self.config.namespace = name.into();
        self
    }

    /// When blocks go to disk.
    #[must_use]
    pub fn write_policy(mut self, policy: WritePolicy) -> Self {
        self.config.write_policy = policy;
        self
    }

    /// What host memory and disk give up first.
    #[must_use]
    pub fn eviction_policy(mut self, policy: Eviction) -> Self {
        self.config.eviction_policy = policy;
        self
    }

    /// What serves the disk tier.
    #[must_use]
    pub fn storage(mut self, kind: StorageKind) -> Self {
        self.config.storage = kind;
        self
    }

    /// What to do where a path has no direct I/O.
    #[must_use]
    pub fn direct_io(mut self, direct_io: DirectIo) -> Self {
        self.config.direct_io = direct_io;
        self
    }

    /// The configuration these sizes come to.
    ///
    /// # Errors
    /// [`Error::Config`] for a size that holds no slot, or more than a tier can have.
    pub fn build(self) -> Result<Config> {
        let Builder { mut config, host_bytes, device_bytes, disks } = self;
        config.validate_block_bytes()?;
        let slot_bytes = config.slot_bytes() as u64;
        if let Some(bytes) = host_bytes {
            config.host_blocks = slots("host_blocks", bytes, slot_bytes)?;
        }
        if let Some(bytes) = device_bytes {
            config.device_blocks = slots("device_blocks", bytes, slot_bytes)?;
        }
        for (path, bytes) in disks {
            config.disks.push(DiskPath { path, blocks: slots("disks.blocks", bytes, slot_bytes)? });
        }
        config.validate()?;
        Ok(config)
    }

    /// Opens the cache.
    ///
    /// # Errors
    /// As [`Cache::open`].
    ///
    /// # Cancel safety
    /// As [`Cache::open`].
    pub fn open(self) -> impl Future<Output = Result<Cache>> + Send {
        let config = self.build();
        async move { Cache::open(config?).await }
    }
}

fn slots(field: &'static str, bytes: u64, slot_bytes: u64) -> Result<u32> {
    match u32::try_from(bytes / slot_bytes) {
        Ok(slots) if slots > 0 => Ok(slots),
        _ => Err(Error::Config {
            field,
            found: format!("{bytes} bytes"),
            expected: format!("room for 1 to {} slots of {slot_bytes} bytes", u32::MAX >> 1),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_cannot_be_is_an_error_that_names_its_field() {
        type Set = fn(Builder) -> Builder;
        let cases: [(&str, Set); 8] = [
            ("block_bytes", |builder| builder.block_bytes(usize::MAX)),
            ("block_bytes", |builder| builder.block_bytes(usize::MAX - 4095)),
            ("block_bytes", |builder| builder.block_bytes(0).host_bytes(1 << 20)),
            ("host_blocks", |builder| builder.host_bytes(u64::MAX)),
            ("host_blocks", |builder| builder.host_bytes(0)),
            ("device_blocks", |builder| builder.device_bytes(u64::MAX)),
            ("disks.blocks", |builder| builder.disk("a", u64::MAX)),
            ("disks.blocks", |builder| builder.disk("a", 1 << 46).disk("b", 1 << 46)),
        ];
        for (at, (name, set)) in cases.into_iter().enumerate() {
            match set(Builder::default()).build() {
                Err(Error::Config { field, .. }) => assert_eq!(field, name, "case {at}"),
                other => panic!("case {at}, {name}: {other:?}"),
            }
        }
    }
}

//! Validation: each error names the setting as users write it.

use super::{BUDGET_BLOCKS_MIN, Capacity, Config, DiskPath, WritePolicy, range::check, settings::check_ranges};
use crate::error::{Error, Result};

const SLOTS_MAX: u32 = u32::MAX >> 1;

impl Config {
    /// Validates every field; the error names the first invalid one.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn validate(&self) -> Result<()> {
        // First: the other sizes follow from `block_bytes`.
        check_ranges(self)?;
        if self.namespace.is_empty() || self.namespace.len() > 255 {
            return Err(wrong("namespace", format!("{} bytes", self.namespace.len()), "a name of 1 to 255 bytes"));
        }
        self.validate_host()?;
        self.validate_device()?;
        self.validate_disk()?;
        self.validate_write_budget()?;
        self.validate_remote()
    }

    fn validate_remote(&self) -> Result<()> {
        let remote = &self.remote;
        if let (Some(url), None) = (&remote.url, &remote.store) {
            let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
            let expected = "a store given by `remote_store`, or a build of kvhoist with the cargo feature `remote`";
            return Err(wrong("remote", format!("an URL that begins with {scheme:?}, and no store"), expected));
        }
        Ok(())
    }

    fn validate_host(&self) -> Result<()> {
        self.validate_capacity(["host_bytes", "host_blocks"], self.host.capacity, 1)?;
        let (low, high) = (self.host.low_watermark, self.host.high_watermark);
        if !(0.0..=1.0).contains(&low) {
            return Err(wrong("low_watermark", low, "a share from 0.0 to 1.0"));
        }
        if !(low..=1.0).contains(&high) {
            return Err(wrong("high_watermark", high, format!("a share from low_watermark ({low}) to 1.0")));
        }
        Ok(())
    }

    fn validate_device(&self) -> Result<()> {
        let device = &self.device;
        self.validate_capacity(["device_bytes", "device_blocks"], device.capacity, 0)?;
        if device.gdr_device.as_deref() == Some("") {
            return Err(wrong("gdr_device", "an empty name", "the name of an RDMA device, mlx5_0 say, or none at all"));
        }
        match &device.layout {
            Some(layout) if layout.block_bytes() != self.block_bytes => Err(wrong(
                "device_layout",
                format!("segments of {} bytes in all", layout.block_bytes()),
                format!("block_bytes = {}", self.block_bytes),
            )),
            _ => Ok(()),
        }
    }

    fn validate_disk(&self) -> Result<()> {
        let disk = &self.disk;
        check("disks", disk.paths.len(), 0, 64, "paths")?;
        for path in &disk.paths {
            if path.path.as_os_str().is_empty() {
                return Err(wrong("disks.path", "an empty path", "a directory, a file or a block device"));
            }
            self.validate_path(path)?;
            if disk.paths.iter().filter(|other| other.path == path.path).count() > 1 {
                return Err(wrong("disks.path", format!("{} twice", path.path.display()), "each path once"));
            }
        }
        check("disks.blocks", self.disk_slots(), 0, u64::from(SLOTS_MAX), "slots in all")
    }

    fn validate_write_budget(&self) -> Result<()> {
        let disk = &self.disk;
        let (of_drive, of_bytes) = (disk.drive_writes_per_day, disk.write_budget);
        let (field, found) = match (of_bytes, of_drive, disk.drive_bytes) {
            (None, None, None) => return Ok(()),
            (Some(_), None, None) => ("write_budget", of_bytes.map(|bytes| bytes.to_string())),
            (None, Some(_), Some(_)) => ("drive_writes_per_day", of_drive.map(|writes| writes.to_string())),
            (None, Some(_), None) => return Err(wrong("drive_bytes", "none", "the drive's size in bytes")),
            (None, None, Some(bytes)) => {
                return Err(wrong("drive_bytes", bytes, "drive_writes_per_day with it, or none"));
            }
            (Some(_), ..) => {
                return Err(wrong("write_budget", "and a drive's size or writes", "one budget: either of the two"));
            }
        };
        let found = found.unwrap_or_default();
        if disk.write_policy != WritePolicy::ByValue {
            return Err(wrong(field, found, "`write_policy` by_value with it: no other policy has a budget"));
        }
        if of_drive.is_some_and(|writes| !(writes > 0.0 && writes.is_finite())) {
            return Err(wrong(field, found, "a number of writes above 0"));
        }
        let least = self.write_budget_min();
        if self.write_budget_bytes().is_some_and(|bytes| bytes < least) {
            return Err(wrong(field, found, format!("{least} bytes a day at least, for {BUDGET_BLOCKS_MIN} blocks")));
        }
        Ok(())
    }

    fn validate_path(&self, path: &DiskPath) -> Result<()> {
        let slots = self.path_slots(path);
        match path.capacity {
            Capacity::Blocks(blocks) => check("disks.blocks", blocks, 1, SLOTS_MAX, "slots"),
            Capacity::Bytes(_) if (1..=SLOTS_MAX).contains(&slots) => Ok(()),
            Capacity::Bytes(bytes) => {
                let [least, most] =
                    [1, SLOTS_MAX.into()].map(|slots| DiskPath::file_bytes(slots, self.block_bytes as u64));
                let expected = format!("{least} to {most} bytes, for 1 to {SLOTS_MAX} blocks with their records");
                Err(wrong("disks.bytes", format!("{bytes} bytes"), expected))
            }
        }
    }

    /// `fields`: the names of the setting in bytes and in blocks.
    fn validate_capacity(&self, fields: [&'static str; 2], capacity: Capacity, slots_min: u32) -> Result<()> {
        match capacity {
            Capacity::Blocks(blocks) => check(fields[1], blocks, slots_min, SLOTS_MAX, "slots"),
            Capacity::Bytes(0) if slots_min == 0 => Ok(()),
            Capacity::Bytes(_) if (1..=SLOTS_MAX).contains(&self.slots(capacity)) => Ok(()),
            Capacity::Bytes(bytes) => Err(wrong(
                fields[0],
                format!("{bytes} bytes"),
                format!("room for 1 to {SLOTS_MAX} slots of {} bytes", self.slot_bytes()),
            )),
        }
    }
}

fn wrong(field: &'static str, found: impl ToString, expected: impl Into<String>) -> Error {
    Error::config(field, found, expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_64_mib_makes_a_file_of_64_mib_at_most() {
        for block_bytes in [1, 4096, 64 << 10, 128 << 10, 1 << 20, 8 << 20] {
            let config = Config::default().block_bytes(block_bytes).disk("a", 64 << 20);
            let of = |slots| DiskPath::file_bytes(slots, block_bytes as u64);
            assert!(of(config.disk_slots()) <= 64 << 20 && of(config.disk_slots() + 1) > 64 << 20, "{config:?}");
            config.validate().expect("room");
        }
        let little = Config::default().block_bytes(4096).disk("a", 1 << 20).validate().expect_err("no room");
        assert!(little.to_string().starts_with("disks.bytes: found 1048576 bytes, expected 1052672 to "), "{little}");
    }

    #[test]
    fn the_default_is_valid() {
        Config::default().validate().expect("default");
    }

    #[test]
    fn every_wrong_setting_is_named() {
        type Spoil = fn(Config) -> Config;
        let cases: [(&str, Spoil); 48] = [
            ("remote", |c| c.remote("s3://bucket".to_owned())),
            ("remote_upload_bytes_per_s", |c| c.remote_upload_bytes_per_s(0)),
            ("remote_interval_s", |c| c.remote_interval_s(0)),
            ("remote_deadline_ms", |c| c.remote_deadline_ms(0)),
            ("recompute_us", |c| c.recompute_us(0)),
            ("remote_index_bytes", |c| c.remote_index_bytes(1)),
            ("block_bytes", |c| c.block_bytes(0)),
            ("block_bytes", |c| c.block_bytes((1 << 30) + 1)),
            ("block_bytes", |c| c.block_bytes(usize::MAX)),
            ("block_bytes", |c| c.block_bytes(usize::MAX - 4095)),
            ("block_bytes", |c| c.block_bytes(0).host_bytes(1 << 20)),
            ("host_blocks", |c| c.host_blocks(0)),
            ("host_bytes", |c| c.host_bytes(0)),
            ("host_bytes", |c| c.host_bytes((64 << 10) - 1)),
            ("host_bytes", |c| c.host_bytes(u64::MAX)),
            ("device_blocks", |c| c.device_blocks(u32::MAX)),
            ("device_bytes", |c| c.device_bytes(u64::MAX)),
            ("device_bytes", |c| c.device_bytes(4096)),
            ("copy_blocks_max", |c| c.copy_blocks_max(0)),
            ("gdr_stuck_ms", |c| c.gdr_stuck_ms(0)),
            ("cufile_stuck_ms", |c| c.cufile_stuck_ms(86_400_001)),
            ("selective_hits", |c| c.selective_hits(0)),
            ("blocking_threads", |c| c.blocking_threads(0)),
            ("read_bytes_in_flight_max", |c| c.read_bytes_in_flight_max(0)),
            ("write_bytes_in_flight_max", |c| c.write_bytes_in_flight_max(0)),
            ("movements_max", |c| c.movements_max(0)),
            ("waiters_max", |c| c.waiters_max(0)),
            ("namespace", |c| c.namespace("")),
            ("gdr_device", |c| c.gdr_device(String::new())),
            ("disk_failures_max", |c| c.disk_failures_max(0)),
            ("workers", |c| c.workers(257)),
            ("spin_us", |c| c.spin_us(10_001)),
            ("deadline_ms", |c| c.deadline_ms(0)),
            ("deadline_ms", |c| c.deadline_ms(u64::MAX)),
            ("low_watermark", |c| c.low_watermark(f64::NAN)),
            ("high_watermark", |c| c.high_watermark(0.05)),
            ("write_budget", |c| c.write_budget(u64::MAX)),
            ("write_budget", |c| c.write_policy(WritePolicy::ByValue).write_budget(240 << 16)),
            ("drive_writes_per_day", |c| c.drive_writes_per_day(1.0).drive_bytes(u64::MAX)),
            ("drive_writes_per_day", |c| {
                c.write_policy(WritePolicy::ByValue).drive_writes_per_day(f64::NAN).drive_bytes(u64::MAX)
            }),
            ("drive_bytes", |c| c.drive_writes_per_day(1.0)),
            ("drive_bytes", |c| c.drive_bytes(1 << 40)),
            ("write_budget", |c| c.write_budget(1 << 40).drive_bytes(1 << 40)),
            ("disks.blocks", |c| c.disks(vec![DiskPath::with_blocks("a", 0)])),
            ("disks.bytes", |c| c.disk("a", u64::MAX)),
            ("disks.blocks", |c| c.disk("a", 1 << 46).disk("b", 1 << 46).disk("c", 1 << 46)),
            ("disks.path", |c| c.disks(vec![DiskPath::with_blocks("a", 1); 2])),
            ("disks.path", |c| c.disks(vec![DiskPath::with_blocks("", 1)])),
        ];
        for (at, (name, spoil)) in cases.into_iter().enumerate() {
            match spoil(Config::default()).validate() {
                Err(Error::Config { field, .. }) => assert_eq!(field, name, "case {at}"),
                other => panic!("case {at}, {name}: {other:?}"),
            }
        }
    }
}

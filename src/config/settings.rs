//! Settings by the names that users write: one table for the methods of [`Config`] and for serde.

use std::{path::PathBuf, sync::Arc};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, Error as _, value::MapDeserializer},
};

use super::{
    Capacity, Config, CopyMethod, CopyPrefer, DeviceKind, DirectIo, DiskPath, EngineMode, Eviction, RemotePolicy,
    StorageKind, WritePolicy, range::check, remote::RemoteHandle,
};
use crate::{
    block::Layout,
    error::Result,
    remote::RemoteStore,
    size::{EXPECTED, parse_bytes},
};

/// A day in milliseconds.
const DAY_MS: u64 = 86_400_000;

/// `name(type) => field` sets a field, `name(Option<type>) => field` one that may be `None`. Behind it the range of the
/// values, with their unit, where that is all there is to check. Attributes are serde's.
macro_rules! settings {
    ($(
        $(#[$attribute:meta])*
        $name:ident($($type:tt)+) => $($field:ident).+ $(, $min:literal..=$max:expr, $unit:literal)?;
    )*) => {
        /// The names of all settings.
        pub const SETTING_NAMES: &[&str] =
            &["host_bytes", "host_blocks", "device_bytes", "device_blocks", $(stringify!($name)),*];

        impl Config {
            $(settings! { @setter $name($($type)+) => $($field).+ })*
        }

        /// Checks each setting against its range; the error names the first that is outside.
        pub(super) fn check_ranges(config: &Config) -> Result<()> {
            $(settings! { @check config.$($field).+, $name $(, $min, $max, $unit)? })*
            Ok(())
        }

        /// All settings but those that have two names.
        #[derive(Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        struct Named {
            #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "size_or_none")]
            host_bytes: Option<u64>,
            #[serde(skip_serializing_if = "Option::is_none")]
            host_blocks: Option<u32>,
            #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "size_or_none")]
            device_bytes: Option<u64>,
            #[serde(skip_serializing_if = "Option::is_none")]
            device_blocks: Option<u32>,
            $($(#[$attribute])* $name: settings!(@type $($type)+),)*
        }

        impl From<Config> for Named {
            fn from(config: Config) -> Self {
                let (host_bytes, host_blocks) = split(config.host.capacity);
                let (device_bytes, device_blocks) = split(config.device.capacity);
                Named { host_bytes, host_blocks, device_bytes, device_blocks, $($name: config.$($field).+,)* }
            }
        }

        impl From<Named> for Config {
            fn from(named: Named) -> Self {
                let mut config = Config::default();
                $(config.$($field).+ = named.$name;)*
                config
            }
        }
    };
    (@check $found:expr, $name:ident) => {};
    (@check $found:expr, $name:ident, $min:literal, $max:expr, $unit:literal) => {
        check(stringify!($name), $found, $min, $max, $unit)?;
    };
    (@type Option<$type:ty>) => { Option<$type> };
    (@type $type:ty) => { $type };
    (@setter $name:ident(Option<$type:ty>) => $($field:ident).+) => {
        #[doc = concat!("Sets `", settings!(@path $($field).+), "`; `None` for its default.")]
        #[must_use]
        pub fn $name(mut self, value: impl Into<Option<$type>>) -> Self {
            self.$($field).+ = value.into();
            self
        }
    };
    (@setter $name:ident(String) => $($field:ident).+) => {
        #[doc = concat!("Sets `", settings!(@path $($field).+), "`.")]
        #[must_use]
        pub fn $name(mut self, value: impl Into<String>) -> Self {
            self.$($field).+ = value.into();
            self
        }
    };
    (@setter $name:ident($type:ty) => $($field:ident).+) => {
        #[doc = concat!("Sets `", settings!(@path $($field).+), "`.")]
        #[must_use]
        pub fn $name(mut self, value: $type) -> Self {
            self.$($field).+ = value;
            self
        }
    };
    (@path $field:ident) => { stringify!($field) };
    (@path $group:ident.$field:ident) => { concat!(stringify!($group), ".", stringify!($field)) };
}

settings! {
    #[serde(deserialize_with = "size")]
    block_bytes(usize) => block_bytes, 1..=1 << 30, "bytes";
    namespace(String) => namespace;
    eviction_policy(Eviction) => eviction_policy;
    workers(Option<u32>) => workers, 0..=256, "threads";
    spin_us(u32) => spin_us, 0..=10_000, "microseconds";
    low_watermark(f64) => host.low_watermark;
    high_watermark(f64) => host.high_watermark;
    bypass_host(bool) => host.bypass;
    device(DeviceKind) => device.kind;
    device_ordinal(u32) => device.ordinal;
    device_layout(Option<Layout>) => device.layout;
    copy(Option<CopyMethod>) => device.copy;
    copy_blocks_max(u32) => device.copy_blocks_max, 1..=1024, "thread blocks";
    copy_prefer(CopyPrefer) => device.copy_prefer;
    gdr(EngineMode) => device.gdr;
    gdr_device(Option<String>) => device.gdr_device;
    gdr_stuck_ms(u64) => device.gdr_stuck_ms, 1..=DAY_MS, "milliseconds";
    cufile(EngineMode) => device.cufile;
    cufile_stuck_ms(u64) => device.cufile_stuck_ms, 1..=DAY_MS, "milliseconds";
    disks(Vec<DiskPath>) => disk.paths;
    write_policy(WritePolicy) => disk.write_policy;
    selective_hits(u8) => disk.selective_hits, 1..=u8::MAX, "hits";
    #[serde(deserialize_with = "size_or_none")]
    write_budget(Option<u64>) => disk.write_budget;
    drive_writes_per_day(Option<f64>) => disk.drive_writes_per_day;
    #[serde(deserialize_with = "size_or_none")]
    drive_bytes(Option<u64>) => disk.drive_bytes;
    storage(StorageKind) => disk.storage;
    direct_io(DirectIo) => disk.direct_io;
    blocking_threads(usize) => disk.blocking_threads, 1..=256, "threads";
    quarantine_max(u32) => disk.quarantine_max;
    disk_failures_max(u32) => disk.failures_max, 1..=u32::MAX, "failures in a row";
    remote(Option<String>) => remote.url;
    remote_policy(RemotePolicy) => remote.policy;
    #[serde(deserialize_with = "size_or_none")]
    remote_bytes(Option<u64>) => remote.bytes;
    #[serde(deserialize_with = "size")]
    remote_upload_bytes_per_s(u64) => remote.upload_bytes_per_s, 1..=u64::MAX >> 1, "bytes a second";
    remote_interval_s(u64) => remote.interval_s, 1..=86_400, "seconds";
    remote_deadline_ms(u64) => remote.deadline_ms, 1..=DAY_MS, "milliseconds";
    recompute_us(Option<u64>) => remote.recompute_us, 1..=u64::MAX >> 1, "microseconds";
    #[serde(deserialize_with = "size")]
    remote_index_bytes(u64) => remote.index_bytes, 65_536..=u64::MAX >> 1, "bytes";
    #[serde(deserialize_with = "size")]
    read_bytes_in_flight_max(u64) => limits.read_bytes_in_flight_max, 1..=u64::MAX >> 1, "bytes";
    #[serde(deserialize_with = "size")]
    write_bytes_in_flight_max(u64) => limits.write_bytes_in_flight_max, 1..=u64::MAX >> 1, "bytes";
    movements_max(u32) => limits.movements_max, 1..=1 << 24, "movements";
    waiters_max(u32) => limits.waiters_max, 1..=1 << 24, "waiters";
    background_max(u32) => limits.background_max, 1..=1 << 24, "movements";
    deadline_ms(u64) => limits.deadline_ms, 1..=DAY_MS, "milliseconds";
}

impl Config {
    /// Sets `host.capacity` in bytes.
    #[must_use]
    pub fn host_bytes(mut self, bytes: u64) -> Self {
        self.host.capacity = Capacity::Bytes(bytes);
        self
    }

    /// Sets `host.capacity` in slots.
    #[must_use]
    pub fn host_blocks(mut self, blocks: u32) -> Self {
        self.host.capacity = Capacity::Blocks(blocks);
        self
    }

    /// Sets `device.capacity` in bytes.
    #[must_use]
    pub fn device_bytes(mut self, bytes: u64) -> Self {
        self.device.capacity = Capacity::Bytes(bytes);
        self
    }

    /// Sets `device.capacity` in slots.
    #[must_use]
    pub fn device_blocks(mut self, blocks: u32) -> Self {
        self.device.capacity = Capacity::Blocks(blocks);
        self
    }

    /// Sets `remote.store`.
    #[must_use]
    pub fn remote_store(mut self, store: Arc<dyn RemoteStore>) -> Self {
        self.remote.store = Some(RemoteHandle::new(store));
        self
    }

    /// What errors call the sizes that have a name in slots and one in bytes: the engine counts in slots, and knows
    /// the first only.
    pub(crate) fn names_of_sizes(&self) -> Vec<(&'static str, &'static str)> {
        let in_bytes = |capacity: Capacity| matches!(capacity, Capacity::Bytes(_));
        let all = [
            (in_bytes(self.host.capacity), ("host_blocks", "host_bytes")),
            (in_bytes(self.device.capacity), ("device_blocks", "device_bytes")),
            (self.disk.paths.iter().all(|path| in_bytes(path.capacity)), ("disks.blocks", "disks.bytes")),
        ];
        all.into_iter().filter(|(renamed, _)| *renamed).map(|(_, names)| names).collect()
    }

    /// Adds a path to `disk.paths`, whose file or device has `bytes` at most: blocks and their records. Errors call
    /// them `disks.path` and `disks.bytes`, as those of [`disks`](Self::disks).
    #[must_use]
    pub fn disk(mut self, path: impl Into<PathBuf>, bytes: u64) -> Self {
        self.disk.paths.push(DiskPath::with_bytes(path, bytes));
        self
    }
}

impl Default for Named {
    fn default() -> Self {
        let mut named = Named::from(Config::default());
        // Neither of a setting's two names is given.
        (named.host_blocks, named.device_blocks) = (None, None);
        named
    }
}

impl Serialize for Config {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Named::from(self.clone()).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let named = Named::deserialize(deserializer)?;
        let host = joined(["host_bytes", "host_blocks"], named.host_bytes, named.host_blocks)?;
        let device = joined(["device_bytes", "device_blocks"], named.device_bytes, named.device_blocks)?;
        let mut config = Config::from(named);
        config.host.capacity = host.unwrap_or(config.host.capacity);
        config.device.capacity = device.unwrap_or(config.device.capacity);
        Ok(config)
    }
}

/// A [`DiskPath`] as it is written: with bytes or with blocks.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedPath {
    path: PathBuf,
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "size_or_none")]
    bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    blocks: Option<u32>,
}

impl Serialize for DiskPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (bytes, blocks) = split(self.capacity);
        NamedPath { path: self.path.clone(), bytes, blocks }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for DiskPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let NamedPath { path, bytes, blocks } = NamedPath::deserialize(deserializer)?;
        let capacity = joined(["bytes", "blocks"], bytes, blocks)?;
        let capacity = capacity.ok_or_else(|| D::Error::custom("found no `bytes`, expected it, or `blocks`"))?;
        Ok(DiskPath { path, capacity })
    }
}

/// What the setting `name` takes, for people, by an error of serde's, which names a type.
pub fn expected_by(name: &str, error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    let expected = text.rsplit_once("expected ").map_or(&*text, |(_, expected)| expected);
    let whole = |most: u64| format!("a whole number from 0 to {most}");
    match expected {
        "u8" => whole(u8::MAX.into()),
        "u32" => whole(u32::MAX.into()),
        "u64" | "usize" => whole(u64::MAX),
        "f64" => "a number".into(),
        "a boolean" => "true or false".into(),
        "a string" => "text".into(),
        "path string" => "a path, as text".into(),
        "a sequence" => "a list".into(),
        // The type of a choice, whose words an unknown one brings up.
        "string or map" | "string only" => {
            let none = MapDeserializer::<_, de::value::Error>::new([(name, "")].into_iter());
            let words = Config::deserialize(none).err().map(|error| error.to_string());
            let words = words.as_deref().and_then(|text| text.split_once("``, expected "));
            words.map_or("one of its words, as text".into(), |(_, words)| words.into())
        }
        other => other.into(),
    }
}

/// A number of bytes, or text with a unit.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a positive number of bytes, such as 65536, 64KiB, 1.5MiB, 200Gi or 10GB")]
enum Size {
    Number(u64),
    Text(String),
}

fn size<'de, D: Deserializer<'de>, T: TryFrom<u64>>(deserializer: D) -> Result<T, D::Error> {
    // Formats that do not describe themselves have numbers only.
    let size = if deserializer.is_human_readable() {
        Size::deserialize(deserializer)?
    } else {
        Size::Number(u64::deserialize(deserializer)?)
    };
    let bytes = match &size {
        Size::Number(bytes) => Some(*bytes),
        Size::Text(text) => parse_bytes(text),
    };
    let fitting = bytes.and_then(|bytes| T::try_from(bytes).ok());
    fitting.ok_or_else(|| D::Error::custom(format!("expected {EXPECTED}")))
}

fn size_or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(transparent)]
    struct Bytes(#[serde(deserialize_with = "size")] u64);
    Ok(Option::<Bytes>::deserialize(deserializer)?.map(|Bytes(bytes)| bytes))
}

fn split(capacity: Capacity) -> (Option<u64>, Option<u32>) {
    match capacity {
        Capacity::Bytes(bytes) => (Some(bytes), None),
        Capacity::Blocks(blocks) => (None, Some(blocks)),
    }
}

fn joined<E: serde::de::Error>(
    names: [&str; 2],
    bytes: Option<u64>,
    blocks: Option<u32>,
) -> Result<Option<Capacity>, E> {
    match (bytes, blocks) {
        (Some(_), Some(_)) => Err(E::custom(format!("found both, expected one of `{}` and `{}`", names[0], names[1]))),
        (Some(bytes), None) => Ok(Some(Capacity::Bytes(bytes))),
        (None, blocks) => Ok(blocks.map(Capacity::Blocks)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_numbers_or_text_in_every_setting_of_bytes() {
        let of_bytes: Vec<_> =
            SETTING_NAMES.iter().filter(|name| name.contains("bytes") || **name == "write_budget").collect();
        assert_eq!(of_bytes.len(), 10, "{of_bytes:?}");
        for name in of_bytes {
            let read = |value: &str| serde_json::from_str::<Config>(&format!("{{\"{name}\": {value}}}"));
            let number = read("1572864").expect("a number");
            assert_eq!(read("\"1.5 MiB\"").expect("text"), number, "{name}");
            assert_ne!(number, Config::default(), "{name}");
            for wrong in ["\"10 apples\"", "-1", "1.5", "true", "[1]"] {
                let error = read(wrong).expect_err(wrong);
                let expected = expected_by(name, &error);
                assert!(expected.starts_with("a positive number of bytes"), "{name}: {wrong}: {error}");
            }
        }
        let text = r#"{"disks": [{"path": "/a", "bytes": "1MiB"}]}"#;
        let disks = serde_json::from_str::<Config>(text).expect("a path");
        assert_eq!(disks, Config::default().disk("/a", 1 << 20));
    }
}

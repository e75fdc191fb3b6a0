//! `--config FILE`: settings as the engines' adapters and the Python package take them, in JSON.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use kvhoist::{
    Capacity, Config, DiskPath,
    internals::{
        config::{SETTING_NAMES, expected_by},
        size,
    },
};
use kvhoist_service::Share;
use serde_json::{Map, Value, json};

use crate::{failure::Failure, json, shown::shown};

/// Settings of the engines, and of their adapters, that say nothing about a cache.
const OF_ENGINES: [&str; 16] = [
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
    "revision",
    "pool_shares",
    "service",
    "linger_s",
    "lookup_ms",
    "metrics_port",
];

/// Settings that the files of adapters and of services have beside those of the library.
const OF_ADAPTERS: [&str; 5] = ["path", "capacity", "capacity_total", "keep_in_host", "shares"];

/// What a file of settings says.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The settings of the library, without the paths.
    pub config: Config,
    /// Whether the file says how large a block is.
    pub has_block_bytes: bool,
    /// Folders, files or devices, with `capacity` bytes in all.
    pub paths: Vec<String>,
    /// Bytes on disk, of all paths together.
    pub capacity: Option<u64>,
    /// Whether `capacity` is that of all ranks together (`capacity_total`), and not of each.
    pub is_total: bool,
    /// What the file says of `bypass_host`, or of `keep_in_host`.
    pub bypass_host: Option<bool>,
    /// Shares of the tenants of a service.
    pub shares: Vec<Share>,
}

impl Settings {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Failure::USAGE`], with the setting that is wrong.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let wrong = |what: String| Failure::usage(format!("--config {}: {what}", shown(path)));
        let text = fs::read_to_string(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => wrong("found no such file, expected one with settings in JSON".into()),
            _ => wrong(error.to_string()),
        })?;
        Self::parse(&text).map_err(wrong)
    }

    /// Reads settings that are JSON themselves, or the file that has them: FILE, or @FILE.
    ///
    /// # Errors
    /// [`Failure::USAGE`], with the setting that is wrong.
    pub fn given(given: &str) -> Result<Self, Failure> {
        if !given.trim_start().starts_with(['{', '[']) {
            return Self::read(Path::new(given.strip_prefix('@').unwrap_or(given)));
        }
        Self::parse(given).map_err(|wrong| Failure::usage(format!("--config: {wrong}")))
    }

    /// Checks paths as the engines' adapters do, which run in folders of their engine's choice.
    ///
    /// # Errors
    /// What was found and what was expected.
    pub fn check_paths(&self) -> Result<(), String> {
        if let Some(path) = self.paths.iter().find(|path| !Path::new(path).is_absolute()) {
            return Err(format!("path: found {path:?}, expected an absolute path of a directory, or a list of them"));
        }
        let same =
            |path: &String| fs::canonicalize(path).unwrap_or_else(|_| PathBuf::from(path).components().collect());
        let mut places: Vec<_> = self.paths.iter().map(same).collect();
        places.sort();
        match places.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(format!("path: found {} twice, expected each path once", shown(&pair[0]))),
            None => Ok(()),
        }
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// What was found and what was expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let value = json::parse(text)
            .map_err(|error| format!("expected a JSON object of settings, each of them once: {error}"))?;
        let Value::Object(mut given) = value else {
            return Err("found no object, expected a JSON object of settings".into());
        };
        of_other_engines(&given)?;
        of_sglang(&given)?;
        OF_ENGINES.iter().for_each(|name| drop(given.remove(*name)));
        let paths = paths(given.remove("path"))?;
        let (capacity, is_total) = capacity(&mut given)?;
        keep_in_host(&mut given)?;
        let shares = shares(given.remove("shares"))?;
        known(&given)?;
        match (paths.is_empty(), capacity) {
            (false, None) => return Err("capacity: found nothing, expected the bytes on disk of `path`".into()),
            (true, Some(bytes)) => return Err(format!("path: found nothing, expected what takes {bytes} bytes")),
            (false, _) if given.contains_key("disks") => {
                return Err("disks: found both it and path, expected either of them".into());
            }
            _ => {}
        }
        let has_block_bytes = given.contains_key("block_bytes");
        let says_bypass = given.contains_key("bypass_host");
        let config = engine(given)?;
        let bypass_host = says_bypass.then_some(config.host.bypass);
        Ok(Settings { config, has_block_bytes, paths, capacity, is_total, bypass_host, shares })
    }

    /// Bytes of host memory, if the file has them.
    pub fn host_bytes(&self) -> Option<u64> {
        match self.config.host.capacity {
            Capacity::Bytes(bytes) => Some(bytes),
            Capacity::Blocks(_) => None,
        }
    }

    /// Bytes on disk of one of so many ranks.
    pub fn capacity_of_rank(&self, ranks: u32) -> Option<u64> {
        self.capacity.map(|bytes| if self.is_total { bytes / u64::from(ranks.max(1)) } else { bytes })
    }

    /// Their paths.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.paths.iter().map(PathBuf::from).collect()
    }

    /// The configuration that they come to with blocks of so many bytes.
    ///
    /// # Errors
    /// What has no room for a block.
    pub fn config(&self, block_bytes: usize) -> Result<Config, Failure> {
        let mut config = self.config.clone().block_bytes(block_bytes);
        if let Some(capacity) = self.capacity {
            config.disk.paths = disks("capacity", &self.paths, capacity, block_bytes)?;
        }
        Ok(config)
    }
}

/// As many slots on each path as have room in its share of the bytes. `name`: what the user calls them.
///
/// # Errors
/// [`Failure::USAGE`]: there is no room for a block on each path, or for too many.
pub fn disks(
    name: &'static str,
    paths: &[impl AsRef<Path>],
    capacity: u64,
    block_bytes: usize,
) -> Result<Vec<DiskPath>, Failure> {
    let blocks = DiskPath::blocks_on_each(capacity, paths.len(), block_bytes as u64)
        .map_err(|error| Failure::usage(error.with_settings_named(&[("capacity", name)]).to_string()))?;
    Ok(paths.iter().map(|path| DiskPath::with_blocks(path.as_ref(), blocks)).collect())
}

/// A whole configuration of an engine, which the doctor of the Python package takes apart.
fn of_other_engines(given: &Map<String, Value>) -> Result<(), String> {
    const NAMES: [(&str, &str); 8] = [
        ("kv_connector", "vllm"),
        ("kv_connector_extra_config", "vllm"),
        ("secondary_tiers", "vllm"),
        ("spec_name", "vllm"),
        ("adapter_params", "lmcache"),
        ("type", "lmcache"),
        ("linker", "sglang"),
        ("linker_extra_config", "sglang"),
    ];
    match NAMES.iter().find_map(|(name, engine)| Some((name, engine, given.get(*name)?))) {
        Some((name, engine, value)) => Err(format!(
            "{name}: found {value}, expected path, capacity and other settings of a store; `python -m kvhoist doctor \
             --engine {engine} --config FILE` takes the engine's own"
        )),
        None => Ok(()),
    }
}

/// What SGLang finds the adapter by, and calls it by, where the settings say so.
fn of_sglang(given: &Map<String, Value>) -> Result<(), String> {
    let expected = [("module_path", json!("kvhoist.sglang")), ("class_name", json!("HiCacheKvhoist"))];
    let calls = given.contains_key("class_name").then(|| ("interface_v1", json!(1)));
    for (name, value) in expected.into_iter().filter(|(name, _)| given.contains_key(*name)).chain(calls) {
        if given.get(name) != Some(&value) {
            let found = given.get(name).map_or("nothing".into(), Value::to_string);
            return Err(format!("{name}: found {found}, expected {value}"));
        }
    }
    Ok(())
}

fn paths(given: Option<Value>) -> Result<Vec<String>, String> {
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let found = match &given {
        None => Some(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(text).collect::<Option<Vec<_>>>().filter(|list| !list.is_empty()),
        Some(value) => text(value).map(|path| vec![path]),
    };
    found.ok_or_else(|| format!("path: found {}, expected a path, or a list of at least one", json(given.as_ref())))
}

fn shares(given: Option<Value>) -> Result<Vec<Share>, String> {
    let wrong = |found: &Value| format!("shares: found {found}, expected a list of texts, each {}", Share::EXPECTED);
    let Some(given) = given else { return Ok(Vec::new()) };
    let list = given.as_array().ok_or_else(|| wrong(&given))?;
    list.iter().map(|share| share.as_str().and_then(|text| text.parse().ok()).ok_or_else(|| wrong(share))).collect()
}

/// `capacity`, or `capacity_total` and true.
fn capacity(given: &mut Map<String, Value>) -> Result<(Option<u64>, bool), String> {
    let mut take = |name| given.remove(name).map(|value| bytes(name, &value)).transpose();
    match (take("capacity")?, take("capacity_total")?) {
        (Some(_), Some(total)) => {
            Err(format!("capacity_total: found {total}, expected either it or capacity, which is for one rank"))
        }
        (capacity, None) => Ok((capacity, false)),
        (None, total) => Ok((total, true)),
    }
}

/// `keep_in_host` of SGLang's settings: the contrary of `bypass_host`. A size is true, and stands for `host_bytes`.
fn keep_in_host(given: &mut Map<String, Value>) -> Result<(), String> {
    const NAME: &str = "keep_in_host";
    let Some(value) = given.remove(NAME) else { return Ok(()) };
    if given.contains_key("bypass_host") {
        return Err(format!("{NAME}: found {value}, expected either it or bypass_host, its contrary"));
    }
    let said = value.as_bool().or_else(|| value.as_str()?.parse().ok());
    if said.is_none() {
        if given.contains_key("host_bytes") || given.contains_key("host_blocks") {
            return Err(format!("{NAME}: found {value}, expected true or false beside host_bytes"));
        }
        given.insert("host_bytes".into(), bytes(NAME, &value)?.into());
    }
    given.insert("bypass_host".into(), (said == Some(false)).into());
    Ok(())
}

fn json(value: Option<&Value>) -> String {
    value.map_or_else(String::new, Value::to_string)
}

fn bytes(name: &str, value: &Value) -> Result<u64, String> {
    let found = match value {
        Value::String(text) => size::parse_bytes(text),
        Value::Number(number) => number.as_u64().filter(|&bytes| bytes > 0),
        _ => None,
    };
    found.ok_or_else(|| format!("{name}: found {value}, expected {}", size::EXPECTED))
}

/// Whether all names are those of settings.
fn known(given: &Map<String, Value>) -> Result<(), String> {
    match given.iter().find(|(name, _)| !SETTING_NAMES.contains(&name.as_str())) {
        Some((name, value)) => Err(format!("{name}: found {value}, expected no such setting{}", nearest(name))),
        None => Ok(()),
    }
}

/// The library's own settings, each of which it reads itself.
fn engine(given: Map<String, Value>) -> Result<Config, String> {
    for (name, value) in &given {
        let alone = Map::from_iter([(name.clone(), value.clone())]);
        let read: Result<Config, _> = serde_json::from_value(Value::Object(alone));
        read.map_err(|error| format!("{name}: found {value}, expected {}", expected_by(name, &error)))?;
    }
    serde_json::from_value(Value::Object(given)).map_err(|error| error.to_string())
}

/// The setting that somebody who wrote `name` may have meant.
fn nearest(name: &str) -> String {
    let known = SETTING_NAMES.iter().chain(&OF_ADAPTERS);
    let likeness = |known: &&&str| strsim::jaro_winkler(name, known);
    match known.max_by(|a, b| likeness(a).total_cmp(&likeness(b))) {
        Some(known) if likeness(&known) > 0.8 => format!("; did you mean {known}?"),
        _ => "; docs/reference/settings.md lists all".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_the_python_package_is_understood() {
        let settings = Settings::parse(include_str!("../../python/example.json")).expect("settings");
        assert_eq!((settings.paths.len(), settings.capacity), (2, Some(400 << 30)));
        let config = settings.config(8 << 20).expect("room");
        config.validate().expect("valid");
        assert_eq!((config.host_slots(), config.disk.paths.len()), (128, 2));
        let bytes = DiskPath::file_bytes(config.path_slots(&config.disk.paths[0]).into(), 8 << 20);
        assert!(bytes <= 200 << 30 && bytes > (200 << 30) - (9 << 20), "{bytes}");
    }

    #[test]
    fn settings_of_several_ranks_are_understood() {
        let text = r#"{"path": "/a", "capacity_total": "3TiB", "keep_in_host": "256GiB", "service": "auto"}"#;
        let total = Settings::parse(text).expect("settings");
        assert_eq!((total.capacity_of_rank(8), total.host_bytes()), (Some(384 << 30), Some(256 << 30)));
        let each = Settings::parse(r#"{"path": "/a", "capacity": "3TiB", "keep_in_host": true}"#).expect("settings");
        assert_eq!((each.capacity_of_rank(8), each.capacity_of_rank(1)), (Some(3 << 40), Some(3 << 40)));
    }

    #[test]
    fn keep_in_host_is_the_contrary_of_bypass_host() {
        let cases = [
            (r"{}", None),
            (r#"{"bypass_host": true}"#, Some(true)),
            (r#"{"bypass_host": false}"#, Some(false)),
            (r#"{"keep_in_host": true}"#, Some(false)),
            (r#"{"keep_in_host": "false"}"#, Some(true)),
            (r#"{"keep_in_host": "1GiB"}"#, Some(false)),
        ];
        for (text, bypass) in cases {
            let settings = Settings::parse(text).expect(text);
            assert_eq!((settings.bypass_host, settings.config.host.bypass), (bypass, bypass == Some(true)), "{text}");
        }
    }

    /// What an operator copies from an adapter's configuration, the quick start's `metrics_port` too.
    #[test]
    fn every_setting_of_the_adapters_is_known() {
        let python = include_str!("../../python/kvhoist/_store_settings.py");
        let fields = python.split_once("class StoreSettings:").expect("the class").1;
        let fields = fields.split_once("    def ").expect("its methods").0;
        let names: Vec<_> = fields.lines().filter_map(|line| line.strip_prefix("    ")?.split_once(": ")).collect();
        let names: Vec<_> = names.iter().map(|(name, _)| *name).filter(|name| !name.starts_with(['#', '"'])).collect();
        assert!(names.len() > 15 && names.contains(&"metrics_port"), "{names:?}");
        let known = [&OF_ENGINES[..], &OF_ADAPTERS, SETTING_NAMES].concat();
        let unknown: Vec<_> = names.iter().filter(|name| !known.contains(name)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }

    #[test]
    fn a_wrong_setting_is_named() {
        let cases = [
            (r#"{"kv_connector": "KvhoistConnector"}"#, "kv_connector: found \"KvhoistConnector\", expected path,"),
            (r#"{"type": "plugin", "module_path": "kvhoist.lmcache"}"#, "doctor --engine lmcache --config FILE` takes"),
            (r#"{"linker": "KvhoistLinker"}"#, "`python -m kvhoist doctor --engine sglang"),
            (r#"{"class_name": "HiCacheKvhoist"}"#, "interface_v1: found nothing, expected 1"),
            ("{", "expected a JSON object"),
            ("[]", "found no object"),
            (r#"{"capasity": 1}"#, "capasity: found 1, expected no such setting; did you mean capacity?"),
            (r#"{"write_polcy": "lru"}"#, "; did you mean write_policy?"),
            (r#"{"colour": "red"}"#, "expected no such setting; docs/reference/settings.md lists all"),
            (r#"{"path": "/a", "capacity": "10 apples"}"#, "capacity: found \"10 apples\", expected a positive"),
            (r#"{"path": [], "capacity": 1}"#, "path: found []"),
            (r#"{"path": "/a"}"#, "capacity: found nothing, expected the bytes on disk of `path`"),
            (r#"{"capacity": 5}"#, "path: found nothing, expected what takes 5 bytes"),
            (r#"{"path": "/a", "capcity": "1GiB"}"#, "capcity: found \"1GiB\", expected no such setting; did you mean"),
            (r#"{"path": "/a", "capacity": 5, "disks": []}"#, "disks: found both it and path, expected either"),
            (r#"{"path": "/a", "capacity": 5, "capacity_total": 6}"#, "capacity_total: found 6, expected either"),
            (r#"{"keep_in_host": "1GiB", "host_bytes": 5}"#, "keep_in_host: found \"1GiB\", expected true or false"),
            (r#"{"keep_in_host": true, "bypass_host": true}"#, "keep_in_host: found true, expected either it or"),
            (r#"{"keep_in_host": "much"}"#, "keep_in_host: found \"much\", expected a positive"),
            (r#"{"host_bytes": "1GiB", "host_blocks": 5}"#, "`host_bytes` and `host_blocks`"),
            (r#"{"deadline_ms": "soon"}"#, "deadline_ms: found \"soon\", expected a whole number"),
            (r#"{"write_policy": "never"}"#, "write_policy: found \"never\""),
            (r#"{"block_bytes": -5}"#, "block_bytes: found -5, expected a positive number of bytes, such as"),
            (r#"{"drive_bytes": "big"}"#, "drive_bytes: found \"big\", expected a positive number of bytes, such as"),
            (r#"{"shares": ["a"]}"#, "shares: found \"a\", expected a list of texts, each NAME:disk="),
        ];
        for (text, wanted) in cases {
            let error = Settings::parse(text).expect_err(text);
            assert!(error.contains(wanted), "{text}: {error}");
        }
        let small = Settings::parse(r#"{"path": "/a", "capacity": "1KiB"}"#).expect("settings");
        let memory_only = Settings::parse(r#"{"host_bytes": 4096}"#).expect("settings");
        let refused = memory_only.config(64 << 10).expect("read").validate();
        assert!(matches!(refused, Err(kvhoist::Error::Config { field: "host_bytes", .. })), "{refused:?}");
        assert!(small.config(4 << 10).expect_err("no room").to_string().starts_with("capacity: found 1024"));
    }
}

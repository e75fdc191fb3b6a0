//! `--config FILE`: settings as the engines' adapters and the Python package take them, in JSON.

use std::{
    fs::{self, File},
    io::{ErrorKind, Read},
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

use crate::{
    failure::Failure,
    json,
    shown::{reason, shown},
};

/// Most bytes of a file of settings, which as a rule has some hundred.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Settings of the engines, and of their adapters, that say nothing about a cache.
const OF_ENGINES: [&str; 20] = [
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
    "file_storage_path",
    "key_scheme",
    "head_group",
    "layer_partition",
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
    /// Settings of an engine in the file, which say nothing about a cache.
    pub of_engine: Vec<&'static str>,
}

impl Settings {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Failure::USAGE`], with the setting that is wrong.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let wrong = |what: String| Failure::usage(format!("--config {}: {what}", shown(path)));
        text(path).and_then(|text| Self::parse(&text)).map_err(wrong)
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
        let value = json::parse(text).map_err(|error| {
            let found = if error.is_data() { "a setting twice" } else { "no JSON" };
            format!("found {found} ({error}), expected a JSON object of settings, each of them once")
        })?;
        let Value::Object(mut given) = value else {
            return Err("found no object, expected a JSON object of settings".into());
        };
        of_other_engines(&given)?;
        of_sglang(&given)?;
        let of_engine = OF_ENGINES.into_iter().filter(|name| given.remove(*name).is_some()).collect();
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
        Ok(Settings { config, has_block_bytes, paths, capacity, is_total, bypass_host, shares, of_engine })
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

/// What a file of settings has, or what was found in its place.
fn text(path: &Path) -> Result<String, String> {
    let wrong = |found: &str| format!("{found}, expected a file with settings in JSON");
    let mut bytes = Vec::new();
    // What is no file may never end.
    let read = File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
    read.map_err(|error| match error.kind() {
        ErrorKind::NotFound => wrong("found no such file"),
        ErrorKind::IsADirectory => wrong("found a directory"),
        _ => wrong(&format!("cannot be read ({})", reason(&error))),
    })?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(wrong(&format!("found more than {FILE_BYTES_MAX} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| wrong("found bytes that are no text"))
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
mod tests;

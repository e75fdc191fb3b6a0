use super::*;

#[test]
fn the_example_of_the_python_package_is_understood() {
    let settings = Settings::parse(include_str!("../../../python/example.json")).expect("settings");
    assert_eq!((settings.paths.len(), settings.capacity), (2, Some(400 << 30)));
    let config = settings.config(8 << 20).expect("room");
    config.validate().expect("valid");
    assert_eq!((config.host_slots(), config.disk.paths.len()), (128, 2));
    let bytes = DiskPath::file_bytes(config.path_slots(&config.disk.paths[0]).into(), 8 << 20);
    assert!(bytes <= 200 << 30 && bytes > (200 << 30) - (9 << 20), "{bytes}");
}

#[test]
fn what_is_no_file_of_settings_is_said_in_words() {
    let place = tempfile::tempdir().expect("a directory");
    let (folder, binary) = (place.path().to_owned(), place.path().join("binary"));
    fs::write(&binary, [0xff; 100]).expect("written");
    for (path, found) in [
        (&folder.join("none"), "found no such file"),
        (&folder, "found a directory"),
        (&binary, "found bytes that are no text"),
        (&PathBuf::from("/dev/zero"), "found more than 1048576 bytes"),
    ] {
        let refused = Settings::read(path).expect_err(found).to_string();
        let wanted = format!("--config {}: {found}, expected a file with settings in JSON", path.display());
        assert_eq!(refused, wanted);
    }
}

#[test]
fn what_is_no_object_of_settings_is_said_in_words() {
    for (text, found) in [
        ("", "no JSON (EOF while parsing a value at line 1 column 0)"),
        (r#"{"path": "/a" "#, "no JSON (EOF while parsing an object at line 1 column 14)"),
        (r#"{"workers": 1, "workers": 2}"#, "a setting twice (`workers` twice at line 1 column 24)"),
    ] {
        let refused = Settings::parse(text).map(drop).expect_err(found);
        assert_eq!(refused, format!("found {found}, expected a JSON object of settings, each of them once"));
    }
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
    let python = include_str!("../../../python/kvhoist/_store_settings.py");
    let fields = python.split_once("class StoreSettings:").expect("the class").1;
    let fields = fields.split_once("    def ").expect("its methods").0;
    let names: Vec<_> = fields.lines().filter_map(|line| line.strip_prefix("    ")?.split_once(": ")).collect();
    let names: Vec<_> = names.iter().map(|(name, _)| *name).filter(|name| !name.starts_with(['#', '"'])).collect();
    assert!(names.len() > 15 && names.contains(&"metrics_port"), "{names:?}");
    // SGLang's own, and those of its names of pages.
    let python = include_str!("../../../python/kvhoist/sglang/settings.py");
    let own = python.split_once("SGLANG_KEYS = frozenset(").expect("the keys").1.split_once(".split()").expect("one").0;
    let own = own.split(|at: char| at != '_' && !at.is_alphanumeric()).filter(|name| !name.is_empty());
    let scheme = python.split_once("class KeyScheme").expect("the class").1.split_once("\n\n\n").expect("its end").0;
    let scheme = scheme.lines().filter_map(|line| Some(line.trim().split_once(": int | None")?.0));
    let names: Vec<_> = names.into_iter().chain(own).chain(scheme).chain(["key_scheme"]).collect();
    assert!(names.contains(&"file_storage_path") && names.contains(&"head_group"), "{names:?}");
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

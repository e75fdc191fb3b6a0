//! Settings that no space could have: refused at the start, and not to every client.

use std::{fs, path::Path};

use kvhoist::block_on;
use kvhoist_service::{Client, ClientOptions};
use serde_json::json;

use super::{BLOCK_BYTES, kvhoist, served, stores, text};

/// The line of a service that is refused for a flag or a setting. One that starts ends by itself.
fn refused(place: &Path, flags: &[&str]) -> String {
    let socket = place.join("s").display().to_string();
    let output = kvhoist(&[&["serve", "--linger", "1", "--socket", &socket][..], flags].concat());
    let said = text(&output.stderr).to_owned();
    assert_eq!(output.status.code(), Some(2), "{flags:?}: {said}");
    said
}

#[test]
fn wrong_settings_of_every_cache_are_refused_by_their_names_in_flags_and_in_the_file() {
    let (place, store) = (tempfile::tempdir().expect("a directory"), stores());
    let path = store.path().display().to_string();
    let sizes = ["--path", &path, "--capacity", "60MiB", "--host-bytes", "64MiB"];
    let budget = refused(place.path(), &[&sizes[..], &["--write-budget", "1TiB"]].concat());
    let wanted = "kvhoist: --write-budget: found 1099511627776, expected `--write-policy` by_value with it";
    assert!(budget.contains(wanted), "{budget}");
    let file = place.path().join("settings.json").display().to_string();
    for (name, value, found) in [
        ("write_policy", json!("write_back"), "\"write_back\", expected write_through or by_value"),
        ("write_budget", json!("1TiB"), "1099511627776, expected `write_policy` by_value with it"),
        ("drive_writes_per_day", json!(1.0), ""),
        ("deadline_ms", json!(0), "0, expected 1 to 86400000 milliseconds"),
        ("workers", json!(1000), "1000, expected 0 to 256 threads"),
        ("high_watermark", json!(0.05), "0.05, expected a share from low_watermark (0.1) to 1.0"),
        ("spin_us", json!(20_000), "20000, expected 0 to 10000 microseconds"),
        ("movements_max", json!(0), "0, expected 1 to 16777216 movements"),
        ("read_bytes_in_flight_max", json!(0), ""),
        ("blocking_threads", json!(0), "0, expected 1 to 256 threads"),
        ("disk_failures_max", json!(0), "0, expected 1 to "),
        ("copy_blocks_max", json!(0), "0, expected 1 to 1024 thread blocks"),
        ("capacity", json!("1MiB"), "1048576 bytes, expected 1052672 bytes or more"),
    ] {
        let mut settings = json!({ "path": path, "capacity": "60MiB", "host_bytes": "64MiB" });
        settings[name] = value;
        fs::write(&file, settings.to_string()).expect("written");
        let said = refused(place.path(), &["--config", &file]);
        let field = if name == "drive_writes_per_day" { "drive_bytes" } else { name };
        let is_size_without_words = name == "read_bytes_in_flight_max";
        let wanted = format!("--config {file}: {field}: found {found}");
        let by_reader = format!("--config {file}: {field}: found 0, expected ");
        assert!(said.contains(&wanted) || is_size_without_words && said.contains(&by_reader), "{wanted} in {said}");
    }
    // A flag that is wrong is the flag's, whatever the file says.
    fs::write(&file, json!({ "path": path, "capacity": "1MiB", "host_bytes": "64MiB" }).to_string()).expect("written");
    let said = refused(place.path(), &["--config", &file, "--capacity", "1KiB"]);
    assert!(said.contains("kvhoist: --capacity: found 1024 bytes"), "{said}");
    assert_eq!(fs::read_dir(store.path()).expect("there").count(), 0, "nothing is made");
}

/// As an engine's file has them, from which an operator takes the service's.
#[test]
fn settings_by_which_an_engine_starts_a_service_are_warned_of() {
    let (place, store) = (tempfile::tempdir().expect("a directory"), stores());
    let file = place.path().join("settings.json");
    let mut settings = json!({ "path": store.path(), "capacity": "60MiB", "host_bytes": "64MiB" });
    for (name, value) in [("linger_s", json!(60)), ("metrics_port", json!(0)), ("service", json!("auto"))] {
        settings[name] = value;
    }
    fs::write(&file, settings.to_string()).expect("written");
    let (_, log) = served(place.path(), &["--config", &file.display().to_string(), "--linger", "60"], |_| ());
    assert!(log.contains("found metrics_port, which has no effect on a service; give it --http instead"), "{log}");
    // What a flag says is no loss.
    assert!(!log.contains("found linger_s") && !log.contains("found service"), "{log}");
}

/// A space's file is below the path that was the first when it was made.
#[test]
fn paths_in_another_order_than_their_spaces_are_refused() {
    let (place, first, second) = (tempfile::tempdir().expect("a directory"), stores(), stores());
    let [first, second] = [first.path(), second.path()].map(|path| path.display().to_string());
    let sizes = ["--capacity", "60MiB", "--host-bytes", "8MiB", "--direct-io", "prefer"];
    let (socket, _) = served(place.path(), &[&["--path", &first, "--path", &second][..], &sizes].concat(), |socket| {
        let client = block_on(Client::connect(socket, ClientOptions::new("model", BLOCK_BYTES))).expect("connected");
        block_on(client.close()).expect("closed");
    });
    let swapped = refused(place.path(), &[&["--path", &second, "--path", &first][..], &sizes].concat());
    assert!(
        swapped.contains(&format!("--path: found {first} after {second}, and the file of a space, {first}/space-"))
    );
    assert!(!Path::new(&socket).exists(), "{swapped}");
    // Where each has been the first, no order is right, and the spaces of either are served.
    let model = fs::read_dir(&first).expect("a folder").map(|entry| entry.expect("an entry").path());
    let model = model.filter(|path| path.join("space").exists()).collect::<Vec<_>>();
    let [model] = &model[..] else { panic!("{model:?}") };
    let other = Path::new(&second).join("space-000000000000000000000000");
    fs::create_dir(&other).expect("made");
    fs::copy(model.join("space"), other.join("space")).expect("copied");
    let (_, log) = served(place.path(), &[&["--path", &first, "--path", &second][..], &sizes].concat(), |_| ());
    assert!(log.contains("another path first") && log.contains(&other.display().to_string()), "{log}");
}

/// A refused attach is the operator's to know too: of some of them only a setting of the service is the cause.
#[test]
fn a_client_that_is_refused_a_space_is_in_the_log() {
    let (place, store) = (tempfile::tempdir().expect("a directory"), stores());
    let path = store.path().display().to_string();
    let sizes = ["--path", &path, "--capacity", "20GiB", "--host-bytes", "8MiB", "--direct-io", "prefer"];
    let budget = ["--write-policy", "by_value", "--write-budget", "20GiB"];
    let (_, log) = served(place.path(), &[&sizes[..], &budget].concat(), |socket| {
        let mut options = ClientOptions::new("small", 1 << 20);
        options.capacity_bytes = 64 << 20;
        let refused = block_on(Client::connect(socket, options.clone())).expect_err("too small a part of the budget");
        let said = refused.to_string();
        assert!(matches!(refused, kvhoist::Error::Service { fault: kvhoist::ServiceFault::Capacity, .. }), "{said}");
        assert!(
            said.contains("capacity_bytes: found 67108864 bytes for a space, whose share of the service's"),
            "{said}"
        );
        assert!(
            said.contains("of 21474836480 bytes a day is 67108864, expected a share of 252641280 at least"),
            "{said}"
        );
        options.capacity_bytes = 252_641_280;
        block_on(block_on(Client::connect(socket, options)).expect("enough for 240 blocks").close()).expect("closed");
    });
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("a client was refused its space")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("WARN") && lines[0].contains("small") && lines[0].contains("write budget"), "{log}");
}

//! Services of two nodes with one store beyond them, and `kvhoist remote`, against a double of S3 and Debian's Redis.
#![cfg(feature = "remote")]

#[path = "serve/browser.rs"]
mod browser;
#[path = "../../remote/tests/common/mod.rs"]
mod common;
#[path = "remote/killed.rs"]
mod killed;
#[path = "remote/node.rs"]
mod node;
#[path = "../../tests/common/skip.rs"]
mod skip;

use std::process::Output;

use browser::{Browser, cell};
use common::double::{Double, Fault};
use node::{BLOCK_BYTES, Node, SECRET, command, payload};
use serde_json::Value;

const BLOCKS: u64 = 48;
/// More than an answer takes on a busy machine.
const PATIENT: &str = "timeout_ms=60000&connect_timeout_ms=60000";

fn s3_url(double: &Double) -> String {
    format!("s3://bucket/team?endpoint=http://127.0.0.1:{}&object_bytes=1048576&{PATIENT}", double.port)
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// `kvhoist remote`; what it prints holds no secret.
fn remote(args: &[&str]) -> Output {
    let output = command().arg("remote").args(args).output().expect("the command runs");
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(!said.contains(SECRET), "{said}");
    output
}

/// What it prints where it succeeds.
fn printed(args: &[&str]) -> String {
    let output = remote(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout).to_owned()
}

/// What one node stored another serves, byte for byte, after the first is gone.
fn check_two_nodes(url: &str) {
    let one = Node::start(url, &[]);
    let writer = one.client();
    writer.store(0..BLOCKS);
    one.wait_for_remote(BLOCKS);
    drop((writer, one));

    let other = Node::start(url, &["--http", "127.0.0.1:0"]);
    let reader = other.client();
    other.wait_for_remote(BLOCKS);
    assert_eq!(reader.load(0..BLOCKS), vec![true; BLOCKS as usize]);
    (0..BLOCKS).for_each(|n| assert_eq!(reader.bytes(n), payload(n), "block {n}"));
    let stats = other.stats();
    assert_eq!(stats["tiers"]["remote"]["bytes_out"], BLOCKS * BLOCK_BYTES as u64, "{stats}");
    assert_eq!(stats["misses"], 0, "{stats}");
    other.check_nothing_tells_a_secret();
}

#[test]
fn what_a_node_stored_in_s3_another_serves_after_it_is_gone() {
    let double = Double::start();
    check_two_nodes(&s3_url(&double));
    let heads = double.state.heads.lock().expect("no panic under it");
    assert!(!heads.iter().any(|head| head.contains(SECRET)));
}

#[test]
fn the_page_shows_what_came_from_the_store_and_why_it_offers_nothing() {
    let Some(browser) = Browser::start() else { return };
    let double = Double::start();
    let url = s3_url(&double);
    let writer = Node::start(&url, &[]);
    writer.client().store(0..BLOCKS);
    writer.wait_for_remote(BLOCKS);
    drop(writer);
    let node = Node::start(&url, &["--http", "127.0.0.1:0"]);
    let reader = node.client();
    node.wait_for_remote(BLOCKS);
    browser.open(&format!("http://{}/", node.http()));
    browser.wait(&format!("{} === '{BLOCKS}'", cell("remote", 1)));
    assert_eq!(browser.text(&cell("remote", 2)), "-", "it has no slots");
    double.fail(Fault::Answer(503, "ServiceUnavailable"));
    for n in 0..3 {
        assert_eq!(reader.load(n * 16..n * 16 + 16), vec![false; 16]);
    }
    browser.wait(
        "document.getElementById('spaces').textContent.includes('the remote tier offers nothing: at least 3 requests')",
    );
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn what_a_node_stored_in_redis_another_serves_after_it_is_gone() {
    let arguments = ["--port", "{port}", "--bind", "127.0.0.1", "--save", "", "--requirepass", SECRET];
    let Some(server) = common::Server::start("redis-server", &arguments) else {
        return skip::skipped("found no redis-server; install it (Debian's package redis-server)");
    };
    let url = format!("redis://127.0.0.1:{}/3", server.port);
    check_two_nodes(&url);
    assert!(printed(&["verify", &url]).starts_with("48 objects are right, with 48 blocks"));
    let refused = remote(&["gc", &url, "--max-bytes", "1"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("maxmemory"), "{}", text(&refused.stderr));
    assert!(printed(&["gc", &url, "--max-bytes", "0"]).starts_with("deleted 48 objects"));
    assert_eq!(printed(&["du", &url]), "no objects\n");
}

#[test]
fn a_store_is_listed_counted_verified_and_emptied() {
    let double = Double::start();
    let url = s3_url(&double);
    assert_eq!(printed(&["du", &url]), "no objects\n");
    let node = Node::start(&url, &[]);
    let client = node.client();
    client.store(0..BLOCKS);
    node.wait_for_remote(BLOCKS);
    drop((client, node));
    let objects = double.state.objects.lock().expect("no panic under it").clone();
    assert!(objects.len() >= 3, "{} objects of at most 16 blocks", objects.len());

    let listed = printed(&["ls", &url, "--json"]);
    let listed: Vec<Value> = listed.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let names = |prefix: &str| objects.keys().map(|name| name.replace("team/", prefix)).collect::<Vec<_>>();
    assert_eq!(listed.iter().map(|line| line["name"].as_str().expect("a name")).collect::<Vec<_>>(), names(""));
    let table = printed(&["ls", &url]);
    assert!(names("").iter().all(|name| table.contains(name.as_str())), "{table}");
    let du: Value = serde_json::from_str(&printed(&["du", &url, "--json"])).expect("JSON");
    let bytes: usize = objects.values().map(Vec::len).sum();
    assert_eq!((&du[0]["objects"], &du[0]["bytes"]), (&objects.len().into(), &bytes.into()));
    let namespace = du[0]["namespace"].as_str().expect("a digest").to_owned();
    assert!(printed(&["du", &url]).contains(&namespace[..16]));
    assert_eq!(printed(&["ls", &url, "--namespace", "0123"]), "");

    let report = printed(&["verify", &url]);
    assert_eq!(report, format!("{} objects are right, with {BLOCKS} blocks; 0 are wrong\n", objects.len()));
    let verified = remote(&["verify", &url, "--json"]);
    let report: Value = serde_json::from_slice(&verified.stdout).expect("JSON");
    assert_eq!((&report["right_objects"], &report["complete"]), (&objects.len().into(), &true.into()));
    let progress = format!("{0}/{0} objects", objects.len());
    assert!(text(&verified.stderr).contains(&progress), "{}", text(&verified.stderr));
    assert_eq!(text(&remote(&["verify", &url, "--quiet"]).stderr), "");
    let first = objects.keys().next().expect("objects").clone();
    let flip = |at: usize| double.state.objects.lock().expect("no panic").get_mut(&first).expect("an object")[at] ^= 1;
    for at in [objects[&first].len() - 1, 140] {
        flip(at);
        let wrong = remote(&["verify", &url, "--namespace", &namespace[..8]]);
        assert_eq!(wrong.status.code(), Some(1), "byte {at}: {}", text(&wrong.stderr));
        assert!(
            text(&wrong.stdout).contains(&names("")[0]) && text(&wrong.stdout).contains("1 are wrong"),
            "byte {at}"
        );
        flip(at);
    }
    // A reader passes a wrong block over.
    flip(objects[&first].len() - 1);
    let node = Node::start(&url, &[]);
    let client = node.client();
    node.wait_for_remote(BLOCKS);
    let loaded = client.load(0..BLOCKS);
    assert!(loaded.iter().any(|is_loaded| !is_loaded), "one block is wrong");
    let right = (0..BLOCKS).filter(|&n| loaded[n as usize]);
    right.for_each(|n| assert_eq!(client.bytes(n), payload(n), "block {n}"));
    drop((client, node));

    let would = printed(&["gc", &url, "--older-than", "1d", "--dry-run"]);
    assert!(would.starts_with(&format!("would delete {} objects", objects.len())), "{would}");
    assert_eq!(double.state.objects.lock().expect("no panic").len(), objects.len());
    let kept = objects.values().next_back().expect("objects").len().to_string();
    printed(&["gc", &url, "--max-bytes", &kept, "--quiet"]);
    assert_eq!(double.state.objects.lock().expect("no panic").len(), 1);
    let emptied = printed(&["gc", &url, "--max-bytes", "0", "--json", "--quiet"]);
    assert_eq!(serde_json::from_str::<Value>(&emptied).expect("JSON")["objects"], 1);
    assert_eq!(double.state.objects.lock().expect("no panic").len(), 0);
}

#[test]
fn the_command_in_the_help_of_wipe_deletes_a_namespace_and_no_other() {
    let help = command().args(["wipe", "--help"]).output().expect("the command runs").stdout;
    let words = text(&help).split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, rest) = words.split_once("`kvhoist remote ").expect("the command for copies in a remote store");
    let (said, _) = rest.split_once('`').expect("its end");
    let double = Double::start();
    let url = s3_url(&double);
    let name = |namespace: u8, key: u8| format!("team/kvhoist1/{}/{}", digest(namespace), digest(key));
    let mut objects = double.state.objects.lock().expect("no panic");
    objects.extend([(1, 1), (1, 2), (2, 1)].map(|(namespace, key)| (name(namespace, key), vec![0; 10])));
    drop(objects);
    let digits = &digest(1)[..8];
    let said = said.replace("URL", &url).replace("DIGEST", digits);
    printed(&said.split(' ').collect::<Vec<_>>());
    assert_eq!(double.state.objects.lock().expect("no panic").keys().collect::<Vec<_>>(), [&name(2, 1)], "{said}");
}

#[test]
fn gc_takes_one_namespace_or_all_and_no_digits_of_several() {
    let double = Double::start();
    let url = s3_url(&double);
    let (one, other) = (digest(0x11), format!("{}12", "11".repeat(31)));
    let name = |namespace: &str| format!("team/kvhoist1/{namespace}/{}", digest(3));
    let mut objects = double.state.objects.lock().expect("no panic");
    objects.extend([&one, &other].map(|namespace| (name(namespace), vec![0; 10])));
    drop(objects);
    // With 10 bytes to be kept only one of them would be deleted from.
    for (digits, bytes, expected) in
        [("", "0", "no --namespace for all"), (&one[..8], "0", &one[..]), (&one[..8], "10", &other[..])]
    {
        let refused = remote(&["gc", &url, "--max-bytes", bytes, "--namespace", digits]);
        assert_eq!(refused.status.code(), Some(2), "{digits:?}");
        assert!(text(&refused.stderr).contains(expected), "{}", text(&refused.stderr));
        assert_eq!(double.state.objects.lock().expect("no panic").len(), 2);
    }
    printed(&["gc", &url, "--max-bytes", "0", "--namespace", &one]);
    assert_eq!(double.state.objects.lock().expect("no panic").keys().collect::<Vec<_>>(), [&name(&other)]);
}

#[test]
fn a_listing_ends_with_its_reader() {
    let double = Double::start();
    let object = |n: u32| (format!("team/kvhoist1/{}/{n:064x}", digest(1)), vec![0; 10]);
    double.state.objects.lock().expect("no panic").extend((0..5000).map(object));
    let mut ls = command();
    ls.args(["remote", "ls", &s3_url(&double)]).stdout(std::process::Stdio::piped());
    let mut ls = ls.spawn().expect("the command runs");
    drop(ls.stdout.take());
    assert!(ls.wait().expect("it ends").success());
    assert_eq!(double.requests(), 1, "one page of five");
}

/// A digest, as names have it.
fn digest(of: u8) -> String {
    format!("{of:02x}").repeat(32)
}

#[test]
fn failures_have_a_status_and_no_secret() {
    let double = Double::start();
    let url = s3_url(&double);
    for (fault, status) in [
        (Fault::Answer(403, "AccessDenied"), 2),
        (Fault::Answer(404, "NoSuchBucket"), 2),
        (Fault::Answer(503, "ServiceUnavailable"), 1),
        (Fault::Silence, 1),
    ] {
        double.fail(fault);
        let patience = if fault == Fault::Silence { "timeout_ms=50" } else { PATIENT };
        let output = remote(&["ls", &url.replace(PATIENT, patience)]);
        assert_eq!(output.status.code(), Some(status), "{fault:?}: {}", text(&output.stderr));
    }
    let with_secret = format!("redis://:{SECRET}@127.0.0.1/0");
    for args in [
        &["ls", with_secret.as_str()][..],
        &["ls", "ftp://host"],
        &["gc", &url],
        &["gc", &url, "--older-than", "7"],
        &["ls", &url, "--namespace", "x"],
    ] {
        assert_eq!(remote(args).status.code(), Some(2), "{args:?}");
    }
}

/// `kvhoist doctor` on a cache with a store.
fn doctor(url: &str) -> Output {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let settings = serde_json::json!({
        "path": folder.path(), "capacity": "64MiB", "host_bytes": "8MiB", "direct_io": "prefer",
        "block_bytes": 65536, "remote": url, "recompute_us": 1,
    });
    let output = command().args(["doctor", "--config", &settings.to_string()]).output().expect("the command runs");
    assert!(!format!("{}{}", text(&output.stdout), text(&output.stderr)).contains(SECRET));
    output
}

#[test]
fn the_doctor_writes_reads_and_deletes_an_object() {
    let double = Double::start();
    let report = doctor(&s3_url(&double));
    let said = text(&report.stdout);
    assert!(report.status.success(), "{said}{}", text(&report.stderr));
    for word in ["remote store", "4.0 MiB read in", "against recompute_us", "remote clock"] {
        assert!(said.contains(word), "{word} in {said}");
    }
    assert!(!said.contains("remote creation"), "it keeps the first: {said}");
    assert_eq!(double.state.objects.lock().expect("no panic").len(), 0, "nothing is left");

    double.ignore_conditions();
    assert!(text(&doctor(&s3_url(&double)).stdout).contains("ignores If-None-Match"));
    double.fail(Fault::Answer(403, "AccessDenied"));
    let report = doctor(&s3_url(&double));
    assert_eq!(report.status.code(), Some(1));
    assert!(
        text(&report.stdout).contains("list: refused: the service answers AccessDenied"),
        "{}",
        text(&report.stdout)
    );
}

#[test]
fn a_service_refuses_a_url_without_telling_its_password() {
    for (url, word) in [(format!("redis://:{SECRET}@127.0.0.1/0"), "REDISCLI_AUTH"), ("ftp://host".into(), "s3://")] {
        let refused = Node::refused(&url);
        assert!(refused.contains(word) && !refused.contains(SECRET), "{refused}");
    }
}

#[test]
fn a_store_that_is_away_costs_nothing_but_its_blocks() {
    let double = Double::start();
    double.fail(Fault::Answer(403, "AccessDenied"));
    let node = Node::start(&s3_url(&double), &[]);
    let client = node.client();
    client.store(0..BLOCKS);
    assert_eq!(client.load(0..BLOCKS), vec![true; BLOCKS as usize]);
    (0..BLOCKS).for_each(|n| assert_eq!(client.bytes(n), payload(n), "block {n}"));
    node.wait_for("an error", |stats| stats["remote_errors"].as_u64() > Some(0));
    node.check_nothing_tells_a_secret();
}

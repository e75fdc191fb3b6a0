//! `kvhoist serve --http`: what it answers, and to whom.

use super::*;

#[test]
fn metrics_health_and_a_page_are_served_over_http() {
    let mut serving = Serving::start_with(&["--http", "127.0.0.1:0"]);
    let address = serving.http.clone().expect("it says where");
    let client =
        block_on(Client::connect(serving.socket(), ClientOptions::new("a\"b", BLOCK_BYTES))).expect("connected");
    let pool = Arc::new(SharedMemory::new(BLOCK_BYTES).expect("memory"));
    // SAFETY: nobody touches a block of it while the block is on its way.
    let lent = unsafe { kvhoist::Memory::shared(Arc::clone(&pool)) };
    block_on(client.register(lent.pinned(true))).expect("registered");
    let (keys, places) = ([BlockKey::new([1; 32])], [vec![Segment { ptr: pool.as_ptr(), len: BLOCK_BYTES }]]);
    assert!(matches!(block_on(client.store_from(&keys, None, &places)).expect("a service")[..], [Ok(true)]));
    assert!(matches!(block_on(client.load_into(&keys, &places)).expect("a service")[..], [Ok(true)]));

    let (line, metrics) = get(&address, "/metrics");
    assert_eq!(line, "HTTP/1.0 200 OK");
    let has = |name: &str, labels: &str, figure: &str| {
        metrics.lines().any(|line| line.starts_with(name) && line.contains(labels) && line.ends_with(figure))
    };
    assert!(has("kvhoist_stores_total{", r#"cache="a\"b""#, " 1"), "{metrics}");
    assert!(has("kvhoist_hits_total{", r#"tier="disk""#, " 1"), "{metrics}");
    assert!(has("kvhoist_service_clients ", "", " 1"), "{metrics}");
    assert!(has("kvhoist_service_trouble ", "", " 0"), "{metrics}");
    assert!(has("kvhoist_free_slots{", r#"tier="host""#, ""), "{metrics}");
    assert!(has("kvhoist_info{", r#"storage=""#, " 1"), "{metrics}");
    // One store, in buckets whose counts grow up to the last one.
    let of_route = r#"route="region_to_disk""#;
    assert!(has("kvhoist_movement_seconds_count{", of_route, " 1"), "{metrics}");
    let is_bucket = |line: &&str| line.starts_with("kvhoist_movement_seconds_bucket{") && line.contains(of_route);
    let buckets: Vec<&str> = metrics.lines().filter(is_bucket).collect();
    assert!(buckets[0].contains(r#"le="0.000004""#), "{metrics}");
    assert!(buckets[23].ends_with(r#"le="+Inf"} 1"#), "{metrics}");
    assert!(buckets.windows(2).all(|two| !(two[0].ends_with(" 1") && two[1].ends_with(" 0"))), "{metrics}");
    names_are_described(&metrics);
    promtool_reads(&metrics);

    assert_eq!(get(&address, "/healthz"), ("HTTP/1.0 200 OK".into(), "ok\n".into()));
    let (_, status) = get(&address, "/status.json");
    assert_eq!(serde_json::from_str::<Value>(&status).expect("JSON")["spaces"][0]["stats"]["stores"], 1);
    let seconds = serde_json::from_str::<Value>(&status).expect("JSON")["spaces"][0]["stats"]["routes"].take();
    assert_eq!(seconds["region_to_disk"]["seconds"]["count"], 1, "{seconds}");
    let (_, page) = get(&address, "/");
    assert!(page.contains("<title>kvhoist</title>"));
    assert!(!page.contains("src=") && !page.contains("href=") && !page.contains("@import"), "it needs nothing else");
    assert_eq!(get(&address, "/nothing").0, "HTTP/1.0 404 Not Found");

    let taken = kvhoist(&[
        "serve",
        "--socket",
        &format!("{}2", serving.socket()),
        "--path",
        &stores().path().display().to_string(),
        "--capacity",
        "2MiB",
        "--host-bytes",
        "1MiB",
        "--direct-io",
        "prefer",
        "--http",
        &address,
    ]);
    assert_eq!(taken.status.code(), Some(1));
    assert!(text(&taken.stderr).contains("name an address of this machine and a port that is free"));

    serving.signal();
    assert!(serving.child.wait().expect("an end").success());
}

#[test]
fn the_targets_file_stays_until_a_service_without_figures_takes_the_socket() {
    let mut serving = Serving::start_with(&["--http", "127.0.0.1:0"]);
    let (address, targets) = (serving.http.clone().expect("where"), format!("{}.targets.json", serving.socket()));
    serving.signal();
    assert!(serving.child.wait().expect("an end").success());
    assert!(std::fs::read_to_string(&targets).expect("it stays").contains(&address), "Prometheus finds it to be away");
    let path = serving.store.path().display().to_string();
    let flags = ["--path", &path, "--capacity", "64MiB", "--host-bytes", "8MiB", "--direct-io", "prefer"];
    served(serving.place.path(), &flags, |_| {
        assert!(!Path::new(&targets).exists(), "nothing is at the address any more");
    });
}

/// Hostile connections send requests until nobody takes any more, and read nothing.
#[test]
fn connections_that_never_read_keep_nobody_from_http() {
    let serving = Serving::start_with(&["--http", "127.0.0.1:0"]);
    let address = serving.http.clone().expect("it says where");
    let request = format!("GET / HTTP/1.1\r\nHost: {address}\r\n\r\n").repeat(2_000);
    let unread = |_| {
        let mut stream = TcpStream::connect(&address).expect("connected");
        stream.set_write_timeout(Some(Duration::from_millis(10))).expect("set");
        // The service may have hung up, or its buffers may be full.
        drop(stream.write_all(request.as_bytes()));
        stream
    };
    let hostile: Vec<TcpStream> = (0..70).map(unread).collect();
    let silent: Vec<TcpStream> = (0..70).map(|_| TcpStream::connect(&address).expect("connected")).collect();
    assert_eq!(get(&address, "/healthz"), ("HTTP/1.0 200 OK".into(), "ok\n".into()));
    drop((hostile, silent));
}

/// A page of another site cannot read the figures by letting its own name resolve to this address.
#[test]
fn http_is_answered_under_an_address_and_under_names_that_were_given() {
    let serving = Serving::start_with(&["--http", "127.0.0.1:0", "--http-host", "node7.example"]);
    let address = serving.http.clone().expect("it says where");
    let asked = |path: &str, host: &str| {
        let mut stream = TcpStream::connect(&address).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        write!(stream, "GET {path} HTTP/1.1\r\n{host}\r\n").expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer.lines().next().expect("a status line").to_owned()
    };
    for host in ["Host: node7.example\r\n", "Host: [::1]:9401\r\n", "Host: localhost\r\n"] {
        assert_eq!(asked("/status.json", host), "HTTP/1.1 200 OK", "{host}");
    }
    for path in ["/", "/metrics", "/healthz", "/status.json", "/nothing", "http://evil.example/metrics"] {
        let host = if path.starts_with('/') { "Host: evil.example\r\n" } else { "Host: localhost\r\n" };
        assert_eq!(asked(path, host), "HTTP/1.1 421 Misdirected Request", "{path}");
    }
}

/// The page of metrics says which ones a service exports, and the board and the alerts use those of the Python package:
/// the service has them all.
fn names_are_described(metrics: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let page = std::fs::read_to_string(root.join("docs/reference/metrics.md")).expect("the page of metrics");
    let rows = page.lines().filter(|line| line.starts_with("| `kvhoist_"));
    let rows: Vec<Vec<&str>> = rows.map(|row| row.split('|').map(str::trim).collect()).collect();
    let exported: Vec<&str> =
        metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    for row in rows {
        // Name, kind, Rust, Python, service.
        let name = row[1].trim_matches('`');
        assert_eq!(exported.contains(&name), row[5] == "yes", "{name}");
        assert!(row[4] != "yes" || row[5] == "yes", "{name}: a process exports it, and a service does not");
    }
    for name in exported {
        assert!(page.contains(&format!("| `{name}`")), "{name} is not on the page");
    }
}

/// Prometheus's own opinion, where its tool is here.
fn promtool_reads(metrics: &str) {
    let started =
        Command::new("promtool").args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let Ok(mut promtool) = started else {
        return skip::skipped("no promtool; install it with: apt-get install prometheus");
    };
    promtool.stdin.take().expect("piped").write_all(metrics.as_bytes()).expect("written");
    let output = promtool.wait_with_output().expect("an answer");
    // It would have counters of other units than seconds and bytes; what it cannot read is status 1.
    assert!(output.status.code() != Some(1), "{}", text(&output.stderr));
}

//! What policies of eviction and of writes hit and write, beside references.

use super::*;

/// Exact LRU of one cache of `slots` blocks: what an ideal replay hits.
fn exact_lru_hits(trace: &str, slots: usize) -> (u64, u64) {
    let (mut by_id, mut by_time) = (BTreeMap::new(), BTreeMap::new());
    let (mut hits, mut references, mut now) = (0, 0, 0u64);
    for line in trace.lines() {
        let request: Value = serde_json::from_str(line).expect("a request");
        for id in request["hash_ids"].as_array().expect("a list") {
            let id = id.as_u64().expect("a number");
            now += 1;
            references += 1;
            if let Some(used) = by_id.insert(id, now) {
                by_time.remove(&used);
                hits += 1;
            } else if by_time.len() == slots {
                let (_, coldest) = by_time.pop_first().expect("full");
                by_id.remove(&coldest);
            }
            by_time.insert(now, id);
        }
    }
    (hits, references)
}

#[test]
fn the_conversation_trace_hits_as_exact_lru_does() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/traces/conversation_trace.jsonl");
    let Ok(trace) = fs::read_to_string(path) else {
        skip::skipped(format_args!("{path} is missing"));
        return;
    };
    // A quarter of it: the whole trace takes minutes in a debug build.
    let trace: String = trace.split_inclusive('\n').take(3000).collect();
    let (dir, slots) = (directory(), 9_139);
    let path = dir.path().join("trace.jsonl");
    fs::write(&path, &trace).expect("write the trace");
    let (hits, references) = exact_lru_hits(&trace, slots);
    let exact = hits as f64 / references as f64;
    assert!((exact - 0.1914).abs() < 0.0001, "the reference gives {exact}");
    let path = path.to_str().expect("UTF-8");
    let args = ["--trace", path, "--block-bytes", "4KiB", "--host-blocks", "1024", "--disk-blocks", "9139"];
    let args = [&args[..], &["--policy", "lru"]].concat();
    let report = report(&args);
    let ratio = report["hit_ratio"].as_f64().expect("a number");
    println!("exact LRU {exact:.4}, replay {ratio:.4}");
    assert_eq!(report["references"].as_u64(), Some(references));
    assert_eq!(report["verification_failures"], 0);
    assert!((ratio - exact).abs() < 0.005, "exact LRU {exact}, replay {ratio}");
}

#[test]
fn policies_are_compared_between_their_bounds_and_every_byte_is_verified() {
    let dir = directory();
    let trace = small_trace(dir.path());
    let (trace, plot) = (trace.to_str().expect("UTF-8"), dir.path().join("curves.svg"));
    let args = ["--compare", "rb,rb-refuse", "--trace", trace, "--trace", trace, "--shares", "10,50,100"];
    let found = report(&[&args[..], &["--plot", plot.to_str().expect("UTF-8")]].concat());
    let traces = found["traces"].as_array().expect("traces");
    assert_eq!(traces.len(), 2);
    for (row, again) in
        traces[0]["rows"].as_array().expect("rows").iter().zip(traces[1]["rows"].as_array().expect("rows"))
    {
        let of = |row: &Value| [row["belady"].clone(), row["policies"]["lru"].clone(), row["policies"]["rb"].clone()];
        assert_eq!(of(row), of(again), "but for the coins of rb_refuse a comparison is the same each time");
    }
    assert_eq!((&traces[0]["references"], &traces[0]["distinct_blocks"]), (&480.into(), &240.into()));
    assert_eq!(traces[0]["verification_failures"], 0);
    for row in traces[0]["rows"].as_array().expect("rows") {
        let belady = row["belady"].as_f64().expect("a number");
        for policy in ["lru", "rb", "rb_refuse"] {
            let ratio = row["policies"][policy]["hit_ratio"].as_f64().expect("a number");
            assert!(ratio <= belady, "{policy}: {row}");
        }
    }
    let all_fit = &traces[0]["rows"][2];
    assert_eq!((&all_fit["belady"], &all_fit["policies"]["lru"]["hit_ratio"]), (&0.5.into(), &0.5.into()));
    let svg = fs::read_to_string(plot).expect("the plot");
    assert_eq!(svg.matches("<polyline").count(), 8, "three policies and the bound, of two traces");
}

#[test]
fn write_policies_are_compared_by_hits_and_bytes_written() {
    let dir = directory();
    let trace = small_trace(dir.path());
    let (trace, place) = (trace.to_str().expect("UTF-8"), dir.path().to_str().expect("UTF-8"));
    let args = ["--compare-writes", "by_value,write_back", "--trace", trace, "--shares", "10,50", "--path", place];
    let found = report(&args);
    let shown = replay_to(&[&["replay"][..], &args].concat(), Stdio::piped(), Stdio::piped());
    let said = String::from_utf8_lossy(&shown.stderr);
    assert!(said.contains("by_value with 120 slots on disk (5 of 6)") && said.contains("120/120 requests"), "{said}");
    assert_eq!(found["traces"][0]["verification_failures"], 0);
    let rows = found["traces"][0]["rows"].as_array().expect("rows");
    assert_eq!(rows.iter().map(|row| &row["disk_blocks"]).collect::<Vec<_>>(), [24, 120]);
    for row in rows {
        let of = |policy: &str, figure: &str| row["policies"][policy][figure].as_f64().expect("a number");
        assert!(of("write_through", "bytes_written") > 0.0 && of("by_value", "bytes_written") > 0.0, "{row}");
        assert!(of("by_value", "bytes_written") <= of("write_through", "bytes_written"), "{row}");
        assert_eq!(of("write_through", "writes_declined"), 0.0);
    }
    let left = fs::read_dir(dir.path()).expect("the directory").flatten();
    let left: Vec<_> = left.filter(|entry| entry.path().is_dir()).collect();
    assert!(left.is_empty(), "the stores are gone: {left:?}");
}

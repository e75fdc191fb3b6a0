//! Traces of others' forms, small ones that are written here.

use std::fs;

use crate::{directory, replay, report};

/// Three objects of MLPerf Storage's workload, each written and then read at once: whatever is in flight, the reads
/// find what the write has stored.
#[test]
fn reads_of_an_object_follow_its_write() {
    let dir = directory();
    let path = dir.path().join("kv.csv");
    let mut text = "Timestamp,Operation,Object_Size_Bytes,Tier,Key,Phase\r\n".to_owned();
    for object in 0..3 {
        for operation in ["Write", "Read", "Read", "Read", "Read"] {
            let phase = if operation == "Write" { "Prefill" } else { "Decode" };
            text += &format!("1740553426.194021,{operation},1050000,Tier-2,conv_{object}_turn_1,{phase}\r\n");
        }
        text += &format!("1740553426.2,Read,1050000,Tier-1,conv_{object}_turn_1,Evict\r\n");
    }
    fs::write(&path, text).expect("write the trace");
    let path = path.to_str().expect("UTF-8");
    let memory = ["--device-blocks", "16", "--host-blocks", "64", "--disk-blocks", "400", "--block-bytes"];
    for (block_bytes, blocks) in [("8KiB", 129), ("64KiB", 17)] {
        let found = report(&[&["--trace", path], &memory[..], &[block_bytes]].concat());
        assert_eq!((&found["requests"], &found["references"]), (&15.into(), &(15 * blocks).into()), "{block_bytes}");
        assert_eq!((&found["hits"], &found["verification_failures"]), (&(12 * blocks).into(), &0.into()));
    }
}

/// Two sessions of agents, with the ids of each: what a turn and a subagent share with the turn before is found.
#[test]
fn sessions_of_agents_are_replayed() {
    let dir = directory();
    let path = dir.path().join("sessions.jsonl");
    let session = r#"{"block_size": 64, "requests": [{"t": 0, "type": "n", "hash_ids": [1, 2, 3]}, {"t": 5,
        "type": "subagent", "requests": [{"t": 0, "hash_ids": [1, 9]}]}, {"t": 9, "hash_ids": [1, 2, 3, 4]}]}"#;
    fs::write(&path, format!("{}\n", session.replace('\n', "")).repeat(2)).expect("write the trace");
    let path = path.to_str().expect("UTF-8");
    let found = report(&["--trace", path, "--block-bytes", "8KiB", "--disk-blocks", "1000", "--in-flight", "1"]);
    assert_eq!((&found["requests"], &found["references"], &found["hits"]), (&6.into(), &18.into(), &8.into()));
    let found = report(&["--trace", path, "--compare", "lru", "--shares", "100"]);
    let trace = &found["traces"][0];
    assert_eq!((&trace["references"], &trace["distinct_blocks"]), (&18.into(), &10.into()));
    assert_eq!(trace["rows"][0]["policies"]["lru"]["hit_ratio"], 8.0 / 18.0);
}

#[test]
fn a_trace_without_times_is_not_replayed_at_a_speed() {
    let dir = directory();
    let path = dir.path().join("untimed.jsonl");
    fs::write(&path, "{\"hash_ids\": [1, 2]}\n".repeat(2)).expect("write the trace");
    let base = ["--trace", path.to_str().expect("UTF-8"), "--block-bytes", "8KiB", "--disk-blocks", "10"];
    for more in [&["--speed", "2"][..], &["--speed", "2", "--compare-writes", "by_value"]] {
        let output = replay(&[&base[..], more].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("untimed.jsonl: found no timestamps but 0, expected the requests' times"), "{said}");
    }
    report(&base);
}

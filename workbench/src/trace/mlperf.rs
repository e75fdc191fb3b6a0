//! Traces of the KV-cache workload of MLPerf Storage: the CSV that `kv-cache.py --io-trace-log FILE` writes, one read
//! or write of an object a line.
//!
//! The columns, as its `kv_cache/tracer.py` has them: seconds since 1970; `Read` or `Write`; bytes of the object; the
//! tier of the recorded run; the object; `Prefill` (the write of a new object), `Decode` (a read) or `Evict` (a read
//! and a write that move an object to another tier). Each line becomes a request for the object's blocks, the same
//! blocks for the same object: a cache stores those that it misses. Moves are left out, and so are tiers: a cache has
//! its own.
//!
//! <https://github.com/mlcommons/storage/blob/main/kv_cache_benchmark/kv_cache/tracer.py>

use std::{collections::HashMap, io::BufRead};

use super::{
    lines::Lines,
    request::{BLOCKS_MAX, Chain, Request},
};

/// The first line.
pub const HEADER: &[u8] = b"Timestamp,Operation,Object_Size_Bytes,Tier,Key,Phase";

/// Reads from the line behind the header to the end. Objects are cut into blocks of `block_bytes`.
pub fn parse(lines: &mut Lines<impl BufRead>, block_bytes: u64) -> Result<Vec<Request>, String> {
    let mut objects = HashMap::new();
    let mut requests = Vec::new();
    while lines.advance()? {
        let text = std::str::from_utf8(&lines.line).map_err(|error| lines.wrong(&error.to_string()))?;
        let columns: Vec<&str> = text.trim_end().split(',').collect();
        let [timestamp, operation, bytes, _tier, key, phase] = columns[..] else {
            return Err(lines.wrong(&format!("found {} columns, expected 6", columns.len())));
        };
        let wrong = |what: &str, found: &str, expected: &str| {
            lines.wrong(&format!("{what}: found {found:?}, expected {expected}"))
        };
        let timestamp = timestamp.parse::<f64>().map_err(|_| wrong("Timestamp", timestamp, "seconds"))?;
        let bytes = bytes.parse::<u64>().map_err(|_| wrong("Object_Size_Bytes", bytes, "a number of bytes"))?;
        if !["Read", "Write"].contains(&operation) {
            return Err(wrong("Operation", operation, "Read or Write"));
        }
        // A block of 0 bytes is refused with the other settings of the cache.
        let blocks = bytes.div_ceil(block_bytes.max(1));
        if blocks > BLOCKS_MAX as u64 {
            let found = format!("an object of {bytes} bytes, which are {blocks} blocks of {block_bytes} bytes");
            return Err(lines.wrong(&format!("found {found}, expected at most {BLOCKS_MAX}; raise --block-bytes")));
        }
        if phase == "Evict" {
            continue;
        }
        let next = objects.len() as u64;
        let first = *objects.entry(key.to_owned()).or_insert(next) * BLOCKS_MAX as u64;
        requests.push(Request { timestamp: 1e3 * timestamp, chain: Chain::Object(first..first + blocks) });
    }
    Ok(requests)
}

#[cfg(test)]
mod tests {
    use super::HEADER;
    use crate::trace::parse;

    fn text(rows: &str) -> Vec<u8> {
        [HEADER, b"\r\n", rows.as_bytes()].concat()
    }

    #[test]
    fn the_lines_of_an_object_are_requests_for_the_same_blocks() {
        let rows = "10.5,Write,9000,Tier-0,a_turn_1,Prefill\r\n11,Read,9000,Tier-0,a_turn_1,Decode\r\n\
                    11.2,Read,9000,Tier-0,a_turn_1,Evict\r\n11.2,Write,9000,Tier-2,a_turn_1,Evict\r\n\
                    12,Write,4096,Tier-2,b_turn_1,Prefill\r\n12,Read,12288,Tier-2,a_turn_1,Decode";
        let requests = parse(&*text(rows), 4096).expect("a trace");
        let found: Vec<(f64, Vec<u64>)> =
            requests.into_iter().map(|request| (request.timestamp, request.chain.ids().collect())).collect();
        let [(first_at, a), (_, again), (_, b), (last_at, grown)] = &found[..] else { panic!("{found:?}") };
        assert_eq!((*first_at, *last_at), (10_500.0, 12_000.0));
        assert_eq!([a.len(), again.len(), b.len(), grown.len()], [3, 3, 1, 3], "9,000 bytes are three blocks");
        assert!(a == again && a == grown && !a.contains(&b[0]), "{found:?}");
    }

    #[test]
    fn a_wrong_line_is_named_with_its_column() {
        let good = "1,Read,1,Tier-2,k,Decode\n";
        let cases = [
            ("1,Read,1,Tier-2,k\n", "found 5 columns, expected 6"),
            ("1,Read,1,Tier-2,\"k,l\",Decode\n", "found 7 columns, expected 6"),
            ("now,Read,1,Tier-2,k,Decode\n", "Timestamp: found \"now\""),
            ("1,Delete,1,Tier-2,k,Decode\n", "Operation: found \"Delete\", expected Read or Write"),
            ("1,Read,-1,Tier-2,k,Decode\n", "Object_Size_Bytes: found \"-1\""),
            ("1,Read,1048577,Tier-2,k,Decode\n", "1048577 blocks of 1 bytes, expected at most 1048576; raise"),
        ];
        for (bad, wanted) in cases {
            let error = parse(&*text(&format!("{good}{bad}")), 1).expect_err(bad);
            assert!(error.starts_with("line 3: ") && error.contains(wanted), "{bad}: {error}");
        }
        assert!(parse(&*[&text(good)[..], b"\xff\n"].concat(), 1).expect_err("no text").starts_with("line 3: "));
        assert!(parse(HEADER, 1).expect_err("empty").contains("no request"));
        assert!(parse(&*text(good), 0).is_ok(), "the cache refuses blocks of no bytes");
    }
}

//! Traces of the Mooncake project: one request a line, a JSON object with the prefix chain as `hash_ids`, and
//! `timestamp` in milliseconds. Equal ids stand for equal prefixes up to there.
//!
//! <https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release> has the fields, and traces.

use std::io::BufRead;

use serde::Deserialize;

use super::{
    lines::Lines,
    request::{Chain, Request},
};

#[derive(Deserialize)]
struct Line {
    #[serde(default)]
    timestamp: f64,
    hash_ids: Vec<u64>,
}

/// Reads from the current line to the end.
pub fn parse(lines: &mut Lines<impl BufRead>) -> Result<Vec<Request>, String> {
    let mut requests = Vec::new();
    loop {
        let Line { timestamp, hash_ids } = lines.json("a request is an object with `hash_ids`, a list of numbers")?;
        requests.push(Request { timestamp, chain: Chain::listed(hash_ids, lines)? });
        if !lines.advance()? {
            return Ok(requests);
        }
    }
}

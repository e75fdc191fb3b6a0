//! Sessions of coding agents, in the form that Weka's kv-cache-tester and AIPerf replay: one session a line, a JSON
//! object whose `requests` have the prefix chain as `hash_ids` (64 tokens a block) and `t`, seconds from the beginning
//! of the session. An entry with `requests` of its own is a subagent.
//!
//! All sessions begin at once, as under AIPerf's `--fixed-schedule`. Ids of a session name blocks of that session only.
//! A subagent's times count from its entry in Weka's files, and from the beginning of the session in those of
//! SemiAnalysis: they are taken for the former if the first of them is before the entry's own.
//!
//! <https://github.com/callanjfox/kv-cache-tester> has traces;
//! <https://github.com/ai-dynamo/aiperf/blob/main/docs/tutorials/weka-trace.md> has the fields.

use std::{collections::HashMap, io::BufRead};

use serde::Deserialize;

use super::{
    lines::Lines,
    request::{Chain, Request},
};

/// What a session has and no other line.
pub const FIELD: &[u8] = b"\"requests\"";

#[derive(Deserialize)]
struct Session {
    requests: Vec<Entry>,
}

/// A request, or a subagent with its own.
#[derive(Deserialize)]
struct Entry {
    t: f64,
    hash_ids: Option<Vec<u64>>,
    requests: Option<Vec<Entry>>,
}

/// Reads from the current line to the end.
pub fn parse(lines: &mut Lines<impl BufRead>) -> Result<Vec<Request>, String> {
    let (mut requests, mut made) = (Vec::new(), 0);
    loop {
        let session: Session =
            lines.json("a session is an object with `requests`, a list of objects with `t` and `hash_ids`")?;
        let mut asked = Vec::new();
        flatten(session.requests, 0.0, &mut asked);
        let mut known = HashMap::new();
        for (t, mut hash_ids) in asked {
            for id in &mut hash_ids {
                *id = *known.entry(*id).or_insert_with(|| {
                    made += 1;
                    made
                });
            }
            requests.push(Request { timestamp: 1e3 * t, chain: Chain::listed(hash_ids, lines)? });
        }
        if !lines.advance()? {
            break;
        }
    }
    requests.sort_by(|a, b| a.timestamp.total_cmp(&b.timestamp));
    Ok(requests)
}

/// The requests of a session and of its subagents, whose times count from `begin`.
fn flatten(entries: Vec<Entry>, begin: f64, asked: &mut Vec<(f64, Vec<u64>)>) {
    for Entry { t, hash_ids, requests } in entries {
        if let Some(inner) = requests {
            let is_relative = inner.first().is_some_and(|first| first.t < t);
            flatten(inner, if is_relative { begin + t } else { begin }, asked);
        } else if let Some(hash_ids) = hash_ids {
            asked.push((begin + t, hash_ids));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::trace::{Chain, parse};

    /// Time in milliseconds, and ids.
    fn read(text: &str) -> Vec<(f64, Vec<u64>)> {
        let requests = parse(text.as_bytes(), 4096).expect("sessions");
        requests.into_iter().map(|request| (request.timestamp, request.chain.ids().collect())).collect()
    }

    #[test]
    fn sessions_begin_together_and_share_no_ids() {
        let one = r#"{"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [
            {"t": 0.0, "type": "n", "hash_ids": [1, 2]}, {"t": 9.5, "type": "s", "hash_ids": [1, 2, 3]}]}"#;
        let other = r#"{"id": "b", "requests": [{"t": 3.0, "hash_ids": [1, 7]}, {"t": 4.0, "hash_ids": null}]}"#;
        let found = read(&format!("{}\n{other}\n", one.replace('\n', "")));
        let [(_, first), (_, second), (_, third)] = &found[..] else { panic!("{found:?}") };
        assert_eq!(found.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [0.0, 3000.0, 9500.0]);
        assert!(first[..] == third[..2] && third.len() == 3, "one session: {found:?}");
        assert!(second.iter().all(|id| !third.contains(id)) && second.len() == 2, "another session: {found:?}");
    }

    #[test]
    fn times_of_subagents_count_from_their_entry_or_from_the_session() {
        for inner in ["0.5", "10.5"] {
            let text = format!(
                r#"{{"requests": [{{"t": 2, "hash_ids": [1]}}, {{"t": 10, "type": "subagent", "requests": [
                    {{"t": {inner}, "hash_ids": [4]}}, {{"t": 11.5, "hash_ids": [1, 5]}}]}},
                    {{"t": 12, "hash_ids": [1]}}]}}"#
            );
            let found = read(&text.replace('\n', ""));
            let times: Vec<f64> = found.iter().map(|(at, _)| *at).collect();
            let of_entry = [2000.0, 10_500.0, 12_000.0, 21_500.0];
            let of_session = [2000.0, 10_500.0, 11_500.0, 12_000.0];
            assert_eq!(times, if inner == "0.5" { of_entry } else { of_session });
            assert!(
                found.iter().filter(|(_, ids)| ids[0] == found[0].1[0]).count() == 3,
                "ids of one session: {found:?}"
            );
        }
    }

    #[test]
    fn a_wrong_session_is_named_by_its_line() {
        let good = r#"{"requests": [{"t": 0, "hash_ids": [1]}]}"#;
        for bad in ["{", "[]", r#"{"hash_ids": [1]}"#, r#"{"requests": [{"hash_ids": [1]}]}"#, r#"{"requests": 3}"#] {
            let error = parse(format!("{good}\n{bad}\n").as_bytes(), 1).expect_err(bad);
            assert!(error.starts_with("line 2, column ") && error.contains("a session is"), "{bad}: {error}");
        }
        let long = format!(r#"{{"requests": [{{"t": 0, "hash_ids": [{}1]}}]}}"#, "1,".repeat(1 << 20));
        assert!(parse(long.as_bytes(), 1).expect_err("long").contains("expected at most 1048576"));
        assert!(matches!(parse(good.as_bytes(), 1).expect("good")[0].chain, Chain::Listed(_)));
    }
}

//! Which public calls of a cache the seeds of the simulation make, and why they do not make the others.

/// Where a call is made in `tests/simulation/src`.
pub enum Simulated {
    /// In this file, by these words.
    In(&'static str, &'static str),
    /// Nowhere, for this reason.
    Not(&'static str),
}

use Simulated::{In, Not};

/// The types of `src/cache` whose methods are calls.
pub const TYPES: [&str; 8] =
    ["Cache", "CompletionQueue", "DeviceLease", "LayerLoad", "Lease", "Loan", "Region", "Reservation"];

/// Every public method of [`TYPES`]. A new one is added here when a caller of the simulation makes it.
pub const CALLS: &[(&str, &str, Simulated)] = &[
    ("Cache", "builder", Not("it only builds settings; the plan of a seed does")),
    ("Cache", "clear", In("many.rs", "cache.clear()")),
    ("Cache", "close", In("life/mod.rs", "cache.close()")),
    ("Cache", "completion_queue", In("submissions.rs", "cache.completion_queue(")),
    ("Cache", "config", In("context.rs", "cache.config()")),
    ("Cache", "contains", In("calls.rs", "cache.contains(")),
    ("Cache", "export_gauges", Not("it copies figures to a recorder of metrics, of which the seeds have none")),
    ("Cache", "fetch", In("calls.rs", "cache.fetch(")),
    ("Cache", "fetch_many", In("many.rs", "cache.fetch_many(")),
    ("Cache", "fetch_to_device", In("calls.rs", "cache.fetch_to_device(")),
    ("Cache", "get_or_fetch_with", In("compute.rs", "cache.get_or_fetch_with(")),
    ("Cache", "is_empty", Not("it is `len() == 0`")),
    ("Cache", "keep", In("chains.rs", "cache.keep(")),
    ("Cache", "keys", In("calls.rs", "cache.keys()")),
    ("Cache", "len", In("calls.rs", "cache.len()")),
    ("Cache", "lease", Not("the first step of `fetch`, without the others")),
    ("Cache", "lend", In("foreign.rs", "cache.lend(")),
    ("Cache", "load_into", In("memory_calls.rs", "cache.load_into(")),
    ("Cache", "load_layers", In("memory_calls.rs", "cache.load_layers(")),
    ("Cache", "match_len", In("calls.rs", "cache.match_len(")),
    ("Cache", "match_prefix", In("calls.rs", "cache.match_prefix(")),
    ("Cache", "open", Not("it opens real files; `sim::open` does the same over simulated ones")),
    ("Cache", "prefetch", In("calls.rs", "cache.prefetch(")),
    ("Cache", "read_device", In("calls.rs", "cache.read_device(")),
    ("Cache", "register", In("foreign.rs", "cache.register(")),
    ("Cache", "release", In("chains.rs", "cache.release(")),
    ("Cache", "remove", In("calls.rs", "cache.remove(")),
    ("Cache", "remove_durably", In("calls.rs", "cache.remove_durably(")),
    ("Cache", "reserve", In("calls.rs", "cache.reserve()")),
    ("Cache", "reserve_for_overwrite", In("calls.rs", "cache.reserve_for_overwrite()")),
    ("Cache", "stats", In("calls.rs", "cache.stats()")),
    ("Cache", "store", In("calls.rs", "cache.store(")),
    ("Cache", "store_from", In("memory_calls.rs", "cache.store_from(")),
    ("Cache", "sync", In("calls.rs", "cache.sync()")),
    ("Cache", "touch", In("many.rs", "cache.touch(")),
    ("Cache", "unregister", In("foreign.rs", "cache.unregister(")),
    ("CompletionQueue", "drain", In("submit.rs", "queue.drain()")),
    ("CompletionQueue", "event_fd", In("submit.rs", "queue.event_fd()")),
    ("CompletionQueue", "outstanding", In("submit.rs", "queue.outstanding()")),
    ("CompletionQueue", "submit_load", In("submit.rs", "queue.submit_load(")),
    ("CompletionQueue", "submit_store", In("submit.rs", "queue.submit_store(")),
    ("DeviceLease", "route", Not("a figure, which tests/layers.rs and others compare")),
    ("DeviceLease", "segments", In("caller.rs", "lease.segments()")),
    ("LayerLoad", "blocks", In("memory_calls.rs", "load.blocks()")),
    ("LayerLoad", "has_streams", Not("which kind of device the cache has, and no call")),
    ("LayerLoad", "layer", In("memory_calls.rs", "load.layer(")),
    ("LayerLoad", "layers", Not("the number that the caller gave")),
    ("LayerLoad", "poison_address", Not("it needs a CUDA device: tests/doubles/cuda")),
    ("LayerLoad", "stream_wait", Not("it needs a CUDA device: tests/doubles/cuda")),
    ("Lease", "into_bytes", In("compute.rs", "cache.get_or_fetch_with(")),
    ("Lease", "route", Not("a figure, which tests/cache and others compare")),
    ("Loan", "is_returned", In("submit.rs", "loan.is_returned()")),
    ("Loan", "load_into", In("submit.rs", "loan.load_into(")),
    ("Loan", "returned", In("submit.rs", "loan.returned()")),
    ("Loan", "store_from", In("submit.rs", "loan.store_from(")),
    ("Loan", "submit_load", In("submit.rs", "loan.submit_load(")),
    ("Loan", "submit_store", In("submit.rs", "loan.submit_store(")),
    ("Region", "is_pinned", In("memory_calls.rs", "Region::is_pinned")),
    ("Reservation", "commit", In("calls.rs", "reservation.commit(")),
];

/// What is wrong with the list, given the methods there are and the code of a file of the simulation.
pub fn check(methods: &[(&str, String)], code: impl Fn(&str) -> String) -> Vec<String> {
    let mut wrong = Vec::new();
    for (of, method) in methods {
        if !CALLS.iter().any(|(name, call, _)| name == of && call == method) {
            wrong.push(format!("{of}::{method} is public and not listed: have a caller of the simulation make it"));
        }
    }
    for (of, call, simulated) in CALLS {
        if !methods.iter().any(|(name, method)| name == of && method == call) {
            wrong.push(format!("{of}::{call} is listed, and there is no such method"));
        }
        if let In(file, words) = simulated
            && !code(file).contains(words)
        {
            wrong.push(format!("{of}::{call}: `{words}` is not in tests/simulation/src/{file}"));
        }
        if let Not(reason) = simulated
            && reason.is_empty()
        {
            wrong.push(format!("{of}::{call} is not simulated, expected a reason"));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_is_added_or_not_made_any_longer_is_found() {
        let known = || -> Vec<(&str, String)> { CALLS.iter().map(|(of, call, _)| (*of, (*call).to_owned())).collect() };
        let everything: String =
            CALLS.iter().filter_map(|(_, _, of)| if let In(_, words) = of { Some(*words) } else { None }).collect();
        assert!(check(&known(), |_| everything.clone()).is_empty());
        let mut more = known();
        more.push(("Cache", "fetch_twice".into()));
        assert_eq!(check(&more, |_| everything.clone()).len(), 1);
        let less = everything.replace("cache.touch(", "");
        assert_eq!(check(&known(), |_| less.clone()).len(), 1);
        assert_eq!(check(&known()[1..], |_| everything.clone()).len(), 1);
    }
}

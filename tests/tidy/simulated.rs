//! Which public calls of a cache the seeds of the simulation make, and why they do not make the others.

/// The types of `src/cache` whose methods are calls, and what the simulation's code has before a call of each.
pub const TYPES: [(&str, &str); 7] = [
    ("Cache", "cache."),
    ("CompletionQueue", "queue."),
    ("DeviceLease", "lease."),
    ("LayerLoad", "load."),
    ("Lease", "lease."),
    ("Region", "region."),
    ("Reservation", "reservation."),
];

/// The methods that no caller of the simulation calls, and why.
const NOT_CALLED: &[(&str, &str, &str)] = &[
    ("Cache", "builder", "it only builds settings; the plan of a seed does"),
    ("Cache", "export_gauges", "it copies figures to a recorder of metrics, of which the seeds have none"),
    ("Cache", "is_empty", "it is `len() == 0`"),
    ("Cache", "lease", "the first step of `fetch`, without the others"),
    ("Cache", "open", "it opens real files; `sim::open` does the same over simulated ones"),
    ("DeviceLease", "route", "a figure, which tests/layers.rs and others compare"),
    ("LayerLoad", "has_streams", "which kind of device the cache has, and no call"),
    ("LayerLoad", "poison_address", "it needs a CUDA device: tests/doubles/cuda"),
    ("LayerLoad", "stream_wait", "it needs a CUDA device: tests/doubles/cuda"),
    ("Lease", "route", "a figure, which tests/cache and others compare"),
    ("Lease", "into_bytes", "`get_or_fetch_with`, which is called, ends with it"),
];

/// What is wrong, given the methods there are and the code of the simulation.
pub fn check(methods: &[(&str, String)], code: &str) -> Vec<String> {
    let listed = |of: &str, method: &str| NOT_CALLED.iter().any(|(name, call, _)| *name == of && *call == method);
    let called = |of: &str, method: &str| {
        let before = TYPES.iter().filter(|(name, _)| *name == of).map(|(_, before)| before);
        before.into_iter().any(|before| {
            // A call, or the method as a value.
            code.match_indices(&format!("{before}{method}"))
                .any(|(at, found)| code[at + found.len()..].starts_with(['(', ')', ',', ';']))
        })
    };
    let mut wrong = Vec::new();
    for (of, method) in methods {
        match (listed(of, method), called(of, method)) {
            (false, false) => wrong.push(format!("{of}::{method} is public: have a caller of the simulation make it")),
            (true, true) => wrong.push(format!("{of}::{method} is called: delete it from the list")),
            _ => {}
        }
    }
    let is_gone = |of: &str, call: &str| !methods.iter().any(|(name, method)| *name == of && method == call);
    let gone = NOT_CALLED.iter().filter(|(of, call, _)| is_gone(of, call));
    wrong.extend(gone.map(|(of, call, _)| format!("{of}::{call} is listed, and there is no such method")));
    wrong
}

#[test]
fn a_call_that_is_added_or_not_made_any_longer_is_found() {
    let mut known: Vec<(&str, String)> = NOT_CALLED.iter().map(|(of, call, _)| (*of, (*call).to_owned())).collect();
    known.push(("Cache", "touch".into()));
    assert_eq!(check(&known, "cache.touch(&keys)"), [""; 0]);
    assert_eq!(check(&known, "cache.touched(&keys)").len(), 1);
    assert_eq!(check(&known, "cache.touch(&keys); cache.is_empty()").len(), 1);
    assert_eq!(check(&known[1..], "cache.touch(&keys)").len(), 1);
}

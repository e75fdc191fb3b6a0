//! Who may import whom. A module that needs another one is listed with it here, or the code goes where it belongs.

use std::collections::{BTreeMap, BTreeSet};

use crate::imports::{Import, Module};

/// The modules below one module, and which of their neighbors each may import. `mod` is the parent's own file.
pub struct Group {
    pub parent: &'static [&'static str],
    pub allowed: &'static [(&'static str, &'static str)],
}

/// The library's modules, from the top down: nobody imports what stands above it.
pub const TOP: Group = Group {
    parent: &[],
    allowed: &[
        ("internals", "cache device config memory fork shield"),
        (
            "cache",
            "mover state device disk runtime config index io machine memory workers metrics block checksum error fork \
             shield sync",
        ),
        ("mover", "state device disk config index io memory workers block checksum error shield urgency"),
        ("state", "device disk config index io memory metrics block checksum error fork shield sync urgency"),
        ("device", "config io memory workers metrics block error"),
        ("store", "disk runtime config io memory block checksum error"),
        ("disk", "config io memory block bits checksum error"),
        ("runtime", "config io memory error"),
        ("config", "block error size"),
        ("index", "block bits"),
        ("workers", "io memory metrics block checksum shield sync urgency"),
        ("machine", ""),
        ("io", "memory block shield"),
        ("memory", "block error fork"),
        ("metrics", "block shield"),
        ("block", "error"),
        ("bits", ""),
        ("checksum", ""),
        ("error", ""),
        ("fork", ""),
        ("shield", ""),
        ("size", ""),
        ("sync", ""),
        ("urgency", ""),
    ],
};

/// What callers and the reactor share.
pub const STATE: Group = Group {
    parent: &["state"],
    allowed: &[
        ("commit", "lock mod flights"),
        ("lookup", "lock mod flights"),
        ("lock", "mod requests slots"),
        ("slots", "mod requests"),
        ("service", "mod health"),
        ("deadline", "mod"),
        ("limits", "mod"),
        ("disk_write", "mod"),
        ("report", "mod"),
        ("guards", "mod"),
        ("hints", "mod"),
        ("verify", "mod flights"),
        ("mod", "flights health leaving lenders refusals requests"),
        ("flights", ""),
        ("health", ""),
        ("leaving", ""),
        ("lenders", ""),
        ("refusals", ""),
        ("requests", ""),
    ],
};

/// The reactor's half.
pub const MOVER: Group = Group {
    parent: &["mover"],
    allowed: &[
        ("by_value", "mod"),
        ("layers", "caller_memory mod plan progress region results"),
        ("caller_memory", "in_place pages plan read region results route speculative_copy mod"),
        ("in_place", "write flight_guard pages plan records region route mod"),
        ("invariants", "mod in_flight"),
        ("flush", "write mod"),
        ("cufile_transfer", "copy flight_guard plan region write mod"),
        ("write", "flight_guard in_flight offload plan read route mod"),
        ("promote", "copy flight_guard plan read speculative_copy mod"),
        ("read", "flight_guard in_flight offload plan speculative_copy mod"),
        ("speculative_copy", "copy region mod"),
        ("plan", "flight_guard in_flight route mod"),
        ("copy", "region mod"),
        ("cufile", "mod"),
        ("offload", "mod in_flight"),
        ("deadlines", "mod command"),
        ("flight_guard", "mod"),
        ("records", "mod pages results"),
        ("shutdown", "mod command"),
        ("busy_poll", "mod"),
        ("mod", "write_budget command in_flight pages results"),
        ("command", "progress region"),
        ("progress", "region"),
        ("write_budget", ""),
        ("in_flight", ""),
        ("pages", ""),
        ("region", ""),
        ("results", ""),
        ("route", ""),
    ],
};

/// Devices, and the engines that copy to and from them.
pub const DEVICE: Group = Group {
    parent: &["device"],
    allowed: &[
        ("open", "any gdr cuda memcpy pool status"),
        ("any", "gdr cuda memcpy mod region"),
        ("absent", "cuda memcpy mod status"),
        ("gdr", "cost cuda mod pool rdma region status"),
        ("cufile", "cuda dynamic transfer"),
        ("transfer", "cuda"),
        ("cuda", "cost memcpy mod"),
        ("memcpy", "mod"),
        ("mod", "region"),
        ("pool", ""),
        ("rdma", "dynamic"),
        ("cost", ""),
        ("dynamic", ""),
        ("region", ""),
        ("status", ""),
    ],
};

/// The groups whose imports are held.
pub const GROUPS: &[&Group] = &[&TOP, &STATE, &MOVER, &DEVICE];

/// Files that import each other today. The list only ever gets shorter.
pub const KNOWN_PAIRS: &[&str] = &[
    "benches/device/main.rs: the root and layers",
    "benches/kit/src/lib.rs: ring and scratch",
    "benches/peers/src/main.rs: the root and options",
    "cli/src/lib.rs: bench::copy and bench::gdr",
    "cli/src/lib.rs: plot and replay",
    "cli/src/lib.rs: replay and report",
    "python/src/lib.rs: cache and queue",
    "python/src/lib.rs: errors and keys",
    "src/lib.rs: device::gdr and device::gdr::calibrate",
    "src/lib.rs: device::gdr and device::gdr::completion",
    "src/lib.rs: device::rdma::ports and device::rdma::sysfs",
    "src/lib.rs: disk::files and disk::files::path",
    "src/lib.rs: disk::files and disk::recovery",
    "src/lib.rs: disk::files::lock and disk::files::path",
    "src/lib.rs: disk::recovery and disk::recovery::collect",
    "src/lib.rs: disk::recovery and disk::recovery::table",
    "src/lib.rs: index and index::lru",
    "src/lib.rs: index and index::policy",
    "src/lib.rs: index and index::restore",
    "src/lib.rs: index::lru and index::policy",
    "src/lib.rs: index::policy and index::rb",
    "src/lib.rs: io::uring and io::uring::table",
    "tests/faults/corruption/mod.rs: the root and random",
    "tests/faults/corruption/mod.rs: the root and sample",
    "tests/guest/main.rs: faults and inside",
    "tests/guest/main.rs: inside and log",
    "tests/simulation/src/lib.rs: calls and chains",
    "tests/simulation/src/lib.rs: plan and trial",
];

/// What is wrong with the imports among the modules of a group: those that are not allowed, and entries that nobody
/// needs any more.
pub fn check(group: &Group, imports: &[Import]) -> Vec<String> {
    let parent: Module = group.parent.iter().map(|&segment| segment.into()).collect();
    let allowed: BTreeMap<&str, BTreeSet<&str>> =
        group.allowed.iter().map(|(from, to)| (*from, to.split_whitespace().collect())).collect();
    let mut needed: BTreeSet<(&str, &str)> = BTreeSet::new();
    let mut wrong = Vec::new();
    for import in imports {
        let (Some(from), Some(to)) = (member(&parent, &import.from), member(&parent, &import.to)) else { continue };
        if from == to {
            continue;
        }
        needed.insert((from, to));
        if !allowed.get(from).is_some_and(|allowed| allowed.contains(to)) {
            let Import { file, line, path, .. } = import;
            let expected = allowed.get(from).cloned().unwrap_or_default();
            wrong.push(format!("{file}:{line}: `{path}`: {from} imports {to}, expected one of {expected:?}"));
        }
    }
    for (from, to) in allowed.iter().flat_map(|(from, to)| to.iter().map(move |to| (*from, *to))) {
        if !needed.contains(&(from, to)) {
            wrong.push(format!("{from} may import {to} and does not: delete the entry"));
        }
    }
    wrong
}

/// Entries of a group that stand above what they import: the list is ordered from the top down, so that it has no
/// cycle.
pub fn check_order(group: &Group) -> Vec<String> {
    let place: BTreeMap<&str, usize> = group.allowed.iter().enumerate().map(|(at, (name, _))| (*name, at)).collect();
    let mut wrong = Vec::new();
    for (at, (from, to)) in group.allowed.iter().enumerate() {
        for to in to.split_whitespace() {
            match place.get(to) {
                Some(&place) if place > at => {}
                Some(_) => wrong.push(format!("{from} imports {to}, which stands above it")),
                None => wrong.push(format!("{from} imports {to}, which is not in the list")),
            }
        }
    }
    wrong
}

/// Files that import each other, directly.
pub fn pairs(imports: &[Import]) -> BTreeSet<(String, String)> {
    let edges: BTreeSet<(&Module, &Module)> = imports.iter().map(|import| (&import.from, &import.to)).collect();
    let mutual = edges.iter().filter(|(from, to)| from < to && edges.contains(&(*to, *from)));
    mutual.map(|(from, to)| (name(from), name(to))).collect()
}

fn name(module: &Module) -> String {
    if module.is_empty() { "the root".into() } else { module.join("::") }
}

/// The member of a group that a module belongs to.
fn member<'a>(parent: &[String], module: &'a Module) -> Option<&'a str> {
    let rest = module.strip_prefix(parent)?;
    match rest.first() {
        Some(name) => Some(name),
        // The crate's root only offers what its modules have.
        None => (!parent.is_empty()).then_some("mod"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: Group = Group { parent: &["m"], allowed: &[("mod", "a"), ("a", "b"), ("b", "")] };

    fn import(from: &str, to: &str) -> Import {
        let module = |path: &str| path.split("::").map(String::from).collect();
        Import { from: module(from), to: module(to), file: "f.rs".into(), line: 1, path: to.into() }
    }

    #[test]
    fn an_import_against_the_list_is_found() {
        let allowed = [import("m", "m::a::x"), import("m::a", "m::b"), import("m::a::x", "m::a"), import("m::a", "n")];
        assert_eq!(check(&GROUP, &allowed), [""; 0]);
        let upward: Vec<Import> = allowed.into_iter().chain([import("m::b::y", "m::a")]).collect();
        let wrong = check(&GROUP, &upward);
        assert!(wrong.len() == 1 && wrong[0].starts_with("f.rs:1: `m::a`: b imports a"), "{wrong:?}");
        let upward: Vec<Import> = upward.into_iter().chain([import("m::b", "m")]).collect();
        assert_eq!(check(&GROUP, &upward).len(), 2);
    }

    #[test]
    fn an_entry_that_nobody_needs_is_found() {
        let wrong = check(&GROUP, &[import("m", "m::a")]);
        assert_eq!(wrong, ["a may import b and does not: delete the entry"]);
    }

    #[test]
    fn a_list_with_a_cycle_is_found() {
        assert_eq!(check_order(&GROUP), [""; 0]);
        let circle = Group { parent: &[], allowed: &[("a", "b"), ("b", "a c")] };
        assert_eq!(check_order(&circle).len(), 2);
    }

    #[test]
    fn two_files_that_import_each_other_are_found() {
        let imports = [import("a", "b"), import("b", "c"), import("b", "a"), import("c", "a")];
        assert_eq!(pairs(&imports), BTreeSet::from([("a".into(), "b".into())]));
    }
}

//! Whole caches from seeds: every answer is what the model allows, and the books balance.

use std::{collections::BTreeSet, ops::Range};

use kvhoist_simulation::{
    DEVICE_SEEDS, LAYERED_SEEDS, MEMORY_SEEDS, PROMPT_SEEDS, REMOTE_SEEDS, Report, SERVICE_SEEDS, STRAIGHT_SEEDS,
    TRIAL_SEEDS, run, run_bytes, sim::Rng,
};

/// Seeds in which something was wrong once, and what.
const NAMED: [(u64, &str); 20] = [
    (0, "a disk slot was given back twice when the write that filled it was dropped"),
    (309, "the books counted a removed parent as held"),
    (463, "a load and the promotion that it joined waited for each other"),
    (629, "nobody woke who waited for a slot when a block was published that could go"),
    (7501, "a fetch got the miss of a movement that had begun before its block was removed and stored anew"),
    (20870, "a block that was removed while its disk slot was read kept its record"),
    (27529, "a block that was removed while it was written left a record"),
    (45171, "a removed block, given up before because of a read error, left its record"),
    (63097, "writes waited for a slot of a disk tier whose slots were all quarantined"),
    (71299, "the end of a cache flushed before the writes that were overdue had ended"),
    (35415, "a store that joined the write of a removed block was acknowledged, and its own block evicted unwritten"),
    (35386, "a write followed a movement of a block that was stored anew and is being written"),
    (1586, "a block stored anew was taken for its damaged copy, which had gone to the device before it was verified"),
    (1345, "a block that was removed while its bad copy was read was looked up once more"),
    (6750, "a sync reported writes that had run into `waiters_max`, and the model did not expect it"),
    (SERVICE_SEEDS, "a client's thread went on without waiting while the socket was full"),
    (DEVICE_SEEDS + 183, "a load layer by layer was refused because the client took other memory back meanwhile"),
    (2800788, "a close reported the write of a block that was selected for its uses, which nobody was promised"),
    (3007066, "no block was decided on for a caller's slot where those worth a write had been written by a sync"),
    (1924296, "a close refused a host slot to a block on its way from the device to the disk"),
];

/// `KVHOIST_SEEDS=FROM..TO` runs others.
fn seeds() -> Vec<Range<u64>> {
    let Ok(text) = std::env::var("KVHOIST_SEEDS") else {
        let families = [
            (0, 300),
            (STRAIGHT_SEEDS, 100),
            (LAYERED_SEEDS, 100),
            (TRIAL_SEEDS, 300),
            (PROMPT_SEEDS, 100),
            (MEMORY_SEEDS, 100),
            (REMOTE_SEEDS, 200),
        ];
        return families.map(|(first, seeds)| first..first + seeds).into();
    };
    let range = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    vec![range.expect("KVHOIST_SEEDS is FROM..TO")]
}

#[test]
fn every_answer_is_what_the_model_allows() {
    let mut sum = Report::default();
    let mut failures = Vec::new();
    for seed in seeds().into_iter().flatten() {
        match run(seed, false) {
            Ok(report) => sum.add(&report),
            Err(failure) => failures.push(failure.to_string()),
        }
    }
    println!("{sum}");
    assert!(failures.is_empty(), "{} seeds failed:\n{}", failures.len(), failures.join("\n"));
    // A simulation in which nothing happens proves nothing.
    assert!(sum.calls.iter().all(|count| *count > 0), "a kind of call is never made: {sum}");
    let rates = [
        sum.hits_promised,
        sum.misses_promised,
        sum.busy,
        sum.timeouts,
        sum.dropped,
        sum.checksum_failures,
        sum.device_checksums,
    ];
    assert!(rates.into_iter().all(|count| count > 0), "{sum}");
    let ends = [
        sum.power_cuts,
        sum.kills,
        sum.closes,
        sum.second_closes,
        sum.second_openers,
        sum.drops,
        sum.read_only,
        sum.retired,
        sum.quarantined,
        sum.pins_refused,
        sum.remote_brought,
        sum.remote_invalid,
        sum.remote_stale,
        sum.remote_away,
    ];
    assert!(ends.into_iter().all(|count| count > 0), "{sum}");
}

/// The node's service with several clients, over sockets, drives and mappings of the simulation.
#[test]
fn clients_of_a_service_get_what_the_model_allows() {
    let sum = service_runs(SERVICE_SEEDS..SERVICE_SEEDS + 300);
    assert!(sum.kills_amid_reads > 0, "{sum}");
}

/// With memory of devices, loads layer by layer, and pins.
#[test]
fn clients_of_a_service_load_layer_by_layer() {
    let sum = service_runs(DEVICE_SEEDS..DEVICE_SEEDS + 200);
    let moved = [sum.layers_told, sum.blocks_pinned, sum.copies, sum.copy_failures, sum.kills_amid_copies];
    assert!(moved.into_iter().all(|count| count > 0), "{moved:?}: {sum}");
}

fn service_runs(seeds: Range<u64>) -> Report {
    let mut sum = Report::default();
    let mut failures = Vec::new();
    for seed in seeds {
        match run(seed, false) {
            Ok(report) => sum.add(&report),
            Err(failure) => failures.push(failure.to_string()),
        }
    }
    println!("{sum}");
    assert!(failures.is_empty(), "{} seeds failed:\n{}", failures.len(), failures.join("\n"));
    let rates = [sum.hits_promised, sum.misses_promised, sum.busy, sum.timeouts, sum.dropped];
    let refused = [sum.abandoned, sum.maps_refused, sum.threads_refused];
    let ends = [sum.power_cuts, sum.kills, sum.closes, sum.evictions, sum.checksum_failures];
    assert!(rates.into_iter().chain(refused).chain(ends).all(|count| count > 0), "{sum}");
    sum
}

#[test]
fn seeds_that_found_something_find_it_no_more() {
    for (seed, what) in NAMED {
        if let Err(failure) = run(seed, false) {
            panic!("{failure}\n  it found earlier: {what}");
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in [
        1,
        2,
        3,
        5,
        8,
        13,
        REMOTE_SEEDS + 1,
        REMOTE_SEEDS + 2,
        SERVICE_SEEDS + 1,
        SERVICE_SEEDS + 2,
        SERVICE_SEEDS + 5,
        DEVICE_SEEDS + 1,
    ] {
        let [first, second] = [run(seed, false), run(seed, false)].map(|result| result.expect("a sound run"));
        assert!(first == second, "seed {seed}: {:016x} and {:016x}", first.digest, second.digest);
    }
}

/// Random bytes, as a fuzzer begins with, instead of a seed.
#[test]
fn bytes_choose_a_run() {
    let mut rng = Rng::new(3);
    let mut inputs: Vec<Vec<u8>> = (0..60).map(|n| (0..n * 8).map(|_| rng.next_u64() as u8).collect()).collect();
    // A run that is no trial.
    inputs[20][0] = 0;
    let digest = |bytes: &[u8]| run_bytes(bytes, false).unwrap_or_else(|what| panic!("{bytes:?}: {what}")).digest;
    let digests: BTreeSet<u64> = inputs.iter().map(|input| digest(input)).collect();
    assert_eq!(digests.len(), inputs.len(), "every input is another run");
    let (input, known) = (&inputs[20], digest(&inputs[20]));
    assert_eq!(digest(input), known, "the same input is the same run");
    let others = (0..input.len()).step_by(4).filter(|&at| {
        let mut changed = input.clone();
        changed[at] ^= 0x55;
        digest(&changed) != known
    });
    let (others, changes) = (others.count(), input.len() / 4);
    assert!(others > 4, "{others} of {changes} changes of a byte changed the run");
}

//! The store beyond the node: is it reached, what may be done there, whose clock is right, and how fast is it?

use std::time::Duration;

use kvhoist::block_on;
use kvhoist_remote::{PROBE_BYTES, Probe, open, probe};

use super::{Finding, plan::RemotePlan};
use crate::{failure::Failure, size::show_bytes};

/// Clocks that are further apart make ages wrong by minutes. S3 refuses requests of a clock 15 minutes off.
const CLOCKS_APART_MAX: Duration = Duration::from_secs(60);

/// Creates, reads and deletes an object in the store.
pub fn findings(plan: &RemotePlan) -> Result<Vec<Finding>, Failure> {
    let store = open(&plan.url).map_err(|error| Failure::usage(error.to_string()))?;
    Ok(match block_on(probe(&*store)) {
        Ok(probe) => of_probe(&probe, plan),
        Err(error) => {
            let fix = "docs/remote.md says which permissions a cache needs, and what each message means";
            vec![Finding { is_trouble: true, ..Finding::note("remote store", error.to_string()).fix(fix) }]
        }
    })
}

fn of_probe(probe: &Probe, plan: &RemotePlan) -> Vec<Finding> {
    let of = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1e3);
    let speed = Finding::note(
        "remote store",
        format!(
            "a byte in {}, {} read in {} and written in {}, one request at a time",
            of(probe.first_byte),
            show_bytes(PROBE_BYTES),
            of(probe.read),
            of(probe.write)
        ),
    );
    let mut findings = vec![speed];
    if let Some((recompute_us, block_bytes)) = plan.recompute {
        // As the cache reckons: a latency, and a time for each byte.
        let each_byte = probe.read.saturating_sub(probe.first_byte).as_secs_f64() / PROBE_BYTES as f64;
        let block = Duration::from_secs_f64(each_byte * block_bytes as f64);
        let recompute = Duration::from_micros(recompute_us);
        let found =
            format!("{} and {} a block, against {} of computing it", of(probe.first_byte), of(block), of(recompute));
        let finding = Finding::note("against recompute_us", found);
        let fix = "the tier stands down for all but what several requests bring at once; use a nearer store";
        findings.push(if block > recompute { finding.fix(fix) } else { finding });
    }
    if !probe.keeps_the_first {
        let found = "a second creation replaces an object: the service ignores If-None-Match";
        let fix = "none needed: who reads between the two has a miss; a newer service saves these";
        findings.push(Finding::note("remote creation", found).fix(fix));
    }
    if let Some(apart) = probe.clocks_apart.filter(|apart| *apart > CLOCKS_APART_MAX) {
        let finding = Finding::note("remote clock", format!("{} s apart from this machine's", apart.as_secs()));
        findings.push(finding.fix("synchronize both clocks (NTP): ages, and signatures of S3, depend on them"));
    }
    findings
}

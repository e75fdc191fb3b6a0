//! Fair comparison on a noisy machine: interleaved rounds, medians, ratios within a round.

use std::{fmt::Write as _, io, time::Instant};

const MIB: f64 = (1 << 20) as f64;
const GIB: f64 = (1 << 30) as f64;

/// One round of one contender.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Payload bytes moved.
    pub bytes: u64,
    /// Wall-clock time, seconds.
    pub seconds: f64,
    /// CPU time of all threads of this process, user and system, seconds.
    pub cpu_seconds: f64,
}

impl Sample {
    /// Throughput, MiB/s.
    pub fn mib_per_s(&self) -> f64 {
        self.bytes as f64 / MIB / self.seconds
    }

    /// Cost, CPU seconds per GiB.
    pub fn cpu_s_per_gib(&self) -> f64 {
        self.cpu_seconds / (self.bytes as f64 / GIB)
    }
}

/// Measures wall-clock and process CPU time from its start.
///
/// Everything the process does in between is counted: run one contender at a time.
pub struct Stopwatch {
    wall: Instant,
    cpu_seconds: f64,
}

impl Stopwatch {
    /// Starts now.
    pub fn start() -> Stopwatch {
        Stopwatch { cpu_seconds: process_cpu_seconds(), wall: Instant::now() }
    }

    /// What it took to move `bytes`.
    pub fn stop(self, bytes: u64) -> Sample {
        let seconds = self.wall.elapsed().as_secs_f64();
        Sample { bytes, seconds, cpu_seconds: process_cpu_seconds() - self.cpu_seconds }
    }
}

/// CPU time of every thread of this process so far, the kernel's I/O workers for it included.
fn process_cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the result, and the clock exists on every Linux.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// A name and what runs one round of it.
pub struct Entrant<'a> {
    /// The name shown in tables.
    pub name: String,
    /// Runs round `n`; the number seeds the round's pattern, so that all entrants see the same one.
    pub round: Box<dyn FnMut(u64) -> io::Result<Sample> + 'a>,
}

impl<'a> Entrant<'a> {
    /// An entrant.
    pub fn new(name: impl Into<String>, round: impl FnMut(u64) -> io::Result<Sample> + 'a) -> Entrant<'a> {
        Entrant { name: name.into(), round: Box::new(round) }
    }
}

/// All rounds of one entrant, in order.
#[derive(Debug, Clone)]
pub struct Series {
    /// The entrant's name.
    pub name: String,
    /// Its rounds.
    pub samples: Vec<Sample>,
}

/// Runs A, B, .., A, B, ..: what disturbs the machine for a while disturbs all of them.
///
/// Round 0 warms up and is not kept. An error names the entrant.
pub fn interleave(rounds: u64, entrants: &mut [Entrant<'_>]) -> io::Result<Vec<Series>> {
    interleave_told(rounds, entrants, &mut || Ok(()))
}

/// As [`interleave`]; calls `told` after every round of every entrant, and ends with its error if it has one.
pub fn interleave_told(
    rounds: u64,
    entrants: &mut [Entrant<'_>],
    told: &mut dyn FnMut() -> io::Result<()>,
) -> io::Result<Vec<Series>> {
    assert!(rounds > 0, "0 rounds, expected 1 or more");
    let series = |entrant: &Entrant<'_>| Series { name: entrant.name.clone(), samples: Vec::new() };
    let mut all: Vec<Series> = entrants.iter().map(series).collect();
    for round in 0..=rounds {
        for (entrant, series) in entrants.iter_mut().zip(&mut all) {
            let sample = (entrant.round)(round)
                .map_err(|error| io::Error::new(error.kind(), format!("{}, round {round}: {error}", entrant.name)))?;
            if round > 0 {
                series.samples.push(sample);
            }
            told()?;
        }
    }
    Ok(all)
}

/// Median and range of a list.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The middle value, or the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// The spread of at least one value.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.into_iter().collect();
        assert!(!values.is_empty(), "the spread of no values");
        values.sort_by(f64::total_cmp);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Spread { median: low.midpoint(high), min: values[0], max: values[values.len() - 1] }
    }
}

/// The median over rounds of `a / b`, each pair taken from the same round.
pub fn ratio(a: &Series, b: &Series, value: impl Fn(&Sample) -> f64) -> f64 {
    assert_eq!(a.samples.len(), b.samples.len(), "rounds of {} and {}", a.name, b.name);
    Spread::of(a.samples.iter().zip(&b.samples).map(|(a, b)| value(a) / value(b))).median
}

/// A table of all series; the first is what the ratios relate to.
pub fn table(title: &str, all: &[Series]) -> String {
    let mut out = String::new();
    let Some(base) = all.first() else { return out };
    let width = all.iter().map(|series| series.name.chars().count()).max().unwrap_or(0).max(8);
    let mut line = |text: std::fmt::Arguments<'_>| writeln!(out, "{text}").expect("a String takes everything");
    line(format_args!("{title} ({} rounds; median, min..max; ratios are medians over rounds)", base.samples.len()));
    line(format_args!(
        "  {:width$}  {:>8}  {:>18}  {:>6}  {:>9}  {:>16}  {:>6}",
        "", "MiB/s", "", "ratio", "CPU-s/GiB", "", "ratio"
    ));
    for series in all {
        let speed = Spread::of(series.samples.iter().map(Sample::mib_per_s));
        let cost = Spread::of(series.samples.iter().map(Sample::cpu_s_per_gib));
        line(format_args!(
            "  {:width$}  {:>8.0}  {:>18}  {:>6.3}  {:>9.3}  {:>16}  {:>6.2}",
            series.name,
            speed.median,
            format!("{:.0}..{:.0}", speed.min, speed.max),
            ratio(series, base, Sample::mib_per_s),
            cost.median,
            format!("{:.3}..{:.3}", cost.min, cost.max),
            ratio(series, base, Sample::cpu_s_per_gib),
        ));
    }
    out
}

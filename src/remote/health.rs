//! Whether the store is worth asking: it answers, and it brings blocks sooner than they are computed. Reads have a
//! health, and writes another one, without measurements.
//!
//! What is measured is what callers feel: the time from a request for some blocks to the last of them in host memory.
//! A line through the latest measurements, time over blocks, says how long other requests would take. Pure data: times
//! are since the cache was opened.

use std::time::Duration;

/// Requests that may fail in a row before the store counts as away.
pub(crate) const FAILURES_MAX: u32 = 3;

/// The least and the longest time between two trials of a store that is offered no more.
const TRIAL_AFTER: Duration = Duration::from_secs(1);
const TRIAL_AFTER_MAX: Duration = Duration::from_secs(60);

/// Blocks of a long run: where one of so many is slower than computing it, shorter runs are slower still.
const LONG_RUN: usize = 4096;

/// What an older measurement weighs beside the next one.
const DECAY: f64 = 0.8;

/// The health of a store.
#[derive(Debug, Default)]
pub(crate) struct Health {
    failures: u32,
    /// Why the last request failed.
    failure: String,
    /// A request was refused as all others would be, and none has succeeded since.
    is_refused: bool,
    line: Line,
    /// How long computing a block takes, in seconds.
    recompute: Option<f64>,
    trial: Trial,
    /// Trials in a row that did not help.
    trials: u32,
}

/// How the store is tried again while it offers nothing.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
enum Trial {
    /// It offers blocks, or did until now.
    #[default]
    None,
    /// The next request may begin from this time on.
    From(Duration),
    /// One is under way.
    UnderWay,
}

impl Health {
    pub(crate) fn new(recompute_us: Option<u64>) -> Self {
        Health { recompute: recompute_us.map(|us| us as f64 / 1e6), ..Health::default() }
    }

    /// Whether so many blocks, to be brought together, are offered now.
    pub(crate) fn offers(&mut self, blocks: usize, now: Duration) -> bool {
        if self.is_well(blocks) {
            return true;
        }
        match self.trial {
            Trial::None => {
                self.trial = Trial::From(now + self.pause());
                false
            }
            Trial::From(time) => now >= time,
            Trial::UnderWay => false,
        }
    }

    /// Notes that so many blocks are asked for: a trial, unless they would be without one.
    pub(crate) fn begin(&mut self, blocks: usize) {
        if matches!(self.trial, Trial::From(_)) && !self.is_well(blocks) {
            self.trial = Trial::UnderWay;
        }
    }

    /// Notes the end of what [`begin`](Self::begin) began: so many blocks in `took`, or why there are none.
    pub(crate) fn ended(&mut self, result: Result<(usize, Duration), String>, now: Duration) {
        // No trial: its end says nothing of shorter runs, which are not.
        let is_offered = matches!(result, Ok((blocks, _)) if blocks > 0 && self.is_well(blocks));
        let blocks = match result {
            Ok((0, _)) => 0,
            Ok((blocks, took)) => {
                (self.failures, self.is_refused) = (0, false);
                if self.trial == Trial::UnderWay && !is_offered {
                    // What was measured before it stood down says nothing of now.
                    self.line = Line::default();
                }
                self.line.add(blocks as f64, took.as_secs_f64());
                blocks
            }
            Err(failure) => {
                self.failures = self.failures.saturating_add(1);
                self.failure = failure;
                0
            }
        };
        if self.is_well(if is_offered { 1 } else { blocks.max(1) }) {
            (self.trial, self.trials) = (Trial::None, 0);
        } else if self.trial == Trial::UnderWay && !is_offered {
            self.trials += 1;
            self.trial = Trial::From(now + self.pause());
        }
    }

    /// As [`ended`](Self::ended), of a request that was refused as all others would be: none is made for a while.
    pub(crate) fn refused(&mut self, refusal: String, now: Duration) {
        self.is_refused = true;
        self.ended(Err(refusal), now);
    }

    /// Why the store is asked for no run of blocks, if it is for none. Of writes it is the label of a metric: a trial
    /// that fails as the one before it does not change the text, or each would begin a series anew. So it has no count.
    pub(crate) fn reason(&self) -> Option<String> {
        if self.is_refused {
            return Some(self.failure.clone());
        }
        if self.is_away() {
            return Some(format!("at least {FAILURES_MAX} requests in a row failed, the last one: {}", self.failure));
        }
        let (all, recompute) = (self.line.at(LONG_RUN as f64)?, self.recompute?);
        let wrong = format!(
            "bringing a block of a long run takes {:.1} ms by the last measurements, expected less than the {:.1} ms \
             of computing it",
            all / LONG_RUN as f64 * 1e3,
            recompute * 1e3
        );
        self.is_slow(LONG_RUN).then_some(wrong)
    }

    /// Whether so many blocks are offered without a trial.
    fn is_well(&self, blocks: usize) -> bool {
        !self.is_away() && !self.is_slow(blocks)
    }

    fn is_away(&self) -> bool {
        self.is_refused || self.failures >= FAILURES_MAX
    }

    fn is_slow(&self, blocks: usize) -> bool {
        let expected = self.line.at(blocks as f64);
        expected.zip(self.recompute).is_some_and(|(expected, recompute)| expected > recompute * blocks as f64)
    }

    fn pause(&self) -> Duration {
        if self.is_refused {
            return TRIAL_AFTER_MAX;
        }
        TRIAL_AFTER.saturating_mul(1 << self.trials.min(6)).min(TRIAL_AFTER_MAX)
    }
}

/// A line through points by least squares, in which older points weigh less.
#[derive(Debug, Default)]
struct Line {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl Line {
    fn add(&mut self, x: f64, y: f64) {
        for (sum, new) in
            [(&mut self.weight, 1.0), (&mut self.x, x), (&mut self.y, y), (&mut self.xx, x * x), (&mut self.xy, x * y)]
        {
            *sum = *sum * DECAY + new;
        }
    }

    /// The line's height; `None` without points. It rises, and begins at 0 or above. Where all points are about as far,
    /// it goes through their mean and 0.
    fn at(&self, x: f64) -> Option<f64> {
        if self.weight == 0.0 {
            return None;
        }
        let (mean_x, mean_y) = (self.x / self.weight, self.y / self.weight);
        let variance = self.xx / self.weight - mean_x * mean_x;
        let covariance = self.xy / self.weight - mean_x * mean_y;
        let steepest = mean_y / mean_x;
        let slope =
            if variance > 0.01 * mean_x * mean_x { (covariance / variance).clamp(0.0, steepest) } else { steepest };
        Some(mean_y + slope * (x - mean_x))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_line_tells_latency_from_throughput() {
        let mut line = Line::default();
        assert_eq!(line.at(1.0), None);
        line.add(10.0, 0.5);
        assert_eq!(line.at(20.0), Some(1.0), "one point, and the origin");
        for _ in 0..20 {
            [1.0, 64.0, 8.0].into_iter().for_each(|x| line.add(x, 0.020 + 0.001 * x));
        }
        let at = line.at(100.0).expect("points");
        assert!((at - 0.120).abs() < 0.001, "{at}");
    }

    #[test]
    fn a_slow_store_offers_long_runs_only_and_comes_back_after_a_trial() {
        let mut health = Health::new(Some(1_000));
        assert!(health.offers(1, MS), "nothing is measured");
        for blocks in [1, 100, 1, 100, 1, 100] {
            health.ended(Ok((blocks, 50 * MS + MS * blocks as u32 / 10)), MS);
        }
        assert!(!health.offers(8, MS) && health.offers(100, MS), "{health:?}");
        assert_eq!(health.reason(), None, "long runs are offered");
        for _ in 0..20 {
            health.ended(Ok((100, 1000 * MS)), MS);
        }
        assert!(!health.offers(100, MS), "it became slow: {health:?}");
        assert!(health.reason().is_some_and(|reason| reason.contains("computing")), "{health:?}");
        let mut now = TRIAL_AFTER + 2 * MS;
        let mut trials = 0;
        while !(health.offers(100, now) && health.trial == Trial::None) {
            if health.offers(100, now) {
                trials += 1;
                health.begin(100);
                assert!(!health.offers(100, now), "one trial at a time");
                health.ended(Ok((100, 20 * MS)), now);
            }
            now += 100 * MS;
        }
        assert_eq!((trials, health.reason()), (1, None), "a trial that is fast is enough");
    }

    #[test]
    fn a_long_run_that_is_offered_is_no_trial_and_keeps_single_blocks_from_being_asked_for() {
        let (mut health, mut now, mut singles) = (Health::new(Some(900)), MS, 0);
        for _ in 0..200 {
            for blocks in [256, 1] {
                let took = 30 * MS + Duration::from_micros(100) * blocks as u32;
                now += Duration::from_secs(1);
                if health.offers(blocks, now) {
                    health.begin(blocks);
                    health.ended(Ok((blocks, took)), now);
                    singles += usize::from(blocks == 1);
                }
            }
        }
        assert!(singles < 30, "{singles} of 200 single blocks took 30 ms each, which take 0.9 ms to compute");
    }

    #[test]
    fn a_long_run_that_ends_during_a_trial_of_a_single_block_is_no_end_of_it() {
        let mut health = Health::new(Some(900));
        let took = |blocks: u32| 30 * MS + Duration::from_micros(100) * blocks;
        for blocks in [1, 256, 1, 256] {
            health.ended(Ok((blocks as usize, took(blocks))), MS);
        }
        assert!(!health.offers(1, MS) && health.offers(256, MS), "{health:?}");
        let now = TRIAL_AFTER + 2 * MS;
        assert!(health.offers(1, now), "a trial");
        health.begin(1);
        health.ended(Ok((256, took(256))), now);
        assert!(!health.offers(1, now), "it is under way: {health:?}");
        health.ended(Ok((1, took(1))), now);
        assert!(!health.offers(1, now + TRIAL_AFTER) && health.offers(1, now + 2 * TRIAL_AFTER + MS), "{health:?}");
    }

    #[test]
    fn a_store_that_is_away_is_tried_less_and_less_often() {
        let mut health = Health::new(None);
        for _ in 0..FAILURES_MAX {
            assert!(health.offers(1, MS));
            health.begin(1);
            health.ended(Err("refused".into()), MS);
        }
        let reason = health.reason().expect("away");
        assert!(reason.contains("refused"), "{reason}");
        let mut tried = Vec::new();
        for now in (0..300).map(Duration::from_secs) {
            if health.offers(1, now) {
                health.begin(1);
                health.ended(Err("refused".into()), now);
                tried.push(now.as_secs());
                assert_eq!(health.reason().as_ref(), Some(&reason), "a label of a metric");
            }
        }
        assert!(
            tried.len() >= 8 && tried.len() < 12 && tried[tried.len() - 1] - tried[tried.len() - 2] == 60,
            "{tried:?}"
        );
        let now = Duration::from_secs(1000);
        assert!(health.offers(1, now));
        health.begin(1);
        health.ended(Ok((1, MS)), now);
        assert!(health.offers(1, now) && health.reason().is_none());
    }

    #[test]
    fn a_store_that_refuses_is_tried_once_a_minute_until_a_trial_succeeds() {
        let mut health = Health::new(None);
        health.begin(1);
        health.refused("no permission".into(), MS);
        assert_eq!(health.reason().as_deref(), Some("no permission"));
        let mut tried = Vec::new();
        for now in (0..=180).map(Duration::from_secs) {
            if health.offers(1, now) {
                health.begin(1);
                assert!(!health.offers(1, now), "one trial at a time");
                match tried.len() {
                    0 => health.refused("no permission".into(), now),
                    1 => health.ended(Err("no answer".into()), now),
                    _ => health.ended(Ok((1, MS)), now),
                }
                tried.push(now.as_secs());
            }
        }
        assert_eq!((tried, health.reason()), (vec![60, 120, 180], None));
    }
}

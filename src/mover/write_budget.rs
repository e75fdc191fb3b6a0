//! The budget of writes to the disk tier: a bucket that fills evenly and holds a tenth of an hour's writes.
//!
//! Over any time `t` no more goes out than `t` brings in and the bucket holds. So that it does not run dry, which would
//! cut chains at random places, one random draw per chain decides on chains in their first use: the share taken follows
//! the recent demand, the recent budget, and the level of the bucket.
//!
//! The level is not stored. The bucket is full when the store is created and empty whenever it is opened again, which
//! is never more than it was at the end of the run before: so the limit of an hour holds over any number of restarts,
//! and a restart loses at most a tenth of an hour's writes.

use std::time::Duration;

const HOUR: f64 = 3600.0;
/// The share of an hour's writes that the bucket holds.
const SAVED: f64 = 0.1;
/// Time for which demand counts, in seconds.
const MEMORY: f64 = 600.0;

/// What rounding may take of a level: the smallest budget has room for one block.
const ROUNDED: f64 = 1e-6;

/// How many blocks may be written. All counts are of blocks.
pub(super) struct WriteBudget {
    a_second: f64,
    room: f64,
    level: f64,
    /// Time at which the level was computed.
    at: Duration,
    /// The share of chains in their first use that is taken.
    share: f64,
    /// Decayed sums: blocks offered in their first use, and in a later one, in so many seconds.
    first: f64,
    again: f64,
    seconds: f64,
}

impl WriteBudget {
    /// `written_bytes` are what the write of one block costs. `is_new`: no earlier run wrote to the store.
    pub(super) fn new(bytes_a_day: u64, written_bytes: u64, is_new: bool) -> Self {
        let a_second = bytes_a_day as f64 / (24.0 * HOUR) / written_bytes.max(1) as f64;
        let room = a_second * HOUR * SAVED;
        let level = if is_new { room } else { 0.0 };
        WriteBudget { a_second, room, level, at: Duration::ZERO, share: 1.0, first: 0.0, again: 0.0, seconds: 0.0 }
    }

    /// Takes up to `blocks` unwritten blocks of a chain that is not [declined](Self::declines), from its top.
    /// Returns how many.
    pub(super) fn take(&mut self, again: bool, blocks: usize) -> usize {
        self.offer(again, blocks);
        let blocks = blocks.min((self.level + ROUNDED) as usize);
        self.level -= blocks as f64;
        blocks
    }

    /// Whether a chain is declined, however long it is. It is offered block by block then. `now` is a time since any
    /// fixed one; `again`: the chain's last block was used before; `coin`: the chain's random draw.
    pub(super) fn declines(&mut self, now: Duration, again: bool, coin: f64) -> bool {
        self.pass(now);
        let is_taken = again || coin < self.share;
        let declines = !is_taken || self.level + ROUNDED < 1.0;
        if declines {
            self.offer(again, 1);
        }
        declines
    }

    fn offer(&mut self, again: bool, blocks: usize) {
        *if again { &mut self.again } else { &mut self.first } += blocks as f64;
    }

    /// The share of chains in their first use that is taken now.
    pub(super) fn share(&self) -> f64 {
        self.share
    }

    fn pass(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.level = (self.level + self.a_second * passed).min(self.room);
        let kept = (-passed / MEMORY).exp();
        self.first *= kept;
        self.again *= kept;
        self.seconds = self.seconds * kept + passed;
        if self.first > 0.0 {
            let wanted = self.a_second * self.seconds - self.again + 2.0 * (self.level - self.room / 2.0);
            self.share = (wanted / self.first).clamp(0.0, 1.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl WriteBudget {
        /// Takes up to `blocks` of a chain, unless it is declined.
        fn admit(&mut self, now: Duration, again: bool, coin: f64, blocks: usize) -> usize {
            if self.declines(now, again, coin) { 0 } else { self.take(again, blocks) }
        }
    }

    /// What is written a second, where so many chains of `blocks` are offered a second.
    fn written(write_budget: &mut WriteBudget, seconds: u64, chains: u64, blocks: usize, again: bool) -> Vec<f64> {
        let mut n = 0u64;
        (1..=seconds)
            .map(|second| {
                let offered = (0..chains).map(|_| {
                    n += 1;
                    let coin = (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / f64::from(1 << 24);
                    write_budget.admit(Duration::from_secs(second), again, coin, blocks) as f64
                });
                offered.sum()
            })
            .collect()
    }

    fn most_in_an_hour(written: &[f64]) -> f64 {
        let mut sums = vec![0.0];
        sums.extend(written.iter().scan(0.0, |sum, blocks| {
            *sum += blocks;
            Some(*sum)
        }));
        sums.windows(3601).map(|hour| hour[3600] - hour[0]).fold(0.0, f64::max)
    }

    #[test]
    fn an_hour_takes_no_more_than_a_tenth_above_its_budget_and_wastes_none_of_it() {
        for (chains, blocks, again) in [(1, 200, false), (20, 20, false), (40, 1, true), (3, 24, true)] {
            // 10 blocks a second.
            let mut write_budget = WriteBudget::new(10 * 86_400 * 1000, 1000, true);
            let written = written(&mut write_budget, 4 * 3600, chains, blocks, again);
            let most = most_in_an_hour(&written);
            assert!(most <= 1.1 * 36_000.0 + 1.0, "{chains} chains of {blocks}: {most} blocks in an hour");
            let last: f64 = written[3 * 3600..].iter().sum();
            assert!(last >= 0.9 * 36_000.0, "{chains} chains of {blocks}: {last} blocks in the last hour");
        }
    }

    #[test]
    fn nothing_is_saved_up_beyond_a_tenth_of_an_hour() {
        let mut write_budget = WriteBudget::new(86_400 * 1000, 1000, true);
        assert_eq!(write_budget.admit(Duration::ZERO, true, 0.0, 10_000), 360, "a new store begins with a tenth");
        assert_eq!(write_budget.admit(Duration::ZERO, true, 0.0, 1), 0);
        assert_eq!(write_budget.admit(Duration::from_hours(48), true, 0.0, 10_000), 360);
        assert_eq!(write_budget.admit(Duration::from_hours(48), true, 0.0, 1), 0);
        assert_eq!(write_budget.admit(Duration::from_hours(47), true, 0.0, 1), 0, "time never goes back");
    }

    /// Chains are looked at from their ends: one that is declined for want of room comes again without its last block.
    #[test]
    fn a_chain_that_finds_no_room_is_offered_block_by_block() {
        let mut write_budget = WriteBudget::new(86_400 * 1000, 1000, true);
        assert_eq!(write_budget.admit(Duration::ZERO, false, 0.0, 360), 360);
        for blocks in (1..=200).rev() {
            assert_eq!(write_budget.admit(Duration::ZERO, false, 0.0, blocks), 0);
        }
        assert_eq!(write_budget.admit(Duration::from_mins(10), false, 0.9, 1), 1, "less was offered than has come in");
    }

    /// A process that starts again every few minutes, as a service does that is killed and restarted.
    #[test]
    fn restarts_write_no_more_than_one_run() {
        let mut written = Vec::new();
        for minutes in [7, 1, 20, 3, 50, 2].into_iter().cycle().take(24) {
            let is_new = written.is_empty();
            let mut write_budget = WriteBudget::new(10 * 86_400 * 1000, 1000, is_new);
            let taken = (0..minutes * 60).map(|second| write_budget.admit(Duration::from_secs(second), true, 0.0, 100));
            written.extend(taken.map(|blocks| blocks as f64));
        }
        let most = most_in_an_hour(&written);
        assert!((0.9 * 36_000.0..=1.1 * 36_000.0 + 1.0).contains(&most), "{most} blocks in an hour");
    }

    #[test]
    fn the_smallest_budget_admits_a_block() {
        for written_bytes in [4608, 8192, 69_632, 2_625_536] {
            let mut write_budget = WriteBudget::new(240 * written_bytes, written_bytes, true);
            assert_eq!(write_budget.admit(Duration::ZERO, true, 0.0, 1), 1, "{written_bytes} bytes a block");
        }
    }

    #[test]
    fn whole_chains_are_taken_by_their_coins() {
        let mut write_budget = WriteBudget::new(86_400 * 1000, 1000, true);
        let (mut whole, mut stubs) = (0, 0);
        for second in 0..20_000u32 {
            let coin = f64::from(second * 7919 % 1000) / 1000.0;
            let taken = write_budget.admit(Duration::from_secs(second.into()), false, coin, 4);
            whole += u32::from(taken == 4);
            stubs += u32::from(![0, 4].contains(&taken));
        }
        assert!(stubs * 50 < whole, "{stubs} chains were cut, and {whole} taken whole");
        assert!(
            (0.1..0.5).contains(&write_budget.share()),
            "a quarter of what is offered, not {}",
            write_budget.share()
        );
    }
}

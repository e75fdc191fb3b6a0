//! What a child said, and what follows from it for the store that it left.

use kvhoist::{Cache, Tier};

use super::{PREFIX, Plan, SUFFIX, load::WIDTH};
use crate::common::{fetch_verified, key};

/// What died, and so what it takes for a write to have outlived it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Death {
    /// The process: what the system took is kept.
    Process,
    /// The machine: what was flushed is kept.
    Machine,
}

/// How far a key has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Its store may have begun.
    Announced,
    /// Its store was acknowledged.
    Stored,
    /// Its removal may have begun.
    Removing,
    /// Its removal was acknowledged.
    Removed,
    /// Must be there.
    Kept,
    /// Must not be there.
    Gone,
    /// Died on the way: both are right.
    Unknown,
}

/// What is known of every key.
#[derive(Debug, Default, Clone)]
pub struct History {
    fates: Vec<Fate>,
    /// The last line: what the child was doing when it died.
    pub last: String,
}

/// What a store was found to hold.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Checked {
    /// Blocks that had to be there, and were.
    pub kept: u64,
    /// Blocks that had to be gone, and were.
    pub gone: u64,
    /// Blocks that were there of those that could be or not.
    pub found: u64,
    /// Of how many.
    pub open: u64,
}

impl std::ops::AddAssign for Checked {
    fn add_assign(&mut self, other: Checked) {
        self.kept += other.kept;
        self.gone += other.gone;
        self.found += other.found;
        self.open += other.open;
    }
}

impl History {
    /// The first key that no child has announced.
    pub fn next(&self) -> u64 {
        self.fates.len() as u64
    }

    /// Takes note of what was printed; false if it is no whole line of the child's.
    pub fn read(&mut self, line: &str) -> bool {
        let Some((_, line)) = line.split_once(PREFIX) else { return false };
        let Some(line) = line.trim_end().strip_suffix(SUFFIX) else { return false };
        self.note(line);
        true
    }

    /// Takes note of what a child said.
    pub fn note(&mut self, line: &str) {
        line.clone_into(&mut self.last);
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let number = || rest.parse::<usize>().expect("a number");
        match word {
            "store" => self.fates.resize(number(), Fate::Announced),
            "stored" => self.pass(number(), Fate::Announced, Fate::Stored),
            "synced" => {
                self.pass(number(), Fate::Stored, Fate::Kept);
                self.pass(number(), Fate::Removed, Fate::Gone);
            }
            "remove" => self.fates[number()] = Fate::Removing,
            "removed" => self.fates[number()] = Fate::Removed,
            "opening" | "opened" | "closing" => {}
            other => panic!("a child does not say {other}"),
        }
    }

    fn pass(&mut self, end: usize, from: Fate, to: Fate) {
        self.fates[..end].iter_mut().filter(|fate| **fate == from).for_each(|fate| *fate = to);
    }

    /// The child is dead: what was not acknowledged may be either way from now on.
    pub fn end(&mut self, plan: &Plan, death: Death) {
        let kept = death == Death::Process && !plan.write_back;
        let gone = death == Death::Process;
        for fate in &mut self.fates {
            *fate = match *fate {
                Fate::Stored if kept => Fate::Kept,
                Fate::Removed if gone => Fate::Gone,
                Fate::Kept => Fate::Kept,
                Fate::Gone => Fate::Gone,
                _ => Fate::Unknown,
            };
        }
    }

    /// Holds an opened store to it. Wrong bytes end the test where they are met; the rest is one list of words.
    pub async fn check(&self, plan: &Plan, cache: &Cache) -> Result<Checked, String> {
        let (mut checked, mut wrong) = (Checked::default(), Vec::new());
        // The oldest go first, and the order of storing is known up to what was stored at the same time.
        let evicted = if plan.evicts { (self.next() + 2 * WIDTH).saturating_sub(plan.slots()) } else { 0 };
        for (n, fate) in (0..).zip(&self.fates) {
            let there = fetch_verified(cache, n).await;
            match fate {
                Fate::Kept if there => checked.kept += 1,
                Fate::Kept if n < evicted => {}
                Fate::Kept => wrong.push(format!("{n} was acknowledged and is lost")),
                Fate::Gone if there => wrong.push(format!("{n} was removed and is back")),
                Fate::Gone => checked.gone += 1,
                _ => {
                    checked.open += 1;
                    checked.found += u64::from(there);
                }
            }
        }
        for n in self.next()..self.next() + 64 {
            if !cache.match_prefix(&[key(n)]).is_empty() {
                wrong.push(format!("{n} was never stored"));
            }
        }
        let stats = cache.stats();
        if stats.tier(Tier::Disk).resident > plan.slots() {
            wrong.push(format!("{} blocks in {} slots", stats.tier(Tier::Disk).resident, plan.slots()));
        }
        kvhoist::internals::validate(cache)?;
        if wrong.is_empty() {
            return Ok(checked);
        }
        Err(format!(
            "{} ({} bad checksums, {} bad records)",
            wrong.join("; "),
            stats.checksum_failures,
            stats.records_bad
        ))
    }
}

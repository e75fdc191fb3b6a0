//! Log messages that clients cause: at most so many of each kind a second.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

const PAUSE: Duration = Duration::from_secs(1);

/// How often a message of one kind may be logged in a second.
pub(super) struct Seldom {
    most: u32,
    state: Mutex<Logged>,
}

/// The second that began with a message: how many were logged in it, and how many were not since.
struct Logged {
    since: Option<Instant>,
    count: u32,
    others: u64,
}

impl Seldom {
    /// Once a second.
    pub(super) const fn new() -> Self {
        Seldom::at_most(1)
    }

    /// So many times a second.
    pub(super) const fn at_most(most: u32) -> Self {
        Seldom { most, state: Mutex::new(Logged { since: None, count: 0, others: 0 }) }
    }

    /// Whether to log a message now, and how many before it were not logged.
    pub(super) fn turn(&self) -> Option<u64> {
        self.turn_at(Instant::now())
    }

    fn turn_at(&self, now: Instant) -> Option<u64> {
        let mut last = self.state.lock().expect("nothing panics under it");
        if last.since.is_none_or(|since| now >= since + PAUSE) {
            (last.since, last.count) = (Some(now), 0);
        }
        if last.count == self.most {
            last.others += 1;
            return None;
        }
        last.count += 1;
        Some(std::mem::take(&mut last.others))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_a_second_is_logged_with_the_number_of_those_before() {
        let (seldom, begin) = (Seldom::new(), Instant::now());
        let turns: Vec<Option<u64>> =
            (0..25).map(|tenth| seldom.turn_at(begin + Duration::from_millis(100 * tenth))).collect();
        let logged: Vec<(usize, u64)> =
            turns.iter().enumerate().filter_map(|(tenth, turn)| Some((tenth, (*turn)?))).collect();
        assert_eq!(logged, [(0, 0), (10, 9), (20, 9)]);
    }

    #[test]
    fn a_few_at_once_are_all_logged() {
        let (seldom, begin) = (Seldom::at_most(3), Instant::now());
        let turns: Vec<Option<u64>> = (0..5).map(|_| seldom.turn_at(begin)).collect();
        assert_eq!(turns, [Some(0), Some(0), Some(0), None, None]);
        assert_eq!(seldom.turn_at(begin + PAUSE), Some(2));
    }
}

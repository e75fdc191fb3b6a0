//! Log messages that clients cause: at most one of each kind a second.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

const PAUSE: Duration = Duration::from_secs(1);

/// When a message of one kind was last logged, and how many were not since.
pub(super) struct Seldom(Mutex<(Option<Instant>, u64)>);

impl Seldom {
    pub(super) const fn new() -> Self {
        Seldom(Mutex::new((None, 0)))
    }

    /// Whether to log a message now, and how many before it were not logged.
    pub(super) fn turn(&self) -> Option<u64> {
        self.turn_at(Instant::now())
    }

    fn turn_at(&self, now: Instant) -> Option<u64> {
        let mut last = self.0.lock().expect("nothing panics under it");
        if last.0.is_some_and(|logged| now < logged + PAUSE) {
            last.1 += 1;
            return None;
        }
        last.0 = Some(now);
        Some(std::mem::take(&mut last.1))
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
}

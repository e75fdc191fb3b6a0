//! Round numbers along the axis of a plot.

/// Marks at equal round distances: 1, 2 or 5 times a power of ten.
#[derive(Debug)]
pub struct Ticks {
    step: f64,
    /// The highest value of the axis.
    most: f64,
}

impl Ticks {
    /// Four to ten marks for values up to `most`.
    pub fn new(most: f64) -> Self {
        let most = if most.is_finite() && most > 0.0 { most } else { 1.0 };
        let power = 10f64.powf((most / 4.0).log10().floor());
        // A hair more, for quotients that rounding made a little too small.
        let fits = |times: f64| times * power <= most / 4.0 * (1.0 + 1e-9);
        let step = [5.0, 2.0].into_iter().find(|&times| fits(times)).unwrap_or(1.0) * power;
        Ticks { step, most }
    }

    /// Marks whose distance is a whole number, for counts.
    pub fn whole(most: f64) -> Self {
        let ticks = Ticks::new(most);
        Ticks { step: ticks.step.max(1.0), ..ticks }
    }

    /// The first mark that is not below the highest value: the end of an axis that ends at a mark.
    pub fn end(&self) -> f64 {
        (self.most / self.step - 1e-9).ceil() * self.step
    }

    /// The marks from 0 to a value, each with its text.
    pub fn up_to(&self, end: f64) -> impl Iterator<Item = (f64, String)> + '_ {
        let digits = (-self.step.log10().floor()).max(0.0) as usize;
        let count = (end / self.step + 1e-9).floor() as usize;
        (0..=count).map(move |n| (n as f64 * self.step, format!("{:.digits$}", n as f64 * self.step)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(ticks: &Ticks, end: f64) -> Vec<String> {
        ticks.up_to(end).map(|(_, text)| text).collect()
    }

    #[test]
    fn marks_are_round_numbers() {
        assert_eq!(texts(&Ticks::whole(2088.0), 2088.0), ["0", "500", "1000", "1500", "2000"], "not 522, 1044");
        assert_eq!(texts(&Ticks::whole(3.0), 3.0), ["0", "1", "2", "3"], "no halves of a request");
        assert_eq!(
            texts(&Ticks::new(0.37), 0.4),
            ["0.00", "0.05", "0.10", "0.15", "0.20", "0.25", "0.30", "0.35", "0.40"]
        );
        assert_eq!(texts(&Ticks::new(0.0), 0.0), ["0.0"]);
    }

    #[test]
    fn an_axis_ends_at_a_mark_that_is_not_below_its_values() {
        for most in [1e-9, 0.37, 1.0, 4.0, 99.9, 100.0, 2088.0, 7.7e12] {
            let ticks = Ticks::new(most);
            let (end, count) = (ticks.end(), texts(&ticks, ticks.end()).len());
            assert!(end >= most * (1.0 - 1e-9) && end < most * 1.26, "{ticks:?} {end}");
            assert!((5..=11).contains(&count), "{ticks:?}: {count} marks with the one at 0");
        }
    }
}

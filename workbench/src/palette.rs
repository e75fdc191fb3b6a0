//! Colors of the lines and bars of a plot.

/// Colors that people tell apart, also those who see red and green alike (Okabe and Ito, without their yellow).
const FIRST: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d"];

/// The color of a line. No two lines have the same.
pub fn color(line: usize) -> String {
    FIRST.get(line).map_or_else(
        // The golden angle: hues that never meet again.
        || format!("hsl({:.1} 60% 35%)", (line as f64 * 137.508) % 360.0),
        |color| (*color).to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_lines_of_a_plot_have_one_color() {
        assert_eq!((0..40).map(color).collect::<HashSet<_>>().len(), 40);
    }
}

//! Bars in groups, as an SVG file.

use std::{fmt::Write as _, path::Path};

use kvhoist_workbench::{palette::color, ticks::Ticks};

use crate::{failure::Failure, output::OutputFile, plot};

const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 60.0;
const BAR: f64 = 18.0;
const GAP: f64 = 24.0;
/// Most room that a letter of a group's name takes.
const LETTER: f64 = 6.0;

/// Figures for a plot, if one was requested.
pub struct Plot {
    file: Option<OutputFile>,
    title: String,
    unit: &'static str,
    groups: Vec<String>,
    series: Vec<String>,
    /// Group, series, figure.
    bars: Vec<(usize, usize, f64)>,
}

impl Plot {
    /// Creates the file of the plot, if one was requested. Call it last of all checks of the flags.
    pub fn new(path: Option<&Path>, title: &str, unit: &'static str) -> Result<Self, Failure> {
        let file = path.map(plot::create).transpose()?;
        Ok(Plot { file, title: title.into(), unit, groups: Vec::new(), series: Vec::new(), bars: Vec::new() })
    }

    /// Adds a bar. Groups and series keep the order of their first bars.
    pub fn bar(&mut self, group: impl Into<String>, series: &str, figure: f64) {
        let place = |names: &mut Vec<String>, name: String| {
            names.iter().position(|known| *known == name).unwrap_or_else(|| {
                names.push(name);
                names.len() - 1
            })
        };
        let (group, series) = (place(&mut self.groups, group.into()), place(&mut self.series, series.into()));
        self.bars.push((group, series, figure));
    }

    /// Writes the file.
    pub fn write(mut self) -> Result<(), Failure> {
        let Some(file) = self.file.take() else { return Ok(()) };
        file.write(self.draw().as_bytes()).map(drop)
    }

    fn draw(&self) -> String {
        let letters = self.groups.iter().flat_map(|name| lines(name)).map(|line| line.chars().count()).max();
        let names_width = letters.unwrap_or(0) as f64 * LETTER + 6.0;
        let group_width = (self.series.len() as f64 * BAR + GAP).max(names_width);
        let right = (LEFT + self.groups.len() as f64 * group_width).max(600.0);
        let (width, bottom) = (right + 20.0, HEIGHT - BOTTOM);
        let ticks = Ticks::new(self.bars.iter().map(|bar| bar.2).fold(0.0, f64::max));
        let most = ticks.end();
        let mut svg = String::new();
        // Writing to a String cannot fail.
        let _ = write!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{width}\" height=\"{HEIGHT}\" \
             fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"20\" font-size=\"16\">{}, {}</text>\n\
             <path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"black\"/>\n",
            escaped(&self.title),
            self.unit,
        );
        for (value, text) in ticks.up_to(most) {
            let (x, y) = (LEFT - 6.0, bottom - (bottom - TOP) * value / most + 4.0);
            let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{text}</text>");
        }
        for &(group, series, figure) in &self.bars {
            let height = (bottom - TOP) * figure.max(0.0) / most;
            let bars = self.series.len() as f64 * BAR;
            let x = LEFT + (group as f64 + 0.5) * group_width - bars / 2.0 + series as f64 * BAR;
            let (y, color) = (bottom - height, color(series));
            let _ = writeln!(
                svg,
                "<rect x=\"{x}\" y=\"{y:.1}\" width=\"{}\" height=\"{height:.1}\" fill=\"{color}\">\
                 <title>{figure:.2}</title></rect>",
                BAR - 2.0
            );
        }
        for (at, name) in self.groups.iter().enumerate() {
            let x = LEFT + (at as f64 + 0.5) * group_width;
            for (line, y) in lines(name).zip([16.0, 29.0, 42.0]) {
                let (y, line) = (bottom + y, escaped(line));
                let _ =
                    writeln!(svg, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" font-size=\"10\">{line}</text>");
            }
        }
        let mut x = LEFT;
        for (at, name) in self.series.iter().enumerate() {
            let color = color(at);
            let _ = writeln!(
                svg,
                "<rect x=\"{x}\" y=\"28\" width=\"10\" height=\"10\" fill=\"{color}\"/>\
                 <text x=\"{}\" y=\"37\">{}</text>",
                x + 14.0,
                escaped(name)
            );
            x += 26.0 + name.chars().count() as f64 * 6.5;
        }
        svg.push_str("</svg>\n");
        svg
    }
}

/// The lines in which a group's name is drawn, three at most.
fn lines(name: &str) -> impl Iterator<Item = &str> {
    name.splitn(3, ", ")
}

/// Escapes text, which may contain users' paths, for an SVG element.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_high_as_their_figures() {
        let mut plot = Plot::new(None, "a < b", "GB/s").expect("no file");
        plot.bar("4 KiB", "bare", 50.0);
        plot.bar("4 KiB", "kvhoist", 25.0);
        plot.bar("1 MiB", "bare", 100.0);
        let drawn = plot.draw();
        assert!(drawn.contains("a &lt; b, GB/s") && drawn.ends_with("</svg>\n"), "{drawn}");
        for height in ["155.0", "77.5", "310.0"] {
            assert_eq!(drawn.matches(&format!("height=\"{height}\"")).count(), 1, "{height} in {drawn}");
        }
        for name in ["4 KiB", "1 MiB", "bare", "kvhoist"] {
            assert_eq!(drawn.matches(&format!(">{name}</text>")).count(), 1, "{name} in {drawn}");
        }
    }

    #[test]
    fn names_of_groups_do_not_overlap() {
        let mut plot = Plot::new(None, "routes", "MiB/s").expect("no file");
        for group in ["disk to device, 128.0 KiB x32", "disk to device, 1.0 MiB x32"] {
            plot.bar(group, "bare", 1.0);
        }
        let drawn = plot.draw();
        let places: Vec<f64> = drawn
            .lines()
            .filter(|line| line.contains(">disk to device</text>"))
            .filter_map(|line| line.split('"').nth(1)?.parse().ok())
            .collect();
        assert_eq!(places.len(), 2, "a line of its own for each part of a name: {drawn}");
        assert!(places[1] - places[0] >= "disk to device".len() as f64 * LETTER, "{drawn}");
    }
}

//! Lines over marks, a panel a trace, in an SVG file.

use std::fmt::Write as _;

use crate::{palette::color, ticks::Ticks};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 60.0;
const BOTTOM: f64 = 40.0;

/// One plot.
pub struct Panel {
    /// What stands above it.
    pub title: String,
    /// Along the axis, at equal distances.
    pub marks: Vec<String>,
    /// Names and values of 0 to 1, one a mark.
    pub lines: Vec<(String, Vec<f64>)>,
}

/// The panels below one another, as the text of an SVG file.
pub fn draw(panels: &[Panel]) -> String {
    stack(panels, (WIDTH, HEIGHT), draw_panel)
}

/// Draws each item into a panel of this width and height, below the one before, and returns the text of an SVG file.
pub fn stack<T>(items: &[T], (width, panel_height): (f64, f64), draw_panel: impl Fn(&mut String, &T)) -> String {
    let height = panel_height * items.len().max(1) as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for (at, item) in items.iter().enumerate() {
        // Writing to a String cannot fail.
        let _ = writeln!(svg, "<g transform=\"translate(0 {})\">", panel_height * at as f64);
        draw_panel(&mut svg, item);
        svg.push_str("</g>\n");
    }
    svg.push_str("</svg>\n");
    svg
}

fn draw_panel(svg: &mut String, panel: &Panel) {
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    let values = panel.lines.iter().flat_map(|(_, values)| values);
    // Percent of the references.
    let ticks = Ticks::new(values.fold(0.0f64, |highest, value| highest.max(*value * 100.0)).max(5.0));
    let x = |at: usize| LEFT + (right - LEFT) * (at as f64 + 0.5) / panel.marks.len().max(1) as f64;
    let y = |value: f64| bottom - (bottom - TOP) * value * 100.0 / ticks.end();
    let title = panel.title.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"24\" font-size=\"16\">{title}</text>");
    let _ = writeln!(svg, "<path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"black\"/>");
    for (percent, text) in ticks.up_to(ticks.end()) {
        let (at, x) = (y(percent / 100.0) + 4.0, LEFT - 8.0);
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{at:.1}\" text-anchor=\"end\">{text}%</text>");
    }
    for (at, mark) in panel.marks.iter().enumerate() {
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{mark}</text>", x(at), bottom + 18.0);
    }
    for (line, (name, values)) in panel.lines.iter().enumerate() {
        let color = color(line);
        let points: Vec<String> =
            values.iter().enumerate().map(|(at, value)| format!("{:.1},{:.1}", x(at), y(*value))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>",
            points.join(" ")
        );
        let at = LEFT + 110.0 * line as f64;
        let _ = writeln!(
            svg,
            "<rect x=\"{at}\" y=\"36\" width=\"12\" height=\"12\" fill=\"{color}\"/>\
             <text x=\"{}\" y=\"47\">{name}</text>",
            at + 18.0
        );
    }
}

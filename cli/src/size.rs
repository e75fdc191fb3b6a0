//! Sizes and times as people write them.

use std::time::Duration;

/// Parses a size by the [grammar](kvhoist::internals::size::parse_bytes) that all of kvhoist has.
///
/// # Errors
/// What was expected.
pub fn parse_bytes(text: &str) -> Result<usize, String> {
    let bytes = kvhoist::internals::size::parse_bytes(text).and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| format!("expected {}", kvhoist::internals::size::EXPECTED))
}

/// A number of bytes for people.
pub fn show_bytes(bytes: u64) -> String {
    let units = [("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((unit, shift)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

/// A time for people: three digits that count, more or less.
pub fn show_time(time: Duration) -> String {
    match time.as_secs_f64() {
        seconds if seconds < 1e-3 => format!("{:.0} us", seconds * 1e6),
        seconds if seconds < 1.0 => format!("{:.1} ms", seconds * 1e3),
        seconds => format!("{seconds:.1} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_in_the_largest_unit_that_they_fill() {
        assert_eq!((show_bytes(1536), show_bytes(1023)), ("1.5 KiB".into(), "1023 B".into()));
        assert_eq!(parse_bytes("2PiB").map(|bytes| show_bytes(bytes as u64)), Ok("2.0 PiB".into()));
        assert_eq!([7, 1_500, 2_250_000].map(|us| show_time(Duration::from_micros(us))), ["7 us", "1.5 ms", "2.2 s"]);
        assert_eq!(parse_bytes("1.5 KiB"), Ok(1536));
        assert!(parse_bytes("64XB").expect_err("no unit").contains("such as"));
    }
}

//! Sizes as people write them.

/// Parses `65536`, `64K`, `64KiB`, `1M`, `1MiB`, `2G`, `2GiB`: binary units.
///
/// # Errors
/// What was found and what was expected.
pub fn parse_bytes(text: &str) -> Result<usize, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim() {
        "" | "B" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        _ => return Err(format!("found `{text}`, expected a size such as 65536, 64KiB or 1MiB")),
    };
    let number: usize =
        number.parse().map_err(|_| format!("found `{text}`, expected a size such as 65536, 64KiB or 1MiB"))?;
    let bytes = number.checked_shl(shift).filter(|bytes| bytes >> shift == number);
    bytes.ok_or_else(|| format!("found `{text}`, expected at most {} bytes", usize::MAX))
}

/// A number of bytes for people.
pub fn show_bytes(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((unit, shift)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary_and_checked() {
        for (text, bytes) in [("65536", 65536), ("64KiB", 65536), ("64K", 65536), ("1MiB", 1 << 20), ("2G", 2 << 30)] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "KiB", "-1", "1.5M", "1 kb", "64KB", "99999999999T", "18446744073709551616"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
        assert_eq!(show_bytes(1536), "1.5 KiB");
    }
}

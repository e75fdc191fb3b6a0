//! Parses sizes: one grammar for the command, the Python package and the environment.

/// What [`parse_bytes`] accepts, for error messages: "expected ...".
pub const EXPECTED: &str = "a positive number of bytes, such as 65536, 64KiB, 1.5MiB, 200Gi or 10GB";

/// Parses a number with an optional unit, in any case and with optional space between: `65536`, `64KiB`, `1.5 MiB`,
/// `200Gi`, `10GB`.
///
/// `K`, `Ki` and `KiB` are 1024 bytes and `KB` is 1000 bytes; `M`, `G`, `T` and `P` follow the same pattern. A fraction
/// of a byte is dropped.
///
/// `None` for any other text, and for values outside 1 to 2^63 - 1.
///
/// ```
/// assert_eq!(kvhoist::internals::size::parse_bytes("1.5 MiB"), Some(1_572_864));
/// assert_eq!(kvhoist::internals::size::parse_bytes("10GB"), Some(10_000_000_000));
/// assert_eq!(kvhoist::internals::size::parse_bytes("10 apples"), None);
/// ```
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    // The number of digits is limited so that nothing overflows.
    if whole.is_empty() || whole.len() > 20 || fraction.is_empty() || fraction.len() > 18 || fraction.contains('.') {
        return None;
    }
    let unit = u128::from(unit_bytes(unit.trim_start())?);
    let tenths = fraction.parse::<u128>().ok()? * unit / 10u128.pow(fraction.len() as u32);
    let bytes = whole.parse::<u128>().ok()? * unit + tenths;
    (1..1 << 63).contains(&bytes).then_some(bytes as u64)
}

fn unit_bytes(unit: &str) -> Option<u64> {
    let upper = unit.to_ascii_uppercase();
    if matches!(upper.as_str(), "" | "B") {
        return Some(1);
    }
    let power = "KMGTP".find(*upper.as_bytes().first()? as char)? as u32 + 1;
    match upper.get(1..)? {
        "" | "I" | "IB" => Some(1 << (10 * power)),
        "B" => Some(1000u64.pow(power)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_binary_unless_they_end_in_a_plain_b() {
        let (kib, mib, gib, tib) = (1u64 << 10, 1u64 << 20, 1u64 << 30, 1u64 << 40);
        let cases = [
            ("65536", 65536),
            ("1", 1),
            ("7B", 7),
            (" 64 KiB ", 64 * kib),
            ("64kib", 64 * kib),
            ("64K", 64 * kib),
            ("64Ki", 64 * kib),
            ("64kB", 64_000),
            ("1.5MiB", mib + mib / 2),
            ("1.5 mb", 1_500_000),
            ("200Gi", 200 * gib),
            ("10GB", 10_000_000_000),
            ("2G", 2 * gib),
            ("0.5T", tib / 2),
            ("3TB", 3_000_000_000_000),
            ("2PiB", 2048 * tib),
            ("2pi", 2048 * tib),
            ("1.5PB", 1_500_000_000_000_000),
            ("8191.999999999999999999P", (1 << 63) - 1),
            ("0.1KiB", 102),
            ("1.0", 1),
            ("9223372036854775807", (1 << 63) - 1),
            ("8388607.999999999999999999T", (1 << 63) - 1),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse_bytes(text), Some(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_none() {
        let cases = [
            "",
            " ",
            "KiB",
            "-1",
            "+1",
            "0",
            "0.4",
            "0.0GiB",
            "1..5M",
            "1.5.5",
            ".5G",
            "1.",
            "1.K",
            "1e9",
            "0x10",
            "1,5G",
            "1_000",
            "10 apples",
            "1KiBs",
            "1KK",
            "1Bi",
            "1 K B",
            "1é",
            "é",
            "١",
            "1 GiB!",
            "inf",
            "nan",
            "8388608T",
            "8192P",
            "1E",
            "9223372036854775808",
            "18446744073709551616",
            "99999999999T",
            "99999999999999999999P",
            "111111111111111111111",
            "1.1111111111111111111",
        ];
        for text in cases {
            assert_eq!(parse_bytes(text), None, "{text:?}");
        }
    }
}

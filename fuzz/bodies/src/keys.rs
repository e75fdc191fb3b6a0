//! Keys and sizes as people write them.

use kvhoist::BlockKey;
use kvhoist_cli::size::{parse_bytes, show_bytes};

/// Reads `data` as a key's bytes, a key's text and a size.
pub fn run(data: &[u8]) {
    assert_eq!(BlockKey::try_from(data).is_ok(), data.len() == 32);
    let text = String::from_utf8_lossy(data);
    key(&text);
    size(&text);
    if let Some(bytes) = data.first_chunk() {
        show(u64::from_le_bytes(*bytes));
    }
}

fn key(text: &str) {
    let expected = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match text.parse::<BlockKey>() {
        Ok(key) => {
            assert!(expected, "{text:?} is no key");
            assert_eq!(key.to_string(), text.to_ascii_lowercase());
            let json = serde_json::to_string(&key).expect("a key is a string");
            assert_eq!(serde_json::from_str::<BlockKey>(&json).expect("as it was written"), key);
        }
        Err(error) => assert!(!expected && !error.to_string().is_empty(), "{text:?}: {error}"),
    }
}

fn size(text: &str) {
    match parse_bytes(text) {
        Ok(bytes) => assert_eq!(naive_size(text), Some(bytes as u128), "{text:?}"),
        Err(what) => {
            assert!(naive_size(text).is_none_or(|bytes| bytes > usize::MAX as u128), "{text:?}: {what}");
            assert!(what.contains("expected"), "{what}");
        }
    }
}

/// The same grammar, digit by digit, in numbers that do not overflow.
fn naive_size(text: &str) -> Option<u128> {
    const UNITS: [(&[&str], u128); 11] = [
        (&["", "b"], 1),
        (&["k", "ki", "kib"], 1 << 10),
        (&["kb"], 1_000),
        (&["m", "mi", "mib"], 1 << 20),
        (&["mb"], 1_000_000),
        (&["g", "gi", "gib"], 1 << 30),
        (&["gb"], 1_000_000_000),
        (&["t", "ti", "tib"], 1 << 40),
        (&["tb"], 1_000_000_000_000),
        (&["p", "pi", "pib"], 1 << 50),
        (&["pb"], 1_000_000_000_000_000),
    ];
    let text = text.trim();
    let number = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let (digits, unit) = (&text[..text.len() - number.len()], number.trim_start().to_ascii_lowercase());
    let (_, unit) = UNITS.iter().find(|(names, _)| names.contains(&unit.as_str()))?;
    let mut parts = digits.split('.');
    let (whole, fraction) = (parts.next()?, parts.next().unwrap_or("0"));
    let count = |part: &str| part.bytes().fold(0u128, |sum, digit| sum * 10 + u128::from(digit - b'0'));
    let fits = (1..=20).contains(&whole.len()) && (1..=18).contains(&fraction.len()) && parts.next().is_none();
    let fits = fits.then(|| count(whole) * unit + count(fraction) * unit / 10u128.pow(fraction.len() as u32));
    fits.filter(|bytes| (1..1 << 63).contains(bytes))
}

/// What is shown is within a twentieth of its unit of what was meant.
fn show(bytes: u64) {
    let shown = show_bytes(bytes);
    let (number, unit) = shown.split_once(' ').expect("a number and a unit");
    let number: f64 = number.parse().expect("a number");
    let unit = naive_size(&format!("1{unit}")).expect("a unit that is understood") as f64;
    assert!((number * unit - bytes as f64).abs() <= unit * 0.051, "{bytes}: {shown}");
}

//! Keys: digests that name a block's content and its whole prefix.

use std::{fmt, str::FromStr};

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::error::Error;

const KEY_BYTES: usize = 32;

/// A 32-byte digest naming a block's content and its whole prefix.
///
/// Displayed and parsed as 64 hex characters; serialized as that string in human-readable formats and as bytes in
/// others. `Debug` shows only the first four bytes: a key reveals the prompt, and does not belong in logs.
///
/// ```
/// use kvhoist::BlockKey;
/// let key: BlockKey = "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF".parse()?;
/// assert_eq!(key.as_bytes()[1], 0x11);
/// assert_eq!(format!("{key:?}"), "BlockKey(00112233..)");
/// # Ok::<(), kvhoist::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey([u8; KEY_BYTES]);

impl BlockKey {
    /// The key with these 32 bytes.
    pub const fn new(bytes: [u8; KEY_BYTES]) -> Self {
        BlockKey(bytes)
    }

    /// The 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt_short(f, "BlockKey", &self.0)
    }
}

/// The first four bytes of a digest: enough to follow it through a log, too few to use it.
pub(super) fn fmt_short(f: &mut fmt::Formatter<'_>, name: &str, bytes: &[u8; KEY_BYTES]) -> fmt::Result {
    write!(f, "{name}({:02x}{:02x}{:02x}{:02x}..)", bytes[0], bytes[1], bytes[2], bytes[3])
}

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut hex = [0; 2 * KEY_BYTES];
        for (pair, byte) in hex.chunks_exact_mut(2).zip(self.0) {
            pair[0] = DIGITS[usize::from(byte >> 4)];
            pair[1] = DIGITS[usize::from(byte & 15)];
        }
        f.pad(std::str::from_utf8(&hex).expect("hex digits are ASCII"))
    }
}

impl From<[u8; KEY_BYTES]> for BlockKey {
    fn from(bytes: [u8; KEY_BYTES]) -> Self {
        BlockKey(bytes)
    }
}

impl TryFrom<&[u8]> for BlockKey {
    type Error = Error;

    fn try_from(bytes: &[u8]) -> Result<Self, Error> {
        bytes
            .try_into()
            .map(BlockKey)
            .map_err(|_| Error::argument("key", format!("{} bytes", bytes.len()), BYTES_EXPECTED))
    }
}

impl FromStr for BlockKey {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = text.chars().count();
        if found != 2 * KEY_BYTES {
            return Err(Error::argument("key", format!("{found} characters"), HEX_EXPECTED));
        }
        let mut bytes = [0; KEY_BYTES];
        for (position, found) in text.chars().enumerate() {
            let Some(digit) = found.to_digit(16) else {
                let found = format!("{found:?} at character {position} (counted from 0)");
                return Err(Error::argument("key", found, HEX_EXPECTED));
            };
            bytes[position / 2] = (bytes[position / 2] << 4) | u8::try_from(digit).expect("a hex digit is under 16");
        }
        Ok(BlockKey(bytes))
    }
}

const HEX_EXPECTED: &str = "a key of exactly 64 hex characters";
const BYTES_EXPECTED: &str = "a key of exactly 32 bytes";

impl Serialize for BlockKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() { serializer.collect_str(self) } else { serializer.serialize_bytes(&self.0) }
    }
}

impl<'de> Deserialize<'de> for BlockKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let key = if deserializer.is_human_readable() {
            String::deserialize(deserializer)?.parse()
        } else {
            // Formats without a byte-string type present bytes as a sequence of numbers, which this takes too.
            Bytes::deserialize(deserializer)?[..].try_into()
        };
        key.map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use serde_test::{Configure, Token, assert_de_tokens, assert_de_tokens_error, assert_tokens};

    use super::*;

    const HEX: &str = "00112233445566778899aabbccddeeff0123456789abcdeffedcba9876543210";

    fn key() -> BlockKey {
        HEX.parse().expect("64 hex characters")
    }

    #[test]
    fn hex_is_parsed_in_either_case_and_shown_in_lower() {
        assert_eq!(key().to_string(), HEX);
        assert_eq!(HEX.to_uppercase().parse::<BlockKey>().expect("a key"), key());
        assert_eq!(key().as_bytes()[..4], [0x00, 0x11, 0x22, 0x33]);
        assert_eq!(key().as_bytes()[28..], [0x76, 0x54, 0x32, 0x10]);
    }

    #[test]
    fn what_is_no_key_is_named() {
        let refused = |text: &str| text.parse::<BlockKey>().expect_err(text).to_string();
        assert_eq!(refused(&HEX[1..]), format!("key: found 63 characters, expected {HEX_EXPECTED}"));
        assert!(refused("").contains("found 0 characters"));
        // 64 bytes of UTF-8, and 32 characters.
        assert!(refused(&"é".repeat(32)).contains("found 32 characters"));
        assert!(refused(&format!("{}g{}", &HEX[..40], &HEX[41..])).contains("'g' at character 40 "));
        assert!(refused(&format!("+{}", &HEX[1..])).contains("'+' at character 0 "));
        // A digit elsewhere in Unicode is no hex digit.
        assert!(refused(&format!("{}\u{ff11}", &HEX[..63])).contains("'\u{ff11}' at character 63 "));
        let short = BlockKey::try_from(&[0_u8; 31][..]).expect_err("31 bytes").to_string();
        assert_eq!(short, format!("key: found 31 bytes, expected {BYTES_EXPECTED}"));
        assert_eq!(BlockKey::try_from(&key().as_bytes()[..]).expect("32 bytes"), key());
    }

    #[test]
    fn debug_shows_no_more_than_four_bytes() {
        assert_eq!(format!("{:?}", key()), "BlockKey(00112233..)");
    }

    #[test]
    fn serde_is_hex_for_humans_and_bytes_for_machines() {
        static BYTES: [u8; 32] = [7; 32];
        assert_tokens(&key().readable(), &[Token::Str(HEX)]);
        assert_tokens(&BlockKey::new(BYTES).compact(), &[Token::Bytes(&BYTES)]);

        let mut sequence = vec![Token::Seq { len: Some(32) }];
        sequence.extend([Token::U8(7); 32]);
        sequence.push(Token::SeqEnd);
        assert_de_tokens(&BlockKey::new(BYTES).compact(), &sequence);
    }

    #[test]
    fn serde_refuses_what_is_no_key() {
        use serde_test::{Compact, Readable};
        assert_de_tokens_error::<Readable<BlockKey>>(
            &[Token::Str("abc")],
            "key: found 3 characters, expected a key of exactly 64 hex characters",
        );
        assert_de_tokens_error::<Compact<BlockKey>>(
            &[Token::Bytes(&[1, 2])],
            "key: found 2 bytes, expected a key of exactly 32 bytes",
        );
        assert_de_tokens_error::<Compact<BlockKey>>(
            &[Token::Seq { len: None }, Token::U8(1), Token::SeqEnd],
            "key: found 1 bytes, expected a key of exactly 32 bytes",
        );
    }
}

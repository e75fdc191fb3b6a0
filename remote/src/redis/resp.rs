//! RESP2, the protocol of Redis: commands as they are sent, and their replies.
//!
//! Written here because a value is received where it belongs: the clients that there are receive a reply into memory of
//! their own first, however large it is. What is left of the protocol is five kinds of replies.

use std::{
    io::{self, IoSlice},
    mem::size_of,
};

use bytes::Bytes;
use kvhoist::remote::ReadBuffer;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Bytes of a line at most: a text, a length, or an error.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// Memory of a reply at most, with all that is in it: a hundred times a page of names.
pub const REPLY_BYTES_MAX: usize = 16 << 20;
/// Arrays in arrays.
const DEPTH_MAX: u32 = 4;

/// A reply that is no error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    Nil,
    Integer(i64),
    /// A status or a string; bytes that are no UTF-8 are replaced.
    Text(String),
    Array(Vec<Reply>),
}

/// Why there is no reply.
#[derive(Debug)]
pub enum Failure {
    /// The server answers an error: its code, and a text.
    Answer(String),
    /// What came is no reply of Redis.
    Other(&'static str),
    Network(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Network(error)
    }
}

/// A command: its name and its arguments.
pub fn command(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = start(words.len());
    words.iter().for_each(|word| push(&mut bytes, word));
    bytes
}

/// A command with a value, in parts, which stands behind the first two words.
pub fn command_with_value(words: &[&[u8]], value: &[Bytes], options: &[&[u8]]) -> Vec<Bytes> {
    let mut before = start(words.len() + 1 + options.len());
    words.iter().for_each(|word| push(&mut before, word));
    let length: usize = value.iter().map(Bytes::len).sum();
    before.extend_from_slice(format!("${length}\r\n").as_bytes());
    let mut after = b"\r\n".to_vec();
    options.iter().for_each(|word| push(&mut after, word));
    [Bytes::from(before)].into_iter().chain(value.iter().cloned()).chain([Bytes::from(after)]).collect()
}

fn start(words: usize) -> Vec<u8> {
    format!("*{words}\r\n").into_bytes()
}

fn push(command: &mut Vec<u8>, word: &[u8]) {
    command.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
    command.extend_from_slice(word);
    command.extend_from_slice(b"\r\n");
}

/// Sends all parts, without a copy of them.
pub async fn send<W: AsyncWrite + Unpin>(stream: &mut W, parts: &[Bytes]) -> io::Result<()> {
    let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut slices = &mut slices[..];
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match stream.write_vectored(slices).await? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            sent => IoSlice::advance_slices(&mut slices, sent),
        }
    }
    stream.flush().await
}

/// Receives a reply.
///
/// # Errors
/// [`Failure`]; the rest of the reply may be left in the stream.
pub async fn reply<R: AsyncBufRead + Unpin + Send>(stream: &mut R) -> Result<Reply, Failure> {
    reply_within(stream, &mut REPLY_BYTES_MAX.clone(), DEPTH_MAX).await
}

/// Receives a reply that takes as much memory and is as deep as is left.
async fn reply_within<R: AsyncBufRead + Unpin + Send>(
    stream: &mut R,
    bytes_left: &mut usize,
    depth_left: u32,
) -> Result<Reply, Failure> {
    let line = line(stream).await?;
    take(bytes_left, line.len())?;
    let (kind, text) = line.split_at_checked(1).ok_or(Failure::Other("an empty line"))?;
    match kind {
        "+" => Ok(Reply::Text(text.to_owned())),
        "-" => Err(Failure::Answer(text.to_owned())),
        ":" => text.parse().map(Reply::Integer).map_err(|_| Failure::Other("no number")),
        "$" => match length(text)? {
            None => Ok(Reply::Nil),
            Some(length) => {
                take(bytes_left, length)?;
                // No memory for what has not come.
                let mut bytes = Vec::new();
                if stream.take(length as u64).read_to_end(&mut bytes).await? < length {
                    return Err(closed());
                }
                end_of_string(stream).await?;
                Ok(Reply::Text(String::from_utf8_lossy(&bytes).into_owned()))
            }
        },
        "*" if depth_left > 0 => match length(text)? {
            None => Ok(Reply::Nil),
            Some(length) => {
                take(bytes_left, length.saturating_mul(size_of::<Reply>()))?;
                let mut elements = Vec::new();
                for _ in 0..length {
                    elements.push(Box::pin(reply_within(stream, bytes_left, depth_left - 1)).await?);
                }
                Ok(Reply::Array(elements))
            }
        },
        _ => Err(Failure::Other("another kind of reply")),
    }
}

/// Takes memory of what a reply may have.
fn take(bytes_left: &mut usize, bytes: usize) -> Result<(), Failure> {
    *bytes_left = bytes_left.checked_sub(bytes).ok_or(Failure::Other("a reply of more than 16 MiB"))?;
    Ok(())
}

/// Receives a string into the buffer: whole, whatever room is left then.
///
/// # Errors
/// As of [`reply`], also for a string that is longer than the buffer: a range is not.
pub async fn string_into<R: AsyncBufRead + Unpin>(stream: &mut R, buffer: &mut ReadBuffer) -> Result<(), Failure> {
    let line = line(stream).await?;
    let mut rest = match line.split_at_checked(1) {
        Some(("$", text)) => length(text)?.unwrap_or(0),
        Some(("-", text)) => return Err(Failure::Answer(text.to_owned())),
        _ => return Err(Failure::Other("no string")),
    };
    if rest > buffer.remaining() {
        return Err(Failure::Other("a string of another length"));
    }
    while rest > 0 {
        let received = stream.fill_buf().await?;
        let now = &received[..received.len().min(rest)];
        if now.is_empty() {
            return Err(closed());
        }
        buffer.put(now).expect("not longer than what remains");
        let now = now.len();
        stream.consume(now);
        rest -= now;
    }
    end_of_string(stream).await
}

async fn end_of_string<R: AsyncBufRead + Unpin>(stream: &mut R) -> Result<(), Failure> {
    let mut end = [0; 2];
    stream.read_exact(&mut end).await?;
    if end == *b"\r\n" { Ok(()) } else { Err(Failure::Other("a string that goes on")) }
}

async fn line<R: AsyncBufRead + Unpin>(stream: &mut R) -> Result<String, Failure> {
    let mut line = Vec::new();
    stream.take(LINE_BYTES_MAX).read_until(b'\n', &mut line).await?;
    match line.strip_suffix(b"\r\n") {
        Some(text) => Ok(String::from_utf8_lossy(text).into_owned()),
        None if line.is_empty() => Err(closed()),
        None => Err(Failure::Other("a line without an end")),
    }
}

/// The length of a string or an array; `None` for one that is not there.
fn length(text: &str) -> Result<Option<usize>, Failure> {
    match text.parse() {
        Ok(length) => Ok(Some(length)),
        _ if text == "-1" => Ok(None),
        _ => Err(Failure::Other("another length")),
    }
}

fn closed() -> Failure {
    Failure::Network(io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use pollster::block_on;

    use super::*;

    fn parse(bytes: &[u8]) -> Result<Reply, String> {
        block_on(reply(&mut &*bytes)).map_err(|failure| format!("{failure:?}"))
    }

    #[test]
    fn replies_are_read() {
        let text = |text: &str| Reply::Text(text.into());
        assert_eq!(parse(b"+OK\r\n"), Ok(text("OK")));
        assert_eq!(parse(b":-12\r\n"), Ok(Reply::Integer(-12)));
        assert_eq!(parse(b"$3\r\na\nb\r\n"), Ok(text("a\nb")));
        assert_eq!(parse(b"$0\r\n\r\n"), Ok(text("")));
        assert_eq!(parse(b"$-1\r\n"), Ok(Reply::Nil));
        let page = Reply::Array(vec![text("7"), Reply::Array(vec![text("x"), text("y")])]);
        assert_eq!(parse(b"*2\r\n$1\r\n7\r\n*2\r\n$1\r\nx\r\n$1\r\ny\r\n"), Ok(page));
        assert_eq!(parse(b"-NOAUTH no\r\n"), Err(r#"Answer("NOAUTH no")"#.into()));
    }

    #[test]
    fn what_is_no_reply_is_an_error_and_takes_no_memory() {
        for bytes in [
            &b""[..],
            b"+OK",
            b"\r\n",
            b"HTTP/1.1 400 Bad Request\r\n",
            b":x\r\n",
            b"$3\r\nabcd\r\n",
            b"$3\r\nab",
            b"$-2\r\n",
            b"$99999999999\r\n",
            b"*99999999\r\n",
            b"*1000000\r\n",
            b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n+OK\r\n",
        ] {
            let failure = parse(bytes).expect_err("no reply");
            assert!(!failure.starts_with("Answer"), "{bytes:?}: {failure}");
        }
        let endless = vec![b'+'; LINE_BYTES_MAX as usize + 100];
        assert!(parse(&endless).expect_err("no end").contains("a line without an end"));
    }

    #[test]
    fn a_reply_has_a_limit_in_all() {
        let too_much = |bytes: &[u8]| parse(bytes).expect_err("too much").contains("16 MiB");
        assert!(too_much(format!("${REPLY_BYTES_MAX}\r\n").as_bytes()), "a string");
        assert!(too_much(format!("*{}\r\n", REPLY_BYTES_MAX / size_of::<Reply>()).as_bytes()), "elements");
        let page = |names: usize, length: usize| {
            let name = format!("${length}\r\n{}\r\n", "x".repeat(length));
            format!("*2\r\n$1\r\n7\r\n*{names}\r\n{}", name.repeat(names)).into_bytes()
        };
        assert!(parse(&page(10_000, 138)).is_ok(), "ten times a page of names");
        assert!(too_much(&page(20, 1 << 20)), "parts, each of which is within the limit");
        assert!(too_much(&[b"*400000\r\n", &b":1000000000000000\r\n".repeat(400_000)[..]].concat()), "numbers");
    }

    #[test]
    fn a_string_is_received_into_its_buffer() {
        let into = |bytes: &[u8], room| {
            let mut buffer = ReadBuffer::new(room);
            block_on(string_into(&mut &*bytes, &mut buffer)).map(|()| buffer)
        };
        let whole = into(b"$4\r\n\r\n\r\n\r\n", 4).expect("received").into_bytes();
        assert_eq!(whole, Ok(b"\r\n\r\n".to_vec()));
        for (bytes, room) in [(&b"$0\r\n\r\n"[..], 4), (b"$3\r\nabc\r\n", 1)] {
            assert_eq!(into(bytes, 4).expect("received").remaining(), room);
        }
        for bytes in
            [&b"$4\r\nabc"[..], b"$4\r\nabcde\r\n", b"$5\r\nabcde\r\n", b"+abcd\r\n", b"$x\r\n", b"-ERR no\r\n"]
        {
            assert!(into(bytes, 4).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn commands_are_sent_in_parts() {
        assert_eq!(command(&[b"GET", b"a\r\n"]), b"*2\r\n$3\r\nGET\r\n$3\r\na\r\n\r\n");
        let parts = [Bytes::from_static(b"12"), Bytes::new(), Bytes::from_static(b"3")];
        let sent = command_with_value(&[b"SET", b"a"], &parts, &[b"NX"]);
        let mut bytes = Vec::new();
        block_on(send(&mut bytes, &sent)).expect("memory takes all");
        assert_eq!(bytes, b"*4\r\n$3\r\nSET\r\n$1\r\na\r\n$3\r\n123\r\n$2\r\nNX\r\n");
    }
}

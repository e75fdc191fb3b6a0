//! RESP2, the protocol of Redis: commands as they are sent, and their replies.
//!
//! Written here because a value is received where it belongs: the clients that there are receive a reply into memory of
//! their own first, however large it is. What is left of the protocol is five kinds of replies.

use std::io::IoSlice;

use bytes::Bytes;
use kvhoist::remote::{ReadBuffer, RemoteError};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::failure::{of_network, of_redis};

/// Bytes of a line at most: a text, a length, or an error.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// Bytes of a string at most that is not received into a given buffer: a name.
const STRING_BYTES_MAX: usize = 1 << 20;
/// Elements of an array at most: a page of names has about a thousand.
const ELEMENTS_MAX: usize = 1 << 20;
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
pub async fn send<W: AsyncWrite + Unpin>(stream: &mut W, parts: &[Bytes]) -> Result<(), RemoteError> {
    let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut slices = &mut slices[..];
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match stream.write_vectored(slices).await.map_err(|error| of_network(&error))? {
            0 => return Err(closed()),
            sent => IoSlice::advance_slices(&mut slices, sent),
        }
    }
    stream.flush().await.map_err(|error| of_network(&error))
}

/// Receives a reply.
///
/// # Errors
/// One that the server answers, by its code; [`RemoteError::Unavailable`] for what is no reply.
pub async fn reply<R: AsyncBufRead + Unpin + Send>(stream: &mut R) -> Result<Reply, RemoteError> {
    reply_at(stream, 0).await
}

async fn reply_at<R: AsyncBufRead + Unpin + Send>(stream: &mut R, depth: u32) -> Result<Reply, RemoteError> {
    let line = line(stream).await?;
    let (kind, text) = line.split_at_checked(1).ok_or_else(|| other("an empty line"))?;
    match kind {
        "+" => Ok(Reply::Text(text.to_owned())),
        "-" => Err(of_redis(text)),
        ":" => text.parse().map(Reply::Integer).map_err(|_| other("no number")),
        "$" => match length(text, STRING_BYTES_MAX)? {
            None => Ok(Reply::Nil),
            Some(length) => {
                let mut bytes = vec![0; length];
                stream.read_exact(&mut bytes).await.map_err(|error| of_network(&error))?;
                end_of_string(stream).await?;
                Ok(Reply::Text(String::from_utf8_lossy(&bytes).into_owned()))
            }
        },
        "*" if depth < DEPTH_MAX => match length(text, ELEMENTS_MAX)? {
            None => Ok(Reply::Nil),
            Some(length) => {
                let mut elements = Vec::new();
                for _ in 0..length {
                    elements.push(Box::pin(reply_at(stream, depth + 1)).await?);
                }
                Ok(Reply::Array(elements))
            }
        },
        _ => Err(other("another kind of reply")),
    }
}

/// Receives a string into the buffer: whole, whatever room is left then.
///
/// # Errors
/// As of [`reply`], also for a string that is longer than the buffer: a range is not.
pub async fn string_into<R: AsyncBufRead + Unpin>(stream: &mut R, buffer: &mut ReadBuffer) -> Result<(), RemoteError> {
    let line = line(stream).await?;
    let mut rest = match line.split_at_checked(1) {
        Some(("$", text)) => length(text, buffer.remaining())?.unwrap_or(0),
        Some(("-", text)) => return Err(of_redis(text)),
        _ => return Err(other("no string")),
    };
    while rest > 0 {
        let spare = buffer.spare();
        let room = spare.len().min(rest);
        let received = receive(stream, &mut spare[..room]).await?;
        buffer.advance(received);
        rest -= received;
    }
    end_of_string(stream).await
}

/// Receives what is there, at least a byte.
async fn receive<R: AsyncRead + Unpin>(stream: &mut R, memory: &mut [u8]) -> Result<usize, RemoteError> {
    match stream.read(memory).await.map_err(|error| of_network(&error))? {
        0 => Err(closed()),
        received => Ok(received),
    }
}

async fn end_of_string<R: AsyncRead + Unpin>(stream: &mut R) -> Result<(), RemoteError> {
    let mut end = [0; 2];
    stream.read_exact(&mut end).await.map_err(|error| of_network(&error))?;
    if end == *b"\r\n" { Ok(()) } else { Err(other("a string that goes on")) }
}

async fn line<R: AsyncBufRead + Unpin>(stream: &mut R) -> Result<String, RemoteError> {
    let mut line = Vec::new();
    stream.take(LINE_BYTES_MAX).read_until(b'\n', &mut line).await.map_err(|error| of_network(&error))?;
    match line.strip_suffix(b"\r\n") {
        Some(text) => Ok(String::from_utf8_lossy(text).into_owned()),
        None if line.is_empty() => Err(closed()),
        None => Err(other("a line without an end")),
    }
}

/// The length of a string or an array; `None` for one that is not there.
fn length(text: &str, most: usize) -> Result<Option<usize>, RemoteError> {
    match text.parse() {
        Ok(length) if length <= most => Ok(Some(length)),
        _ if text == "-1" => Ok(None),
        _ => Err(other("another length")),
    }
}

fn closed() -> RemoteError {
    RemoteError::Unavailable("the server has closed the connection".into())
}

fn other(found: &str) -> RemoteError {
    RemoteError::Unavailable(format!("found {found}, expected a reply of Redis: is it one that listens there?"))
}

#[cfg(test)]
mod tests {
    use pollster::block_on;

    use super::*;

    fn parse(bytes: &[u8]) -> Result<Reply, RemoteError> {
        block_on(reply(&mut &*bytes))
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
        assert!(matches!(parse(b"-NOAUTH no\r\n"), Err(RemoteError::Refused(_))));
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
            let error = parse(bytes).expect_err("no reply");
            assert!(matches!(error, RemoteError::Unavailable(_)), "{bytes:?}: {error}");
        }
        let endless = vec![b'+'; LINE_BYTES_MAX as usize + 100];
        assert!(parse(&endless).expect_err("no end").to_string().contains("a line without an end"));
    }

    #[test]
    fn a_string_is_received_into_its_buffer() {
        let into = |bytes: &[u8], room| {
            let mut buffer = ReadBuffer::new(room);
            block_on(string_into(&mut &*bytes, &mut buffer)).map(|()| buffer)
        };
        let whole = into(b"$4\r\n\r\n\r\n\r\n", 4).and_then(ReadBuffer::into_bytes);
        assert_eq!(whole, Ok(b"\r\n\r\n".to_vec()));
        for (bytes, room) in [(&b"$0\r\n\r\n"[..], 4), (b"$3\r\nabc\r\n", 1)] {
            assert_eq!(into(bytes, 4).expect("received").remaining(), room);
        }
        for bytes in
            [&b"$4\r\nabc"[..], b"$4\r\nabcde\r\n", b"$5\r\nabcde\r\n", b"+abcd\r\n", b"$x\r\n", b"-ERR no\r\n"]
        {
            assert!(matches!(into(bytes, 4), Err(RemoteError::Unavailable(_))), "{bytes:?}");
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

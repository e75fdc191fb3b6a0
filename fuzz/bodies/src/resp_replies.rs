//! Replies of a Redis: bytes from a server that may be none.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use arbitrary::{Arbitrary, Unstructured};
use kvhoist::remote::ReadBuffer;
use pollster::block_on;
use tokio::io::{AsyncRead, BufReader, ReadBuf};

use crate::{
    memory::bounded,
    resp::{Failure, Reply, reply, string_into},
};

/// Reads `data` as replies, and as strings of a length; encodes replies that it is taken for, and reads them.
pub fn run(data: &[u8]) {
    // An element takes more than the four bytes that it is sent in; three times as many, where a list has grown.
    let found = bounded(64 * data.len() + (64 << 10), || replies(data, usize::MAX));
    for piece in [1, 7] {
        assert_eq!(replies(data, piece), found, "in pieces of {piece} bytes");
    }
    if let Some((first, rest)) = data.split_first() {
        check_string(rest, usize::from(*first));
    }
    let mut drawn = Unstructured::new(data);
    let sent: Vec<Sent> = (0..4).map_while(|_| Sent::draw(&mut drawn, 4).ok()).collect();
    let mut bytes = Vec::new();
    sent.iter().for_each(|reply| reply.encode(&mut bytes));
    let expected: Vec<_> = sent.iter().map(Sent::expected).collect();
    let (found, end) = replies(&bytes, 5);
    assert_eq!(found, expected, "{end}, of {:?}", String::from_utf8_lossy(&bytes));
}

/// The replies up to the first failure, and that, received in pieces of so many bytes.
fn replies(data: &[u8], piece: usize) -> (Vec<String>, String) {
    let mut stream = BufReader::with_capacity(16, Pieces { data, piece });
    let mut found = Vec::new();
    loop {
        match block_on(reply(&mut stream)) {
            Ok(reply) => found.push(format!("{reply:?}")),
            Err(Failure::Answer(text)) => found.push(format!("error {text:?}")),
            Err(failure) => return (found, format!("{failure:?}")),
        }
    }
}

/// What fills a buffer of `room` bytes is the string that the reply is.
fn check_string(data: &[u8], room: usize) {
    let mut buffer = ReadBuffer::new(room);
    let received = block_on(string_into(&mut BufReader::with_capacity(16, data), &mut buffer));
    if received.is_ok() && buffer.remaining() == 0 {
        let text = String::from_utf8_lossy(&buffer.into_bytes().expect("full")).into_owned();
        let whole = block_on(reply(&mut BufReader::new(data))).expect("a string is a reply");
        assert!(whole == Reply::Text(text) || (whole == Reply::Nil && room == 0), "{whole:?}");
    }
}

/// A stream that has its bytes in pieces.
struct Pieces<'a> {
    data: &'a [u8],
    piece: usize,
}

impl AsyncRead for Pieces<'_> {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let (now, later) = self.data.split_at(self.data.len().min(self.piece).min(to.remaining()));
        to.put_slice(now);
        self.data = later;
        Poll::Ready(Ok(()))
    }
}

/// A reply as a server sends it.
enum Sent {
    Nil,
    NoArray,
    Integer(i64),
    Status(String),
    Error(String),
    Bytes(Vec<u8>),
    Array(Vec<Sent>),
}

impl Sent {
    fn draw(drawn: &mut Unstructured<'_>, depth_left: u32) -> arbitrary::Result<Self> {
        if drawn.is_empty() {
            return Err(arbitrary::Error::NotEnoughData);
        }
        let line = |text: String| text.replace(['\r', '\n'], " ");
        Ok(match drawn.int_in_range(0..=6)? {
            0 => Sent::Nil,
            1 if depth_left > 0 => Sent::NoArray,
            2 => Sent::Integer(i64::arbitrary(drawn)?),
            3 => Sent::Status(line(String::arbitrary(drawn)?)),
            4 if depth_left == 4 => Sent::Error(line(String::arbitrary(drawn)?)),
            5 if depth_left > 0 => {
                let count = drawn.int_in_range(0..=6)?;
                let elements = (0..count).map(|_| Sent::draw(drawn, depth_left - 1));
                Sent::Array(elements.collect::<Result<_, _>>()?)
            }
            _ => Sent::Bytes(Vec::arbitrary(drawn)?),
        })
    }

    fn encode(&self, bytes: &mut Vec<u8>) {
        let line = match self {
            Sent::Nil => "$-1".into(),
            Sent::NoArray => "*-1".into(),
            Sent::Integer(number) => format!(":{number}"),
            Sent::Status(text) => format!("+{text}"),
            Sent::Error(text) => format!("-{text}"),
            Sent::Bytes(string) => format!("${}", string.len()),
            Sent::Array(elements) => format!("*{}", elements.len()),
        };
        bytes.extend_from_slice(line.as_bytes());
        bytes.extend_from_slice(b"\r\n");
        match self {
            Sent::Bytes(string) => {
                bytes.extend_from_slice(string);
                bytes.extend_from_slice(b"\r\n");
            }
            Sent::Array(elements) => elements.iter().for_each(|element| element.encode(bytes)),
            _ => {}
        }
    }

    /// As [`replies`] has it.
    fn expected(&self) -> String {
        match self {
            Sent::Error(text) => format!("error {text:?}"),
            other => format!("{:?}", other.reply()),
        }
    }

    fn reply(&self) -> Reply {
        match self {
            Sent::Nil | Sent::NoArray => Reply::Nil,
            Sent::Integer(number) => Reply::Integer(*number),
            Sent::Status(text) | Sent::Error(text) => Reply::Text(text.clone()),
            Sent::Bytes(bytes) => Reply::Text(String::from_utf8_lossy(bytes).into_owned()),
            Sent::Array(elements) => Reply::Array(elements.iter().map(Sent::reply).collect()),
        }
    }
}

//! A double of S3 in this process: the requests that the store sends, and the faults of services.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

/// What the service does to a request instead of answering it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// An answer of S3: status and code.
    Answer(u16, &'static str),
    /// Nothing, for ever.
    Silence,
    /// Half of an answer's body, and the end of the connection.
    HalfBody,
    /// A part of the range that was asked for, as a whole answer.
    ShortBody,
    /// An answer of this status whose body does not end.
    Endless(u16),
    /// The answer, after a time.
    Slow(Duration),
}

/// The service, on a port of this machine.
pub struct Double {
    pub port: u16,
    pub state: Arc<State>,
}

#[derive(Default)]
pub struct State {
    pub objects: Mutex<BTreeMap<String, Vec<u8>>>,
    pub fault: Mutex<Option<Fault>>,
    /// A service that replaces objects, whatever a request says.
    pub ignores_conditions: AtomicBool,
    pub requests: AtomicUsize,
    /// Heads of requests as they came.
    pub heads: Mutex<Vec<String>>,
}

const BUCKET: &str = "/bucket";

impl Double {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("a port").port();
        let state = Arc::new(State::default());
        let of_threads = state.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = of_threads.clone();
                thread::spawn(move || _ = serve(&stream, &state));
            }
        });
        Double { port, state }
    }

    pub fn fail(&self, fault: impl Into<Option<Fault>>) {
        *self.state.fault.lock().expect("no panic under it") = fault.into();
    }

    pub fn ignore_conditions(&self) {
        self.state.ignores_conditions.store(true, Ordering::Relaxed);
    }

    pub fn requests(&self) -> usize {
        self.state.requests.load(Ordering::Relaxed)
    }
}

struct Request {
    method: String,
    path: String,
    query: BTreeMap<String, String>,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

/// The requests of a connection, until one of the sides ends it.
fn serve(stream: &TcpStream, state: &State) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    while let Some(mut request) = read(&mut reader, state)? {
        if state.ignores_conditions.load(Ordering::Relaxed) {
            request.headers.remove("if-none-match");
        }
        state.requests.fetch_add(1, Ordering::Relaxed);
        let fault = *state.fault.lock().expect("no panic under it");
        let (status, mut body, extra) = match fault {
            Some(Fault::Answer(status, code)) => (status, error(code), String::new()),
            Some(Fault::Silence) => loop {
                // Until the client gives up.
                let mut byte = [0];
                if reader.read(&mut byte)? == 0 {
                    return Ok(());
                }
            },
            Some(Fault::Endless(status)) => return endless(stream, status),
            _ => answer(&request, &mut state.objects.lock().expect("no panic under it")),
        };
        if let Some(Fault::Slow(time)) = fault {
            thread::sleep(time);
        }
        if fault == Some(Fault::ShortBody) {
            body.truncate(body.len() / 2);
        }
        let length = body.len();
        // One write: the kernel holds back the second of two small ones.
        let mut sent = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n{extra}\r\n").into_bytes();
        sent.extend_from_slice(if fault == Some(Fault::HalfBody) { &body[..length / 2] } else { &body });
        (&*stream).write_all(&sent)?;
        if fault == Some(Fault::HalfBody) {
            return Ok(());
        }
    }
    Ok(())
}

/// Writes until the client has enough, or more than any has room for.
fn endless(mut stream: &TcpStream, status: u16) -> std::io::Result<()> {
    stream.write_all(format!("HTTP/1.1 {status} X\r\n\r\n").as_bytes())?;
    (0..512).try_for_each(|_| stream.write_all(&[b'x'; 1 << 20]))
}

fn read(reader: &mut BufReader<TcpStream>, state: &State) -> std::io::Result<Option<Request>> {
    let (mut head, mut headers) = (String::new(), BTreeMap::new());
    let first = loop {
        let from = head.len();
        if reader.read_line(&mut head)? == 0 {
            return Ok(None);
        }
        let line = head[from..].trim_end();
        if line.is_empty() {
            break head.lines().next().unwrap_or_default().to_owned();
        }
        if let Some((name, value)) = line.split_once(": ") {
            headers.insert(name.to_lowercase(), value.to_owned());
        }
    };
    state.heads.lock().expect("no panic under it").push(head);
    let length = headers.get("content-length").map_or(0, |text: &String| text.parse().unwrap_or(0));
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let mut words = first.split(' ').map(str::to_owned);
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (name.to_owned(), decoded(value))
    };
    let query = query.split('&').map(pair).collect();
    Ok(Some(Request { method, path: decoded(path), query, headers, body }))
}

/// Percent-encoded text.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next().unwrap_or(b'0'), rest.next().unwrap_or(b'0')];
                u8::from_str_radix(std::str::from_utf8(&digits).unwrap_or("0"), 16).unwrap_or(0)
            }
            b'+' => b' ',
            byte => byte,
        });
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// An answer of S3, which repeats what the client sent, as AWS does for a wrong signature.
fn error(code: &str) -> Vec<u8> {
    format!(
        "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>of the key AKIATEST\
         </Message><AWSAccessKeyId>AKIATEST</AWSAccessKeyId><Resource>/r</Resource><RequestId>1</RequestId></Error>"
    )
    .into_bytes()
}

fn answer(request: &Request, objects: &mut BTreeMap<String, Vec<u8>>) -> (u16, Vec<u8>, String) {
    let none = |status, code| (status, error(code), String::new());
    let Some(name) = request.path.strip_prefix(BUCKET) else { return none(404, "NoSuchBucket") };
    let name = name.trim_start_matches('/').to_owned();
    match request.method.as_str() {
        "PUT" => {
            let exists = objects.contains_key(&name);
            if exists && request.headers.get("if-none-match").is_some_and(|value| value == "*") {
                return none(412, "PreconditionFailed");
            }
            objects.insert(name, request.body.clone());
            (200, Vec::new(), "etag: \"1\"\r\n".into())
        }
        "GET" if name.is_empty() => (200, listing(&request.query, objects), String::new()),
        "GET" => match objects.get(&name) {
            Some(object) => ranged(request, object),
            None => none(404, "NoSuchKey"),
        },
        "POST" => {
            let text = String::from_utf8_lossy(&request.body);
            for part in text.split("<Key>").skip(1) {
                objects.remove(part.split("</Key>").next().unwrap_or_default());
            }
            (200, b"<DeleteResult></DeleteResult>".to_vec(), String::new())
        }
        "DELETE" => {
            objects.remove(&name);
            (204, Vec::new(), String::new())
        }
        _ => none(501, "NotImplemented"),
    }
}

fn ranged(request: &Request, object: &[u8]) -> (u16, Vec<u8>, String) {
    let Some(range) = request.headers.get("range").and_then(|text| text.strip_prefix("bytes=")) else {
        return (200, object.to_vec(), String::new());
    };
    let (from, to) = range.split_once('-').unwrap_or((range, ""));
    let from: usize = from.parse().unwrap_or(0);
    let to = to.parse().map_or(object.len(), |to: usize| (to + 1).min(object.len()));
    if from >= object.len() {
        return (416, error("InvalidRange"), String::new());
    }
    let range = format!("content-range: bytes {from}-{}/{}\r\n", to - 1, object.len());
    (206, object[from..to].to_vec(), range)
}

/// Names behind `start-after` or the token, a thousand at most.
fn listing(query: &BTreeMap<String, String>, objects: &BTreeMap<String, Vec<u8>>) -> Vec<u8> {
    let of = |name: &str| query.get(name).cloned().unwrap_or_default();
    let (prefix, after) = (of("prefix"), of("start-after").max(of("continuation-token")));
    let most = of("max-keys").parse().unwrap_or(1000).min(1000);
    let found: Vec<_> = objects.iter().filter(|(name, _)| name.starts_with(&prefix) && **name > after).collect();
    let mut text = format!("<ListBucketResult><IsTruncated>{}</IsTruncated>", found.len() > most);
    if let Some((last, _)) = found.get(most.wrapping_sub(1)).filter(|_| found.len() > most) {
        text += &format!("<NextContinuationToken>{last}</NextContinuationToken>");
    }
    for (name, object) in found.into_iter().take(most) {
        text += &format!(
            "<Contents><Key>{name}</Key><Size>{}</Size><LastModified>2026-01-02T03:04:05.000Z</LastModified>\
             <ETag>\"1\"</ETag></Contents>",
            object.len()
        );
    }
    (text + "</ListBucketResult>").into_bytes()
}

//! Redis and Valkey.

mod connection;
pub mod resp;

use std::{collections::BTreeSet, fs, path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use kvhoist::remote::{Capabilities, Created, Object, Page, ReadBuffer, RemoteError, RemoteFuture, RemoteStore};
use rustls::pki_types::ServerName;

use crate::{
    options::{OpenError, Options},
    place::RedisPlace,
    runtime::Runtime,
    tls,
};
use connection::{IDLE, Pool, Server};
use resp::{Reply, command, command_with_value};

/// Names that one request of a listing looks at.
const SCANNED: &[u8] = b"1000";
/// Names of a page. Each page looks at all names, in no order, and keeps the first ones.
const PAGE_OBJECTS: usize = 1 << 18;
/// Bytes of a name at most, so that a page has a limit: names of kvhoist have 138.
const NAME_BYTES_MAX: usize = 256;
/// Names that one request asks the length of, or deletes.
const PIPELINED: usize = 1000;
/// Reads of one call, which are pipelined over one connection.
const READS_PER_CALL: u32 = 256;
/// A listing looks at every name of the server: about a second a million.
const LISTING_TIMEOUTS: u32 = 10;

/// A database of a server.
#[derive(Debug)]
pub struct Redis {
    database: Arc<Database>,
    runtime: Runtime,
    capabilities: Capabilities,
    timeout: Duration,
}

impl Redis {
    pub fn open(place: &RedisPlace, options: &Options, runtime: Runtime) -> Result<Self, OpenError> {
        let tls = match place.has_tls {
            true => Some((Arc::new(tls::config(options)?), server_name(&place.host)?)),
            false => None,
        };
        let server = Server {
            host: place.host.clone(),
            port: place.port,
            database: place.database,
            user: place.user.clone(),
            password: password(options.password_file.as_deref())?,
            tls,
            connect_timeout: options.connect_timeout,
        };
        let capabilities = Capabilities {
            scheme: "redis",
            object_bytes: options.object_bytes.unwrap_or(1),
            requests_in_flight: options.requests_in_flight,
            reads_per_call: READS_PER_CALL,
        };
        let pool = Pool::new(server, options.requests_in_flight as usize, IDLE);
        let database = Arc::new(Database { pool, ttl_s: options.ttl_s });
        Ok(Redis { database, runtime, capabilities, timeout: options.timeout })
    }
}

/// Whose certificate is expected.
fn server_name(host: &str) -> Result<ServerName<'static>, OpenError> {
    let refused =
        |_| OpenError::new("the URL of the remote store", format!("the host {host:?}"), "a name or an address");
    ServerName::try_from(host.to_owned()).map_err(refused)
}

/// The password: of the file, or of the variable that `redis-cli` reads.
fn password(file: Option<&Path>) -> Result<Option<String>, OpenError> {
    let Some(file) = file else { return Ok(std::env::var("REDISCLI_AUTH").ok().filter(|text| !text.is_empty())) };
    let refused = |found: String| {
        OpenError::missing(format!("password_file {}", file.display()), found, "a readable file with the password")
    };
    let text = fs::read_to_string(file).map_err(|error| refused(error.to_string()))?;
    match text.lines().next() {
        Some(password) if !password.is_empty() => Ok(Some(password.to_owned())),
        _ => Err(refused("an empty first line".into())),
    }
}

/// The answer to a read.
type Answer = Result<ReadBuffer, RemoteError>;

/// What is asked of a database.
#[derive(Debug)]
struct Database {
    pool: Pool,
    ttl_s: Option<u64>,
}

impl Database {
    /// Sends a command.
    async fn run(&self, words: &[&[u8]]) -> Result<Reply, RemoteError> {
        let mut connection = self.pool.take().await?;
        let reply = connection.run(words).await;
        connection.end(reply)
    }

    /// Fills the buffers with parts of values, which are asked for at once.
    async fn get_ranges(&self, reads: Vec<(String, u64, ReadBuffer)>) -> Result<Vec<Answer>, RemoteError> {
        let get = |(name, start, buffer): &(String, u64, ReadBuffer)| {
            let last = start + buffer.remaining() as u64 - 1;
            command(&[b"GETRANGE", name.as_bytes(), start.to_string().as_bytes(), last.to_string().as_bytes()])
        };
        let requests: Vec<u8> = reads.iter().filter(|(_, _, buffer)| buffer.remaining() > 0).flat_map(get).collect();
        let mut filled = Vec::with_capacity(reads.len());
        let mut connection = self.pool.take().await?;
        let all = async {
            connection.send(&[requests.into()]).await?;
            for (name, start, mut buffer) in reads {
                let wanted = buffer.remaining();
                if wanted > 0 {
                    connection.string_into(&mut buffer).await?;
                }
                filled.push((name, start, buffer, wanted));
            }
            Ok(())
        };
        let all = all.await;
        connection.end(all)?;
        // A range of no value is an empty string, and so is one behind the end of a value.
        let empty = filled.iter().filter(|(.., buffer, wanted)| *wanted > 0 && buffer.remaining() == *wanted);
        let empty: Vec<String> = empty.map(|(name, ..)| name.clone()).collect();
        let mut lengths = self.lengths(&empty).await?.into_iter();
        // Also of a value that has been created since.
        let mut was_there = |start| lengths.next().is_some_and(|length| length > 0 && length <= start);
        let answer = |(_, start, buffer, wanted): (_, u64, ReadBuffer, usize)| match buffer.remaining() {
            0 => Ok(buffer),
            all if all == wanted && !was_there(start) => Err(RemoteError::NotFound),
            rest => {
                let found = format!("{} of the bytes of a range", wanted - rest);
                Err(RemoteError::Invalid { found, expected: wanted.to_string() })
            }
        };
        Ok(filled.into_iter().map(answer).collect())
    }

    /// Creates a value, unless there is one of that name.
    async fn set(&self, name: &str, parts: &[Bytes]) -> Result<Created, RemoteError> {
        let ttl_s = self.ttl_s.map(|ttl_s| ttl_s.to_string());
        let mut options: Vec<&[u8]> = vec![b"NX"];
        if let Some(ttl_s) = &ttl_s {
            options.extend([b"EX", ttl_s.as_bytes()]);
        }
        let set = command_with_value(&[b"SET", name.as_bytes()], parts, &options);
        let mut connection = self.pool.take().await?;
        let reply = async {
            connection.send(&set).await?;
            connection.reply().await
        };
        let reply = reply.await;
        match connection.end(reply)? {
            Reply::Nil => Ok(Created::Already),
            Reply::Text(_) => Ok(Created::Now),
            other => Err(unexpected(&other, "OK or nil")),
        }
    }

    /// The lengths of values; 0 for one that is not there.
    async fn lengths(&self, names: &[String]) -> Result<Vec<u64>, RemoteError> {
        let mut lengths = Vec::with_capacity(names.len());
        for names in names.chunks(PIPELINED) {
            let requests: Vec<u8> = names.iter().flat_map(|name| command(&[b"STRLEN", name.as_bytes()])).collect();
            let mut connection = self.pool.take().await?;
            let all = async {
                connection.send(&[requests.into()]).await?;
                for _ in names {
                    lengths.push(match connection.reply().await? {
                        Reply::Integer(length) => u64::try_from(length).unwrap_or(0),
                        other => return Err(unexpected(&other, "the length of a value")),
                    });
                }
                Ok(())
            };
            let all = all.await;
            connection.end(all)?;
        }
        Ok(lengths)
    }

    /// The first names behind `after` that begin with `prefix`, and whether there are more.
    async fn names(&self, prefix: &str, after: Option<&str>) -> Result<(Vec<String>, bool), RemoteError> {
        let pattern = literal(prefix) + "*";
        let (mut names, mut is_cut, mut cursor) = (BTreeSet::new(), false, "0".to_owned());
        loop {
            let scan: [&[u8]; 8] =
                [b"SCAN", cursor.as_bytes(), b"MATCH", pattern.as_bytes(), b"COUNT", SCANNED, b"TYPE", b"string"];
            let (next, found) = page_of(self.run(&scan).await?)?;
            let is_listed =
                |name: &String| name.len() <= NAME_BYTES_MAX && after.is_none_or(|after| name.as_str() > after);
            for name in found.into_iter().filter(is_listed) {
                names.insert(name);
                if names.len() > PAGE_OBJECTS {
                    is_cut = true;
                    names.pop_last();
                }
            }
            cursor = next;
            if cursor == "0" {
                return Ok((names.into_iter().collect(), is_cut));
            }
        }
    }
}

/// The next cursor and the names of a reply to SCAN.
fn page_of(reply: Reply) -> Result<(String, Vec<String>), RemoteError> {
    let text = |reply| match reply {
        Reply::Text(text) => Ok(text),
        other => Err(unexpected(&other, "a name")),
    };
    match reply {
        Reply::Array(parts) => match <[Reply; 2]>::try_from(parts) {
            Ok([cursor, Reply::Array(names)]) => {
                Ok((text(cursor)?, names.into_iter().map(text).collect::<Result<_, _>>()?))
            }
            _ => Err(unexpected(&Reply::Nil, "a cursor and names")),
        },
        other => Err(unexpected(&other, "a cursor and names")),
    }
}

fn unexpected(reply: &Reply, expected: &str) -> RemoteError {
    let found = match reply {
        Reply::Nil => "nil",
        Reply::Integer(_) => "a number",
        Reply::Text(_) => "a text",
        Reply::Array(_) => "an array",
    };
    RemoteError::Invalid { found: format!("{found} in a reply"), expected: expected.into() }
}

/// A pattern that matches a text alone.
fn literal(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for c in text.chars() {
        if "*?[]^-\\".contains(c) {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}

impl RemoteStore for Redis {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn read_into(&self, object: &str, start: u64, buffer: ReadBuffer) -> RemoteFuture<ReadBuffer> {
        let read = self.read_each(vec![(object.to_owned(), start, buffer)]);
        Box::pin(async move { read.await?.pop().expect("an answer for each") })
    }

    fn read_each(&self, reads: Vec<(String, u64, ReadBuffer)>) -> RemoteFuture<Vec<Answer>> {
        let database = self.database.clone();
        self.runtime.call(self.timeout, async move { database.get_ranges(reads).await })
    }

    fn create(&self, object: &str, parts: Vec<Bytes>) -> RemoteFuture<Created> {
        let (database, object) = (self.database.clone(), object.to_owned());
        self.runtime.call(self.timeout, async move { database.set(&object, &parts).await })
    }

    fn list(&self, prefix: &str, after: Option<&str>) -> RemoteFuture<Page> {
        let (database, prefix, after) = (self.database.clone(), prefix.to_owned(), after.map(str::to_owned));
        self.runtime.call(self.timeout * LISTING_TIMEOUTS, async move {
            // A whole name, which no other begins with, costs no look at all names.
            let own = database.lengths(std::slice::from_ref(&prefix)).await?[0];
            if own > 0 && after.is_none() {
                let object = Object { name: prefix, bytes: own, modified: None };
                return Ok(Page { objects: vec![object], next: None });
            }
            let (names, is_cut) = database.names(&prefix, after.as_deref()).await?;
            let next = names.last().filter(|_| is_cut).cloned();
            let lengths = database.lengths(&names).await?;
            let object = |(name, bytes)| Object { name, bytes, modified: None };
            // What was evicted since has no length.
            let objects = names.into_iter().zip(lengths).filter(|(_, bytes)| *bytes > 0).map(object).collect();
            Ok(Page { objects, next })
        })
    }

    fn delete(&self, objects: &[String]) -> RemoteFuture<()> {
        let (database, objects) = (self.database.clone(), objects.to_vec());
        self.runtime.call(self.timeout, async move {
            for names in objects.chunks(PIPELINED) {
                let names = names.iter().map(String::as_bytes);
                let words: Vec<&[u8]> = [&b"UNLINK"[..]].into_iter().chain(names).collect();
                database.run(&words).await?;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_no_pattern() {
        assert_eq!(literal("a/b*[c]"), "a/b\\*\\[c\\]");
    }

    #[test]
    fn a_password_is_in_no_text() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("password");
        fs::write(&file, "hunter2\n").expect("written");
        assert_eq!(password(Some(&file)).expect("read").as_deref(), Some("hunter2"));
        let options = Options { password_file: Some(file), ..Default::default() };
        let place =
            RedisPlace { host: "127.0.0.1".into(), port: 1, database: 0, user: Some("u".into()), has_tls: false };
        let runtime = Runtime::start(&options).expect("threads");
        let store = Redis::open(&place, &options, runtime).expect("opened");
        assert!(!format!("{store:?}").contains("hunter2"));
        let refused = pollster::block_on(store.read("a", 0..1)).expect_err("nobody listens on port 1");
        assert!(matches!(refused, RemoteError::Unavailable(_)), "{refused}");
        assert!(!refused.to_string().contains("hunter2"));
    }
}

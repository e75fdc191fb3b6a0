//! Redis and Valkey.

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    ops::Range,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use kvhoist::remote::{Capabilities, Created, Object, Page, RemoteError, RemoteFuture, RemoteStore};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, FromRedisValue, IntoConnectionInfo, Pipeline,
    RedisConnectionInfo, RedisResult, RedisWrite, TlsCertificates, aio::MultiplexedConnection, cmd, pipe,
};

use crate::{
    failure::of_redis,
    options::{OpenError, Options},
    place::RedisPlace,
    runtime::Runtime,
    tls,
};

/// Names that one request of a listing looks at.
const SCANNED: usize = 1000;
/// Names of a page. Each page looks at all names, in no order, and keeps the first ones.
const PAGE_OBJECTS: usize = 1 << 18;
/// Names that one request asks the length of, or deletes.
const PIPELINED: usize = 1000;
/// A listing looks at every name of the server: about a second a million.
const LISTING_TIMEOUTS: u32 = 10;
/// Connections. Requests on one are pipelined; a large value on one holds up nobody on the others.
const CONNECTIONS: usize = 4;

/// A database of a server.
#[derive(Debug)]
pub struct Redis {
    connections: Arc<Connections>,
    runtime: Runtime,
    capabilities: Capabilities,
    timeout: Duration,
    ttl_s: Option<u64>,
}

impl Redis {
    pub fn open(place: &RedisPlace, options: &Options, runtime: Runtime) -> Result<Self, OpenError> {
        let address = if place.has_tls {
            ConnectionAddr::TcpTls { host: place.host.clone(), port: place.port, insecure: false, tls_params: None }
        } else {
            ConnectionAddr::Tcp(place.host.clone(), place.port)
        };
        let mut login = RedisConnectionInfo::default().set_db(place.database);
        if let Some(user) = &place.user {
            login = login.set_username(user);
        }
        if let Some(password) = password(options.password_file.as_deref())? {
            login = login.set_password(password);
        }
        let refused = |error: redis::RedisError| {
            OpenError::new("the Redis store", error.category().to_owned(), "a host, a port and a database")
        };
        let info = address.into_connection_info().map_err(refused)?.set_redis_settings(login);
        let client = if place.has_tls {
            // The client takes the process's provider of cryptography; another that is there serves as well.
            drop(rustls::crypto::ring::default_provider().install_default());
            let root_cert = tls::ca_pem(options)?;
            Client::build_with_tls(info, TlsCertificates { client_tls: None, root_cert }).map_err(refused)?
        } else {
            Client::open(info).map_err(refused)?
        };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(options.connect_timeout))
            .set_response_timeout(Some(options.timeout));
        let capabilities = Capabilities {
            scheme: "redis",
            object_bytes: options.object_bytes.unwrap_or(1),
            requests_in_flight: options.requests_in_flight,
        };
        let connections = Connections { client, config, open: Default::default(), turn: AtomicUsize::new(0) };
        Ok(Redis {
            connections: Arc::new(connections),
            runtime,
            capabilities,
            timeout: options.timeout,
            ttl_s: options.ttl_s,
        })
    }
}

/// The password: of the file, or of the variable that `redis-cli` reads.
fn password(file: Option<&Path>) -> Result<Option<String>, OpenError> {
    let Some(file) = file else { return Ok(std::env::var("REDISCLI_AUTH").ok().filter(|text| !text.is_empty())) };
    let refused = |found: String| {
        OpenError::new(format!("password_file {}", file.display()), found, "a readable file with the password")
    };
    let text = fs::read_to_string(file).map_err(|error| refused(error.to_string()))?;
    match text.lines().next() {
        Some(password) if !password.is_empty() => Ok(Some(password.to_owned())),
        _ => Err(refused("an empty first line".into())),
    }
}

/// The place of a connection.
type Place = tokio::sync::Mutex<Option<MultiplexedConnection>>;

/// Connections that are opened when they are needed, and again after a failure.
struct Connections {
    client: Client,
    config: AsyncConnectionConfig,
    open: [Place; CONNECTIONS],
    turn: AtomicUsize,
}

impl std::fmt::Debug for Connections {
    // The client's own text has the password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connections").finish_non_exhaustive()
    }
}

impl Connections {
    /// The next connection, opened if it is not, and its place.
    async fn next(&self) -> Result<(MultiplexedConnection, &Place), RemoteError> {
        let place = &self.open[self.turn.fetch_add(1, Ordering::Relaxed) % CONNECTIONS];
        // Held while it is opened, so that all who want it wait for one.
        let mut open = place.lock().await;
        if let Some(connection) = &*open {
            return Ok((connection.clone(), place));
        }
        let opened = self.client.get_multiplexed_async_connection_with_config(&self.config).await;
        let opened = opened.map_err(|error| of_redis(&error))?;
        *open = Some(opened.clone());
        Ok((opened, place))
    }

    /// Sends a command. A connection that fails below the protocol is opened anew by the next.
    async fn run<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, RemoteError> {
        let (mut connection, place) = self.next().await?;
        settle(command.query_async(&mut connection).await, place).await
    }

    /// Sends several commands at once.
    async fn run_all<T: FromRedisValue>(&self, commands: &Pipeline) -> Result<T, RemoteError> {
        let (mut connection, place) = self.next().await?;
        settle(commands.query_async(&mut connection).await, place).await
    }

    /// The lengths of values; 0 for one that is not there.
    async fn lengths(&self, names: &[String]) -> Result<Vec<u64>, RemoteError> {
        let mut lengths = Vec::with_capacity(names.len());
        for names in names.chunks(PIPELINED) {
            let mut requests = pipe();
            names.iter().for_each(|name| _ = requests.cmd("STRLEN").arg(name));
            lengths.extend(self.run_all::<Vec<u64>>(&requests).await?);
        }
        Ok(lengths)
    }

    /// The first names behind `after` that begin with `prefix`, and whether there are more.
    async fn names(&self, prefix: &str, after: Option<&str>) -> Result<(Vec<String>, bool), RemoteError> {
        let pattern = literal(prefix) + "*";
        let (mut names, mut is_cut, mut cursor) = (BTreeSet::new(), false, 0);
        loop {
            let mut scan = cmd("SCAN");
            scan.arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(SCANNED).arg("TYPE").arg("string");
            let (next, found): (u64, Vec<String>) = self.run(&scan).await?;
            for name in found.into_iter().filter(|name| after.is_none_or(|after| name.as_str() > after)) {
                names.insert(name);
                if names.len() > PAGE_OBJECTS {
                    is_cut = true;
                    names.pop_last();
                }
            }
            cursor = next;
            if cursor == 0 {
                return Ok((names.into_iter().collect(), is_cut));
            }
        }
    }
}

/// A reply; after a failure of the connection its place is empty.
async fn settle<T>(reply: RedisResult<T>, place: &Place) -> Result<T, RemoteError> {
    let error = match reply {
        Ok(reply) => return Ok(reply),
        Err(error) => error,
    };
    if error.is_unrecoverable_error() || error.is_timeout() || error.is_io_error() {
        *place.lock().await = None;
    }
    Err(of_redis(&error))
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

    fn read(&self, object: &str, range: Range<u64>) -> RemoteFuture<Vec<Bytes>> {
        let (connections, object) = (self.connections.clone(), object.to_owned());
        self.runtime.call(self.timeout, async move {
            if range.is_empty() {
                return Ok(Vec::new());
            }
            let mut get = cmd("GETRANGE");
            get.arg(&object).arg(range.start).arg(range.end - 1);
            let bytes: Bytes = connections.run(&get).await?;
            let wanted = range.end - range.start;
            if bytes.is_empty() && connections.lengths(&[object]).await? == [0] {
                return Err(RemoteError::NotFound);
            }
            if bytes.len() as u64 != wanted {
                let found = format!("{} bytes", bytes.len());
                return Err(RemoteError::Invalid { found, expected: format!("{wanted} bytes of a range") });
            }
            Ok(vec![bytes])
        })
    }

    fn create(&self, object: &str, parts: Vec<Bytes>) -> RemoteFuture<Created> {
        let (connections, object, ttl_s) = (self.connections.clone(), object.to_owned(), self.ttl_s);
        self.runtime.call(self.timeout, async move {
            let mut set = cmd("SET");
            set.arg(&object);
            let mut value = set.writer_for_next_arg();
            parts.iter().try_for_each(|part| value.write_all(part)).expect("memory takes all");
            drop((value, parts));
            set.arg("NX");
            if let Some(ttl_s) = ttl_s {
                set.arg("EX").arg(ttl_s);
            }
            // No reply but nil: the value was there.
            let done: Option<String> = connections.run(&set).await?;
            Ok(if done.is_some() { Created::Now } else { Created::Already })
        })
    }

    fn list(&self, prefix: &str, after: Option<&str>) -> RemoteFuture<Page> {
        let (connections, prefix, after) = (self.connections.clone(), prefix.to_owned(), after.map(str::to_owned));
        self.runtime.call(self.timeout * LISTING_TIMEOUTS, async move {
            // A whole name, which no other begins with, costs no look at all names.
            let own = connections.lengths(std::slice::from_ref(&prefix)).await?[0];
            if own > 0 && after.is_none() {
                let object = Object { name: prefix, bytes: own, modified: None };
                return Ok(Page { objects: vec![object], next: None });
            }
            let (names, is_cut) = connections.names(&prefix, after.as_deref()).await?;
            let next = names.last().filter(|_| is_cut).cloned();
            let lengths = connections.lengths(&names).await?;
            let object = |(name, bytes)| Object { name, bytes, modified: None };
            // What was evicted since has no length.
            let objects = names.into_iter().zip(lengths).filter(|(_, bytes)| *bytes > 0).map(object).collect();
            Ok(Page { objects, next })
        })
    }

    fn delete(&self, objects: &[String]) -> RemoteFuture<()> {
        let (connections, objects) = (self.connections.clone(), objects.to_vec());
        self.runtime.call(self.timeout, async move {
            for names in objects.chunks(PIPELINED) {
                let mut unlink = cmd("UNLINK");
                unlink.arg(names);
                connections.run::<u64>(&unlink).await?;
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

//! Connections to a server. A call has one for itself from its command to the end of its reply: one that is dropped in
//! between is closed, so no reply is ever taken for another.

use std::{
    fmt, io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use kvhoist::remote::{ReadBuffer, RemoteError};
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite, BufReader},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

use super::resp::{self, Reply, command};
use crate::failure::{LOGIN, of_network};

/// Bytes of a connection's buffer, into which all is received: as many as stay in a processor's cache until they are
/// checksummed and copied to where they belong.
const BUFFER_BYTES: usize = 128 << 10;

/// A server, and who logs in.
pub struct Server {
    pub host: String,
    pub port: u16,
    pub database: i64,
    pub user: Option<String>,
    pub password: Option<String>,
    /// TLS, where it is spoken: how, and whose certificate is expected.
    pub tls: Option<(Arc<rustls::ClientConfig>, ServerName<'static>)>,
    pub connect_timeout: Duration,
}

/// Bytes in both directions: of TCP, or of TLS over it.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A connection that has logged in.
pub struct Connection(BufReader<Box<dyn Stream>>);

impl Server {
    pub async fn connect(&self) -> Result<Connection, RemoteError> {
        let late = |_| RemoteError::Unavailable(format!("no connection within {:?}", self.connect_timeout));
        timeout(self.connect_timeout, self.log_in()).await.map_err(late)?
    }

    async fn log_in(&self) -> Result<Connection, RemoteError> {
        let stream = self.stream().await.map_err(|error| of_network(&error))?;
        let mut connection = Connection(BufReader::with_capacity(BUFFER_BYTES, stream));
        let refused = |what: &str, error: RemoteError| match error {
            RemoteError::Refused(_) => error,
            RemoteError::Unavailable(why) if why.starts_with("the server answers") => {
                RemoteError::Refused(format!("the server refused the {what}: {why}; check its number, and {LOGIN}"))
            }
            other => other,
        };
        // Without AUTH the connection would be the default user's. A user without a password takes any.
        if self.password.is_some() || self.user.is_some() {
            let user = self.user.as_ref().map(String::as_bytes);
            let password = self.password.as_deref().unwrap_or_default().as_bytes();
            let words: Vec<&[u8]> = [&b"AUTH"[..]].into_iter().chain(user).chain([password]).collect();
            connection.run(&words).await.map_err(|error| refused("password", error))?;
        }
        if self.database != 0 {
            let number = self.database.to_string();
            connection.run(&[b"SELECT", number.as_bytes()]).await.map_err(|error| refused("database", error))?;
        }
        Ok(connection)
    }

    async fn stream(&self) -> io::Result<Box<dyn Stream>> {
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
        stream.set_nodelay(true)?;
        Ok(match &self.tls {
            None => Box::new(stream),
            Some((config, name)) => {
                Box::new(TlsConnector::from(Arc::clone(config)).connect(name.clone(), stream).await?)
            }
        })
    }
}

impl Connection {
    /// Sends a command, and receives its reply.
    pub async fn run(&mut self, words: &[&[u8]]) -> Result<Reply, RemoteError> {
        self.send(&[command(words).into()]).await?;
        self.reply().await
    }

    pub async fn send(&mut self, parts: &[Bytes]) -> Result<(), RemoteError> {
        resp::send(&mut self.0, parts).await.map_err(|error| of_network(&error))
    }

    pub async fn reply(&mut self) -> Result<Reply, RemoteError> {
        Ok(resp::reply(&mut self.0).await?)
    }

    /// Receives a string into the buffer.
    pub async fn string_into(&mut self, buffer: &mut ReadBuffer) -> Result<(), RemoteError> {
        Ok(resp::string_into(&mut self.0, buffer).await?)
    }
}

/// The connections of a store.
pub struct Pool {
    server: Server,
    idle: Mutex<Vec<Connection>>,
    idle_max: usize,
}

impl fmt::Debug for Pool {
    // The server has the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").finish_non_exhaustive()
    }
}

impl Pool {
    pub fn new(server: Server, idle_max: usize) -> Self {
        Pool { server, idle: Mutex::default(), idle_max }
    }

    /// A connection for one call: the one that was used last, or a new one.
    pub async fn take(&self) -> Result<Connection, RemoteError> {
        let idle = self.idle().pop();
        match idle {
            Some(connection) => Ok(connection),
            None => self.server.connect().await,
        }
    }

    /// Ends a call. After an error its connection is closed, since replies may be left there; where that failed or
    /// said nothing that is known, all that are idle are closed too: a server that went away has ended them.
    pub fn end<T>(&self, connection: Connection, result: Result<T, RemoteError>) -> Result<T, RemoteError> {
        let mut idle = self.idle();
        match &result {
            Ok(_) if idle.len() < self.idle_max => idle.push(connection),
            Err(RemoteError::Unavailable(_)) => idle.clear(),
            _ => {}
        }
        drop(idle);
        result
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! Connections to a server. A call has one for itself from its command to the end of its reply: one that is dropped in
//! between is closed, so no reply is ever taken for another.

use std::{
    fmt, io,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
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

/// How long a connection without requests is kept; S3 has the same limit. A firewall may drop a connection that is idle
/// and tell neither end: the next call over it would wait for its whole time limit.
pub const IDLE: Duration = Duration::from_secs(30);

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
    /// Each with the time since which it is idle; the one that was used last is the last.
    idle: Mutex<Vec<(Instant, Connection)>>,
    idle_max: usize,
    /// How long one may be idle.
    idle_limit: Duration,
}

/// The connection of one call. If the call is dropped before its [`end`](Self::end), at its time limit or because
/// nobody waits for it, this connection is closed, and so are all that are idle: what made this one silent may have
/// ended them too.
pub struct Call<'a> {
    pool: &'a Pool,
    /// Until the end of the call.
    connection: Option<Connection>,
}

impl fmt::Debug for Pool {
    // The server has the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").finish_non_exhaustive()
    }
}

impl Pool {
    pub fn new(server: Server, idle_max: usize, idle_limit: Duration) -> Self {
        Pool { server, idle: Mutex::default(), idle_max, idle_limit }
    }

    /// A connection for one call: the one that was used last, unless it is idle for too long, or a new one.
    pub async fn take(&self) -> Result<Call<'_>, RemoteError> {
        let idle = self.pop_idle();
        let connection = match idle {
            Some(connection) => connection,
            None => self.server.connect().await?,
        };
        Ok(Call { pool: self, connection: Some(connection) })
    }

    /// The connection that was used last. Those that are idle for too long are closed.
    fn pop_idle(&self) -> Option<Connection> {
        let mut idle = self.idle();
        idle.retain(|(since, _)| since.elapsed() < self.idle_limit);
        idle.pop().map(|(_, connection)| connection)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<(Instant, Connection)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Call<'_> {
    /// Ends a call. After an error its connection is closed, since replies may be left there; where that failed or
    /// said nothing that is known, all that are idle are closed too: a server that went away has ended them.
    pub fn end<T>(mut self, result: Result<T, RemoteError>) -> Result<T, RemoteError> {
        let connection = self.connection.take();
        let mut idle = self.pool.idle();
        match &result {
            Ok(_) if idle.len() < self.pool.idle_max => idle.extend(connection.map(|it| (Instant::now(), it))),
            Err(RemoteError::Unavailable(_)) => idle.clear(),
            _ => {}
        }
        drop(idle);
        result
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if self.connection.is_some() {
            self.pool.idle().clear();
        }
    }
}

impl Deref for Call<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        self.connection.as_ref().expect("it is there until the end, which takes the call")
    }
}

impl DerefMut for Call<'_> {
    fn deref_mut(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("it is there until the end, which takes the call")
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader as Lines, Write},
        net::TcpListener,
        thread,
    };

    use super::*;
    use crate::{options::Options, runtime::Runtime};

    /// More than an answer takes on a busy machine.
    const PATIENT: Duration = Duration::from_secs(60);

    /// A pool of a server that answers WHO with how many connections came before this one, and nothing else at all.
    fn pool(idle_limit: Duration) -> (Arc<Pool>, Runtime) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("a port").port();
        thread::spawn(move || {
            for (number, stream) in listener.incoming().map_while(Result::ok).enumerate() {
                thread::spawn(move || {
                    let asks = Lines::new(&stream).lines().map_while(Result::ok).filter(|line| line == "WHO");
                    asks.for_each(|_| drop((&stream).write_all(format!(":{number}\r\n").as_bytes())));
                });
            }
        });
        let server = Server {
            host: "127.0.0.1".into(),
            port,
            database: 0,
            user: None,
            password: None,
            tls: None,
            connect_timeout: PATIENT,
        };
        let runtime = Runtime::start(&Options::default()).expect("threads");
        (Arc::new(Pool::new(server, 8, idle_limit)), runtime)
    }

    /// The connections that so many calls at a time have.
    fn who((pool, runtime): &(Arc<Pool>, Runtime), calls: usize) -> Vec<Reply> {
        let pool = Arc::clone(pool);
        let all = async move {
            let (mut taken, mut replies) = (Vec::new(), Vec::new());
            for _ in 0..calls {
                taken.push(pool.take().await?);
            }
            for mut call in taken {
                let reply = call.run(&[b"WHO"]).await;
                replies.push(call.end(reply)?);
            }
            Ok(replies)
        };
        pollster::block_on(runtime.call(PATIENT, all)).expect("answered")
    }

    fn numbers(numbers: &[i64]) -> Vec<Reply> {
        numbers.iter().map(|number| Reply::Integer(*number)).collect()
    }

    #[test]
    fn after_a_call_without_an_answer_in_time_no_idle_connection_is_used() {
        let pool = pool(IDLE);
        assert_eq!(who(&pool, 3), numbers(&[0, 1, 2]));
        assert_eq!(who(&pool, 1), numbers(&[2]), "the one that was used last");
        let silent = Arc::clone(&pool.0);
        let silent = async move {
            let mut call = silent.take().await?;
            let reply = call.run(&[b"SILENCE"]).await;
            call.end(reply)
        };
        let error = pollster::block_on(pool.1.call(Duration::from_millis(50), silent)).expect_err("silence");
        assert!(matches!(error, RemoteError::Unavailable(_)), "{error}");
        assert_eq!(who(&pool, 2), numbers(&[3, 4]), "new ones");
    }

    #[test]
    fn a_connection_that_is_idle_for_too_long_is_not_used() {
        let kept = pool(PATIENT);
        assert_eq!([who(&kept, 2), who(&kept, 2)], [numbers(&[0, 1]), numbers(&[1, 0])]);
        let closed = pool(Duration::ZERO);
        assert_eq!([who(&closed, 2), who(&closed, 2)], [numbers(&[0, 1]), numbers(&[2, 3])]);
    }
}

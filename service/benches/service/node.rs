//! A service in a process of its own.

use std::{
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use kvhoist::{Config, DirectIo};
use kvhoist_service::{Server, ServerConfig};

use crate::{
    options::{CLIENT, Outcome, SERVE},
    pool::timed,
};

/// The service's process, until its standard input ends.
pub fn serve(words: &[String]) -> Outcome<()> {
    let [socket, capacity, host_bytes, folders @ ..] = words else { return Err("--serve: found too few words".into()) };
    let mut config = ServerConfig::new(socket);
    config.paths = folders.iter().map(PathBuf::from).collect();
    config.capacity_bytes = capacity.parse()?;
    config.host_bytes = host_bytes.parse()?;
    config.cache = Config::default().bypass_host(true).direct_io(DirectIo::Prefer);
    let server = Server::start(config)?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    server.drain();
    Ok(server.wait()?)
}

/// A service, ended with its owner.
pub struct Service {
    child: Child,
    pub socket: PathBuf,
}

impl Service {
    pub fn start(folders: &[PathBuf], capacity: u64, host_bytes: u64) -> Outcome<Self> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let socket = env::temp_dir().join(format!("kvhoist-bench-{}-{number}", std::process::id()));
        let mut child = Command::new(env::current_exe()?)
            .arg(SERVE)
            .arg(&socket)
            .args([capacity.to_string(), host_bytes.to_string()])
            .args(folders)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        Ok(Service { child, socket })
    }

    /// Its memory that is no file's and no client's, bytes.
    pub fn own_bytes(&self) -> Outcome<u64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let own = text.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"));
        Ok(own.ok_or("no RssAnon")?.parse::<u64>()? << 10)
    }

    /// Time that its threads have run.
    pub fn ran(&self) -> Outcome<Duration> {
        let mut total = 0;
        for task in fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let text = fs::read_to_string(task?.path().join("schedstat"))?;
            total += text.split(' ').next().ok_or("no figure")?.parse::<u64>()?;
        }
        Ok(Duration::from_nanos(total))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        drop(self.child.wait());
    }
}

/// A client in a process of its own, that answers each line with a line.
pub struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    pub fn start(words: &[String]) -> Outcome<Self> {
        let mut child = Command::new(env::current_exe()?)
            .arg(CLIENT)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (child.stdin.take().ok_or("no input")?, child.stdout.take().ok_or("no output")?);
        Ok(Peer { child, input, output: BufReader::new(output) })
    }

    /// Waits for its answer.
    pub fn answered(&mut self) -> Outcome<()> {
        let mut line = String::new();
        match self.output.read_line(&mut line)? {
            0 => Err("a client ended".into()),
            _ => Ok(()),
        }
    }

    /// Has it do its work once.
    pub fn go(&mut self) -> Outcome<()> {
        Ok(self.input.write_all(b"go\n")?)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// All of them at once, once; seconds.
pub fn all_go(peers: &mut [Peer]) -> Outcome<f64> {
    timed(|| {
        peers.iter_mut().try_for_each(Peer::go)?;
        peers.iter_mut().try_for_each(Peer::answered)
    })
}

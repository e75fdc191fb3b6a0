//! `kvhoist serve`: the node's service, in the foreground.

use std::{
    io::Write,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
    path::PathBuf,
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};

use kvhoist::{Config, DirectIo, Error, StorageKind, WritePolicy, internals::config::SETTING_NAMES};
use kvhoist_service::{Server, ServerConfig, Share, default_socket};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

use crate::{
    choice::{choice, one_of},
    failure::Failure,
    found, http,
    output::emit,
    remote_store,
    settings::Settings,
    shown::shown,
    size::parse_bytes,
};

/// How long a signal waits for the handle of a service that listens already.
const JUST_STARTED: Duration = Duration::from_millis(100);

/// What the exit statuses mean: the first signal is no failure, and a service manager starts again after 1 only.
pub const EXIT_STATUS: &str = "\
Exit status:
  0    ended by a signal (Ctrl-C, SIGTERM, SIGHUP) or --linger, with all blocks written
  1    failure that may pass: a store, path, socket, address, group, engine, size or file of a remote store that is
       taken or missing; an I/O error
  2    wrong or missing flag or setting: correct it and try again
  130  interrupted a second time, without waiting for the blocks";

/// Flags of `kvhoist serve`.
#[derive(clap::Args)]
pub struct Args {
    /// The socket that the service creates for its clients: its own user, and those of --socket-group and --allow-uid
    /// [default: $KVHOIST_SOCKET; else kvhoist.sock in /run/kvhoist where that folder exists, else in $XDG_RUNTIME_DIR,
    /// else in /run].
    #[arg(long, value_name = "FILE")]
    socket: Option<PathBuf>,
    /// A directory for stores. Repeat it, once for each drive. The same directories in the same order every time.
    #[arg(long = "path", value_name = "DIR", required_unless_present = "config")]
    paths: Vec<PathBuf>,
    /// Disk for all spaces.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, required_unless_present = "config")]
    capacity: Option<usize>,
    /// Host memory for the blocks of all spaces.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, required_unless_present = "config")]
    host_bytes: Option<usize>,
    /// JSON file with `path`, `capacity`, `host_bytes`, `shares` and the library's settings for the cache of every
    /// space. Flags override it. A space's name, block size and part of the disk and host memory are its clients'.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Serve HTTP at this address: /metrics for Prometheus, /healthz, and a page at /. There is no password: everyone
    /// who can reach it sees the names and the figures of spaces, but no blocks. The address is in the file
    /// SOCKET.targets.json, which Prometheus can read (file_sd_configs).
    #[arg(long, value_name = "IP:PORT", value_parser = http::parse_address)]
    http: Option<std::net::SocketAddr>,
    /// A name by which --http is reached. Requests for an IP address or localhost are answered, those for other names
    /// refused. Repeat it for several names.
    #[arg(long, value_name = "NAME", requires = "http")]
    http_host: Vec<String>,
    /// Send the metrics to an OpenTelemetry collector: http://HOST:PORT, its OTLP over HTTP. Every minute, or as
    /// OTEL_METRIC_EXPORT_INTERVAL says (milliseconds).
    #[cfg(feature = "otel")]
    #[arg(long, value_name = "URL", value_parser = http::otlp::parse_url)]
    otlp: Option<String>,
    /// Another user that may connect. Repeat it for several users.
    #[arg(long = "allow-uid", value_name = "UID")]
    uids: Vec<u32>,
    /// A group, by name or number, whose members may connect too. The socket has this group, and mode 0660.
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// The most memory that one client may lend.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "1TiB")]
    region_bytes: usize,
    /// The most memory that all clients together may lend [default: half of the address space that the process has
    /// left]. Half of it is divided equally between all connections that there may be; the other half goes to clients
    /// that want more.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    region_bytes_total: Option<usize>,
    /// The most regions that all clients together may register [default: a quarter of the mappings that the process
    /// has left, vm.max_map_count]. Divided as --region-bytes-total.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    regions_total: Option<u32>,
    /// Move all blocks through the service's host memory and keep them there, so that a block that several clients
    /// load is read once.
    #[arg(long)]
    keep_in_host: bool,
    /// End after this many seconds without a client.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    linger: Option<u64>,
    /// Minimum and maximum of the disk and host memory of a tenant's spaces, such as
    /// llama-8b:disk=200GiB..1TiB,host=8GiB..16GiB. A tenant's spaces are the one of this name and those whose names
    /// continue with "/", made by the service's user, or by the one that uid=UID names. Repeat it for other tenants.
    #[arg(long = "share", value_name = "NAME:disk=MIN..MAX,host=MIN..MAX,uid=UID", value_parser = share)]
    shares: Vec<Share>,
    /// Give each space the host memory that its clients ask for, and no more: none moves between spaces.
    #[arg(long)]
    no_move_host: bool,
    /// Do not pin clients' memory.
    #[arg(long)]
    no_pin: bool,
    /// When blocks are written to disk: write_through, when they are stored; by_value, when host memory needs their
    /// slots, and only blocks that are likely to be requested again [default: write_through]
    #[arg(long, value_name = "POLICY", value_parser = one_of(&[WritePolicy::WriteThrough, WritePolicy::ByValue]))]
    write_policy: Option<WritePolicy>,
    /// Bytes a day that by_value may write to disk, for all spaces together. A space has the same share of it as of the
    /// capacity.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    write_budget: Option<usize>,
    /// How the disk is read and written [default: auto]
    #[arg(long, value_name = "ENGINE", value_parser = choice::<StorageKind>())]
    storage: Option<StorageKind>,
    /// Whether a path without direct I/O is refused [default: require]
    #[arg(long, value_name = "MODE", value_parser = choice::<DirectIo>())]
    direct_io: Option<DirectIo>,
}

/// A share, whose refusal follows the name of the flag.
fn share(text: &str) -> Result<Share, String> {
    let wrong = |error: kvhoist::Error| error.to_string().replacen("share: ", "", 1);
    text.parse().map_err(wrong)
}

impl Args {
    fn config(&self) -> Result<ServerConfig, Failure> {
        let file = self.config.as_deref().map(Settings::read).transpose()?;
        let said = |name: &str, flag: Option<usize>, in_file: fn(&Settings) -> Option<u64>| {
            let bytes = flag.map(|bytes| bytes as u64).or_else(|| in_file(file.as_ref()?));
            let flag = name.replace('_', "-");
            bytes.ok_or_else(|| Failure::usage(format!("--config: found no {name}, expected `{name}`, or --{flag}")))
        };
        file.iter().for_each(|file| self.warn_of_engine(file));
        let mut config = ServerConfig::new(self.socket.clone().unwrap_or_else(default_socket));
        config.capacity_bytes = said("capacity", self.capacity, |file| file.capacity)?;
        config.host_bytes = said("host_bytes", self.host_bytes, Settings::host_bytes)?;
        config.paths = match &file {
            Some(file) if self.paths.is_empty() => file.paths(),
            _ => self.paths.clone(),
        };
        if config.paths.is_empty() {
            return Err(Failure::usage("--config: found no path, expected `path`, or --path"));
        }
        // Whoever reads its figures may be in another folder.
        let absolute = |path: &PathBuf| std::path::absolute(path);
        config.paths = config
            .paths
            .iter()
            .map(absolute)
            .collect::<Result<_, _>>()
            .map_err(|error| Failure::usage(format!("--path: {error}, expected the folder of a drive's stores")))?;
        config.shares = match &file {
            Some(file) if self.shares.is_empty() => file.shares.clone(),
            _ => self.shares.clone(),
        };
        config.uids.clone_from(&self.uids);
        config.socket_group.clone_from(&self.socket_group);
        config.region_bytes_max = self.region_bytes as u64;
        config.region_bytes_total_max = self.region_bytes_total.map(|bytes| bytes as u64);
        config.regions_total_max = self.regions_total;
        config.linger_ms = self.linger.map(|seconds| seconds * 1000);
        config.pin = !self.no_pin;
        config.move_host = !self.no_move_host;
        let bypass_host = file.as_ref().and_then(|file| file.bypass_host).unwrap_or(true);
        config.cache = file.map_or_else(Config::default, |file| file.config);
        config.cache.host.bypass = bypass_host && !self.keep_in_host;
        if let Some(storage) = self.storage {
            config.cache.disk.storage = storage;
        }
        if let Some(direct_io) = self.direct_io {
            config.cache.disk.direct_io = direct_io;
        }
        if let Some(policy) = self.write_policy {
            config.cache.disk.write_policy = policy;
        }
        if let Some(bytes) = self.write_budget {
            config.cache.disk.write_budget = Some(bytes as u64);
            // The file may say it in the other way.
            (config.cache.disk.drive_writes_per_day, config.cache.disk.drive_bytes) = (None, None);
        }
        Ok(config)
    }

    /// Settings by which an engine starts a service are none of the service's.
    fn warn_of_engine(&self, file: &Settings) {
        let flags = [
            ("service", "--socket", self.socket.is_some()),
            ("linger_s", "--linger", self.linger.is_some()),
            ("metrics_port", "--http", self.http.is_some()),
        ];
        for (name, flag, is_given) in flags {
            if file.of_engine.contains(&name) && !is_given {
                tracing::warn!("--config: found {name}, which has no effect on a service; give it {flag} instead");
            }
        }
    }

    /// Why the service did not start, with the status `of` that. A setting that no flag gave has its name in the file.
    fn failure(&self, error: Error, of: fn(Error) -> Failure) -> Failure {
        let is_of_flag = |field: &str| match field {
            "paths" => !self.paths.is_empty(),
            "capacity_bytes" => self.capacity.is_some(),
            "host_bytes" => self.host_bytes.is_some(),
            "shares" => !self.shares.is_empty(),
            "write_policy" => self.write_policy.is_some(),
            "write_budget" => self.write_budget.is_some(),
            "storage" => self.storage.is_some(),
            "direct_io" => self.direct_io.is_some(),
            _ => !SETTING_NAMES.contains(&field),
        };
        match (&self.config, &error) {
            (Some(file), Error::Config { field, .. }) if !is_of_flag(field) => {
                let error = error.with_settings_named(&[("paths", "path"), ("capacity_bytes", "capacity")]);
                let text = format!("--config {}: {error}", shown(file));
                of(error).saying(text)
            }
            _ => of(error),
        }
    }
}

/// Serves until a signal ends it.
pub fn run(args: &Args) -> Result<(), Failure> {
    // Before the server starts: a signal in between would kill the process at once.
    let started = Arc::new(OnceLock::new());
    end_by_signals(Arc::clone(&started))?;
    let mut config = args.config()?;
    config.cache = remote_store::opened(config.cache).map_err(|(error, may_pass)| {
        args.failure(error, if may_pass { Failure::that_may_pass } else { Failure::of_settings })
    })?;
    config.validate().map_err(|error| args.failure(error, Failure::of_settings))?;
    let paths = config.paths.clone();
    // Before the service makes anything.
    let bound = args.http.map(http::bind).transpose()?;
    if bound.is_some() {
        found::Targets::check(&config.socket)?;
    }
    let server = Arc::new(Server::start(config).map_err(|error| args.failure(error, Failure::of_service))?);
    drop(started.set(Arc::clone(&server)));
    let shown = show(args, &server, bound, paths);
    if shown.is_err() {
        server.drain();
    }
    let ended = server.wait().map_err(Failure::of_settings);
    shown.map(drop).and(ended)
}

/// Drains the service by the first signal, and ends the process by the second, or where there is no service yet.
fn end_by_signals(started: Arc<OnceLock<Arc<Server>>>) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])
        .map_err(|error| Failure::run(format!("cannot catch signals: {error}")))?;
    let end = move || {
        for (at, _) in signals.forever().enumerate() {
            // One that has just begun to listen is drained.
            let patience = Instant::now() + JUST_STARTED;
            while at == 0 && started.get().is_none() && Instant::now() < patience {
                thread::sleep(Duration::from_millis(5));
            }
            match started.get() {
                _ if at > 0 => std::process::exit(Failure::interrupted().exit_status().into()),
                None => std::process::exit(0),
                Some(server) => {
                    notify("STOPPING=1");
                    server.drain();
                }
            }
        }
    };
    let failed = |error| Failure::run(format!("cannot start a thread: {error}"));
    thread::Builder::new().name("kvhoist-signals".into()).spawn(end).map(drop).map_err(failed)
}

/// What others look at while a service runs.
#[derive(Default)]
struct Shown {
    _targets: Option<found::Targets>,
    #[cfg(feature = "otel")]
    _exporter: Option<http::otlp::Exporter>,
}

/// Shows the figures of a service that listens, and says so.
fn show(args: &Args, server: &Arc<Server>, bound: Option<http::Bound>, paths: Vec<PathBuf>) -> Result<Shown, Failure> {
    let source = Arc::new(http::Source::new(Arc::clone(server), paths));
    let mut said = format!("kvhoist: listening at {}\n", shown(server.socket()));
    let mut shown = Shown::default();
    if let Some(bound) = bound {
        said += &format!("kvhoist: http://{}\n", bound.address);
        shown._targets = Some(found::Targets::write(server.socket(), bound.address, args.linger.is_some())?);
        http::start(bound, &args.http_host, Arc::clone(&source))?;
    } else {
        found::Targets::remove(server.socket());
    }
    #[cfg(feature = "otel")]
    {
        shown._exporter = args.otlp.as_deref().map(|url| http::otlp::Exporter::start(url, source)).transpose()?;
    }
    emit(&said)?;
    notify("READY=1");
    if args.linger.is_some() {
        found::end_when_lost(Arc::clone(server))?;
    }
    Ok(shown)
}

/// Notifies systemd, if it asks for it (sd_notify(3)).
fn notify(state: &str) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&name),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = sent {
        drop(writeln!(std::io::stderr(), "kvhoist: cannot notify the service manager of {state}: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }

    fn config(flags: &[&str]) -> ServerConfig {
        let command = Command::parse_from([&["serve", "--socket", "s"], flags].concat());
        command.args.config().unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// A service manager starts again after 1 only. A driver may be loaded late, and a drive mounted.
    #[test]
    fn what_the_machine_does_not_have_yet_may_pass() {
        let Command { args } = Command::parse_from(["serve", "--config", "settings.json"]);
        for (field, status) in [("storage", 1), ("remote", 2), ("host_bytes", 1), ("cufile", 2), ("gdr_device", 2)] {
            let failure = args.failure(Error::config(field, "none", "one"), Failure::of_service);
            assert_eq!(failure.exit_status(), status, "{failure}");
            assert!(failure.to_string().contains(&format!("settings.json: {field}: found none")), "{failure}");
        }
    }

    #[test]
    fn flags_override_the_file_where_they_are_given() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("settings.json");
        let with = |settings: &str, flags: &[&str]| {
            let text = format!(r#"{{"path": "/a", "capacity": "1GiB", "host_bytes": "1MiB"{settings}}}"#);
            std::fs::write(&path, text).expect("written");
            config(&[&["--config", path.to_str().expect("UTF-8")], flags].concat())
        };
        let bypasses = |settings, flags: &[&str]| with(settings, flags).cache.host.bypass;
        assert!(bypasses("", &[]), "the default of a service");
        assert!(!bypasses(r#", "bypass_host": false"#, &[]));
        assert!(!bypasses(r#", "keep_in_host": true"#, &[]));
        assert!(bypasses(r#", "keep_in_host": false"#, &[]));
        assert!(!bypasses(r#", "bypass_host": true"#, &["--keep-in-host"]));
        assert!(config(&["--path", "/a", "--capacity", "1GiB", "--host-bytes", "1MiB"]).cache.host.bypass);

        let shares = ["a:disk=1MiB.."].map(|share| share.parse().expect("a share"));
        let settings = r#", "shares": ["a:disk=1MiB.."], "write_policy": "by_value", "write_budget": "1GiB""#;
        let from_file = with(settings, &[]);
        assert_eq!((from_file.capacity_bytes, from_file.host_bytes), (1 << 30, 1 << 20));
        assert_eq!((from_file.paths, from_file.shares), (vec![PathBuf::from("/a")], shares.to_vec()));
        assert_eq!(from_file.cache.disk.write_budget, Some(1 << 30));
        let flags = ["--path", "/b", "--capacity", "2GiB", "--host-bytes", "2MiB", "--write-budget", "2GiB"];
        let from_flags = with(settings, &flags);
        assert_eq!((from_flags.capacity_bytes, from_flags.host_bytes), (2 << 30, 2 << 20));
        assert_eq!((from_flags.paths, from_flags.shares), (vec![PathBuf::from("/b")], shares.to_vec()));
        assert_eq!(from_flags.cache.disk.write_budget, Some(2 << 30));
        assert_eq!(from_flags.cache.disk.write_policy, from_file.cache.disk.write_policy);
        let of_drive = r#", "write_policy": "by_value", "drive_writes_per_day": 1.0, "drive_bytes": 1000000000000"#;
        let from_flags = with(of_drive, &["--write-budget", "2GiB"]);
        from_flags.validate().expect("one budget");
        assert_eq!(from_flags.cache.disk.write_budget, Some(2 << 30));
    }
}

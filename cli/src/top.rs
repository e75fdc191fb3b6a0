//! `kvhoist top`: state and rates of a running service, refreshed.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    io::{ErrorKind, IsTerminal, Write, stdout},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use kvhoist::{Route, Stats, Tier};
use kvhoist_service::{ServiceStatus, SpaceStatus};
use terminal_size::{Height, Width, terminal_size_of};

use crate::{
    columns::columns,
    failure::Failure,
    interrupt,
    output::emit,
    shown::plain,
    size::show_bytes,
    socket::Socket,
    status::{quantiles, table},
};

/// Moves to the upper left corner. Lines are cleared one by one, because clearing the screen flickers.
const HOME: &str = "\x1b[H";
const CLEAR_TO_END: &str = "\x1b[K";
const CLEAR_LINE: &str = "\x1b[K\n";
const CLEAR_BELOW: &str = "\x1b[J";
/// A second screen, so that the shell's own is back at the end.
/// Longer lines are cut, because wrapped ones would push the first ones out of sight.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

/// How often a wait checks for an interrupt.
const LOOK: Duration = Duration::from_millis(50);

/// Flags of `kvhoist top`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: Socket,
    /// Seconds between two refreshes.
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = seconds)]
    every: f64,
    /// End after this many refreshes.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let found = text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    found.ok_or_else(|| format!("found {text}, expected 0.1 to 3600"))
}

/// Leaves the terminal as it was, however the command ends.
struct Screen;

impl Drop for Screen {
    fn drop(&mut self) {
        // The end of the terminal is no failure here.
        drop(emit(LEAVE));
    }
}

/// Shows the service until an interrupt, the last refresh of `--count`, or the end of the service.
pub fn run(args: &Args) -> Result<(), Failure> {
    let interrupted = interrupt::catch()?;
    let mut before = None;
    let mut now = (Instant::now(), ask(&args.socket, &interrupted)?);
    let is_terminal = stdout().is_terminal();
    let _screen = is_terminal.then(|| emit(ENTER).map(|()| Screen)).transpose()?;
    for look in 1.. {
        let text = frame(before.as_ref(), &now);
        let shown = match is_terminal {
            true => on_screen(&text, terminal_size_of(stdout())),
            false => text + "\n",
        };
        if !show(&shown)? {
            return Ok(());
        }
        if args.count.is_some_and(|count| look >= count) {
            return Ok(());
        }
        let until = now.0 + Duration::from_secs_f64(args.every);
        while Instant::now() < until {
            if interrupted.load(Ordering::Relaxed) {
                return Err(Failure::interrupted());
            }
            thread::sleep(LOOK.min(until.saturating_duration_since(Instant::now())));
        }
        let next = (Instant::now(), ask(&args.socket, &interrupted)?);
        before = Some(std::mem::replace(&mut now, next));
    }
    Ok(())
}

/// Asks the service on a thread of its own: one that hangs does not hold up an interrupt.
fn ask(socket: &Socket, interrupted: &AtomicBool) -> Result<ServiceStatus, Failure> {
    let (answer, answers) = mpsc::channel();
    let socket = socket.clone();
    let asks = move || drop(answer.send(socket.status()));
    let failed = |error| Failure::run(format!("cannot start a thread: {error}"));
    thread::Builder::new().name("kvhoist-top".into()).spawn(asks).map_err(failed)?;
    loop {
        match answers.recv_timeout(LOOK) {
            Ok(status) => return status,
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(Failure::run("the thread that asks has ended")),
            Err(_) if interrupted.load(Ordering::Relaxed) => return Err(Failure::interrupted()),
            Err(_) => {}
        }
    }
}

/// False if the reader of standard output is gone.
fn show(text: &str) -> Result<bool, Failure> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::run(format!("standard output: {error}"))),
    }
}

/// What fits on a terminal. Without a line end after the last line, which would scroll the first one out of sight.
fn on_screen(text: &str, size: Option<(Width, Height)>) -> String {
    let lines_max = size.map_or(24, |(_, Height(lines))| usize::from(lines)).max(2);
    let mut lines: Vec<Cow<'_, str>> = text.lines().map(Cow::from).collect();
    if lines.len() > lines_max {
        let left_out = lines.len() - (lines_max - 1);
        lines.truncate(lines_max - 1);
        lines.push(format!("{left_out} lines more: `kvhoist status` prints them").into());
    }
    format!("{HOME}{}{CLEAR_TO_END}{CLEAR_BELOW}", lines.join(CLEAR_LINE))
}

/// The rates of each open space since the refresh before, and how long its movements took since then by route; then the
/// table of `kvhoist status`.
fn frame(before: Option<&(Instant, ServiceStatus)>, now: &(Instant, ServiceStatus)) -> String {
    let mut text = String::from("   hits/s  misses/s  stores/s  evictions/s  straight/s  hit ratio  space\n");
    let (since, old) = before.map_or((Duration::ZERO, BTreeMap::new()), |(then, status)| {
        (now.0.saturating_duration_since(*then), figures(status))
    });
    let mut routes = Vec::new();
    for (folder, figure) in figures(&now.1) {
        let old = old.get(folder).filter(|_| !since.is_zero());
        let rate = |of: fn(&Figure) -> u64| {
            old.map_or(0.0, |old| of(&figure).saturating_sub(of(old)) as f64 / since.as_secs_f64())
        };
        let ratio = figure.hits as f64 / (figure.hits + figure.misses).max(1) as f64;
        let straight = show_bytes(rate(|figure| figure.straight) as u64);
        text += &format!(
            "{:>9.0}{:>10.0}{:>10.0}{:>13.0}{straight:>12}{ratio:>11.3}  {}\n",
            rate(|figure| figure.hits),
            rate(|figure| figure.misses),
            rate(|figure| figure.stores),
            rate(|figure| figure.evictions),
            plain(figure.namespace),
        );
        routes.extend(old.iter().flat_map(|old| moved(&figure, old, since)));
    }
    if !routes.is_empty() {
        text += &("\n".to_owned() + &columns(&["moved/s", "p50", "p99", "route", "space"], &routes));
    }
    text + "\n" + &table(&now.1, &[])
}

/// A row for each route that moved something between two refreshes.
fn moved(figure: &Figure<'_>, old: &Figure<'_>, since: Duration) -> Vec<Vec<String>> {
    let row = |route: Route| {
        let new = figure.stats.route_durations(route).since(old.stats.route_durations(route));
        let rate = format!("{:.0}", new.count() as f64 / since.as_secs_f64());
        let names = vec![route.name().to_owned(), plain(figure.namespace).into_owned()];
        (new.count() > 0).then(|| [vec![rate], quantiles(&new), names].concat())
    };
    Route::ALL.into_iter().filter_map(row).collect()
}

/// Sums over the tiers of a space.
struct Figure<'a> {
    namespace: &'a str,
    hits: u64,
    misses: u64,
    stores: u64,
    evictions: u64,
    straight: u64,
    stats: &'a Stats,
}

/// The open spaces by folder: no two have the same.
fn figures(status: &ServiceStatus) -> BTreeMap<&str, Figure<'_>> {
    status.spaces.iter().filter_map(|space| Some((space.folder.as_str(), Figure::of(space)?))).collect()
}

impl Figure<'_> {
    /// `None` for a closed space.
    fn of(space: &SpaceStatus) -> Option<Figure<'_>> {
        let stats = space.stats.as_ref()?;
        Some(Figure {
            namespace: &space.namespace,
            hits: Tier::WITH_REMOTE.iter().map(|&tier| stats.tier(tier).hits).sum(),
            misses: stats.misses,
            stores: stats.stores,
            evictions: Tier::ALL.iter().map(|&tier| stats.tier(tier).evictions).sum(),
            straight: stats.straight_bytes(),
            stats,
        })
    }
}

#[cfg(test)]
mod tests {
    use kvhoist::{BlockKey, Cache, Config, DirectIo, DiskPath, block_on};
    use kvhoist_service::ClientStatus;

    use super::*;

    #[test]
    fn the_rates_of_two_spaces_stay_on_a_terminal_of_24_lines() {
        let space = |n: u64| SpaceStatus {
            namespace: format!("model {n}"),
            folder: format!("space-{n}"),
            stats: Some(Stats::default()),
            ..SpaceStatus::default()
        };
        let clients = vec![ClientStatus::default(); 8];
        let status = ServiceStatus { spaces: vec![space(1), space(2)], clients, ..ServiceStatus::default() };
        let text = frame(None, &(Instant::now(), status));
        let size = |lines| Some((Width(80), Height(lines)));
        let shown = on_screen(&text, size(24));
        let lines: Vec<&str> = shown.split('\n').collect();
        assert_eq!(lines.len(), 24, "and no line end that would scroll: {shown:?}");
        assert!(lines[0].contains("hits/s") && lines[1].contains("model 1") && lines[2].contains("model 2"), "{shown}");
        let more = text.lines().count() - 23;
        assert!(lines[23].starts_with(&format!("{more} lines more")), "{shown}");
        assert_eq!(on_screen(&text, size(200)).split('\n').count(), text.lines().count(), "all of it where it fits");
        assert!(!on_screen(&text, size(200)).contains("lines more"));
    }

    fn at(now: Instant, hits: u64) -> (Instant, ServiceStatus) {
        let stats = serde_json::json!({
            "misses": 10,
            "tiers": { "disk": { "hits": hits } },
            "routes": { "disk_to_region": { "bytes": hits << 20 } },
        });
        let stats = serde_json::from_value(stats).expect("figures");
        let space = SpaceStatus { folder: "space-1".into(), stats: Some(stats), ..SpaceStatus::default() };
        (now, ServiceStatus { spaces: vec![space, SpaceStatus::default()], ..ServiceStatus::default() })
    }

    #[test]
    fn durations_are_those_of_the_movements_since_the_refresh_before() {
        let place = tempfile::tempdir().expect("a directory");
        let config =
            Config::default().block_bytes(4096).host_blocks(4).disks(vec![DiskPath::with_blocks(place.path(), 8)]);
        let cache = block_on(Cache::open(config.direct_io(DirectIo::Prefer))).expect("a cache");
        let began = Instant::now();
        let stored = |n: u8| {
            block_on(cache.store(&BlockKey::new([n; 32]), None, &[n; 4096])).expect("stored");
            let stats = Some(cache.stats());
            let space = SpaceStatus { namespace: "model".into(), stats, ..SpaceStatus::default() };
            (began + Duration::from_secs(n.into()), ServiceStatus { spaces: vec![space], ..ServiceStatus::default() })
        };
        let (first, _, third) = (stored(0), stored(1), stored(2));
        let rows = |text: String| {
            let of_route = text.lines().filter(|line| line.contains("host_to_disk")).map(str::to_owned);
            of_route.collect::<Vec<_>>()
        };
        let [rates, all] = rows(frame(Some(&first), &third)).try_into().expect("since then, and in all");
        assert!(rates.trim_start().starts_with("1 ") && rates.ends_with("host_to_disk  model"), "{rates}");
        assert!(all.starts_with("host_to_disk          3 "), "{all}");
        assert_eq!(rows(frame(None, &first)).len(), 1, "nothing before it");
        assert_eq!(rows(frame(Some(&third), &third)).len(), 1, "nothing new");
        block_on(cache.close()).expect("closed");
    }

    #[test]
    fn rates_are_differences_over_the_time_between() {
        let began = Instant::now();
        let (first, second) = (at(began, 10), at(began + Duration::from_secs(4), 30));
        let rates =
            |text: String| text.lines().nth(1).expect("a space").split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(rates(frame(None, &first)), "0 0 0 0 0 B 0.500");
        assert_eq!(rates(frame(Some(&first), &second)), "5 0 0 0 5.0 MiB 0.750");
        assert_eq!(rates(frame(Some(&second), &first)), "0 0 0 0 0 B 0.500", "a service that began anew");
    }
}

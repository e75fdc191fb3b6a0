//! A node's service beside the cache in one's own process, in turns.
//!
//!     cargo bench --bench service -- [--path DIR] [--block-bytes N] [--rounds N] [--idle-s N]
//!
//! Prints: 128 pages set and got, in-process over through the service; a look-up of 4,096 keys; the smallest request
//! beside bare round trips of as many bytes over a socket; bytes read for eight clients that load the same pages; what
//! 64 idle clients cost the service. Without DIR a temporary directory of the target folder.

use std::{
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

use kvhoist::{
    BlockKey, Cache, Config, DirectIo, DiskPath, Segment, block_on,
    service::{Client, ClientOptions, Server, ServerConfig, SharedMemory},
};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Pages of one of SGLang's calls.
const PAGES: usize = 128;
const LOOKED_UP: usize = 4096;
const SERVE: &str = "--serve";

struct Options {
    path: PathBuf,
    block_bytes: usize,
    rounds: usize,
    idle_s: u64,
}

fn options(arguments: &[String]) -> Outcome<Options> {
    let mut found =
        Options { path: PathBuf::from(env!("CARGO_TARGET_TMPDIR")), block_bytes: 5 << 19, rounds: 5, idle_s: 10 };
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word}: found no value"));
        match word.as_str() {
            "--path" => found.path = value()?.into(),
            "--block-bytes" => found.block_bytes = value()?.parse()?,
            "--rounds" => found.rounds = value()?.parse()?,
            "--idle-s" => found.idle_s = value()?.parse()?,
            "--bench" => {}
            other => return Err(format!("{other}: expected --path, --block-bytes, --rounds or --idle-s").into()),
        }
    }
    Ok(found)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let ended = match arguments.first() {
        Some(word) if word == SERVE => serve(&arguments[1..]),
        _ => options(&arguments).and_then(|options| run(&options)),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("service: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The service's process, until its standard input ends.
fn serve(words: &[String]) -> Outcome<()> {
    let [socket, path, capacity, host_bytes] = words else { return Err("--serve: four words".into()) };
    let mut config = ServerConfig::new(socket);
    config.paths = vec![path.into()];
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
struct Service {
    child: Child,
    socket: PathBuf,
}

impl Service {
    fn start(folder: &Path, capacity: u64, host_bytes: u64) -> Outcome<Self> {
        let socket = env::temp_dir().join(format!("kvhoist-bench-{}", std::process::id()));
        let words = [capacity.to_string(), host_bytes.to_string()];
        let mut child = Command::new(env::current_exe()?)
            .arg(SERVE)
            .args([socket.as_os_str(), folder.as_os_str()])
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        Ok(Service { child, socket })
    }

    /// Time that its threads have run.
    fn ran(&self) -> Outcome<Duration> {
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

fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    BlockKey::new(bytes)
}

/// A pool of pages, and where each of them lies.
struct Pool {
    memory: Arc<SharedMemory>,
    places: Vec<Vec<Segment>>,
    block_bytes: usize,
}

impl Pool {
    fn new(block_bytes: usize) -> Outcome<Self> {
        let memory = Arc::new(SharedMemory::new(PAGES * block_bytes)?);
        let place = |at: usize| vec![Segment { ptr: memory.as_ptr().wrapping_add(at * block_bytes), len: block_bytes }];
        Ok(Pool { places: (0..PAGES).map(place).collect(), memory, block_bytes })
    }

    /// Other bytes for every round: what is known is not written again.
    fn fill(&self, round: u64) {
        for at in 0..PAGES {
            let mut state = (round << 32 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut page = vec![0u8; self.block_bytes];
            for word in page.chunks_exact_mut(8) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                word.copy_from_slice(&state.to_le_bytes());
            }
            self.memory.write(at * self.block_bytes, &page);
        }
    }
}

fn all_done(results: &[kvhoist::Result<bool>]) -> Outcome<()> {
    match results.iter().position(|result| !matches!(result, Ok(true))) {
        None => Ok(()),
        Some(at) => Err(format!("page {at}: {:?}", results[at]).into()),
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn timed(run: impl FnOnce() -> Outcome<()>) -> Outcome<f64> {
    let begun = Instant::now();
    run()?;
    Ok(begun.elapsed().as_secs_f64())
}

fn run(options: &Options) -> Outcome<()> {
    let folder = tempfile::tempdir_in(&options.path)?;
    let (own, shared) = (folder.path().join("own"), folder.path().join("service"));
    [&own, &shared].into_iter().try_for_each(fs::create_dir)?;
    let blocks = (options.rounds as u32 + 1) * PAGES as u32;
    let (bytes, host) = (options.block_bytes as u64, (3 * PAGES * options.block_bytes) as u64 / 2);
    let capacity = kvhoist::store::path_bytes(u64::from(blocks), bytes);
    let small = 64u64 << 20;
    let service = Service::start(&shared, capacity + small, host + small)?;
    let config = Config::default()
        .block_bytes(options.block_bytes)
        .host_blocks((host / bytes) as u32)
        .disks(vec![DiskPath::with_blocks(own, blocks)])
        .bypass_host(true)
        .direct_io(DirectIo::Prefer);
    let cache = block_on(Cache::open(config))?;
    let mut wanted = ClientOptions::new("pages", options.block_bytes);
    (wanted.capacity_bytes, wanted.host_bytes) = (capacity, host);
    let client = block_on(Client::connect(&service.socket, wanted.clone()))?;
    println!("{PAGES} pages of {bytes} bytes, {} rounds\n", options.rounds);
    pages(options, &cache, &client)?;
    look_ups(&service.socket, small)?;
    sharing(options, &service, &wanted, client)?;
    idle(options, &service)?;
    block_on(cache.close())?;
    Ok(())
}

/// Pages out and in, in-process and through the service in turns.
fn pages(options: &Options, cache: &Cache, client: &Client) -> Outcome<()> {
    let (pool, lent) = (Pool::new(options.block_bytes)?, Pool::new(options.block_bytes)?);
    // SAFETY: the pool lives until it is unregistered below.
    let region = unsafe { cache.register_host(pool.memory.as_ptr(), pool.memory.len()) }?;
    let pinned = block_on(cache.pin_region(&region))?;
    let theirs = block_on(client.register(&lent.memory))?;
    println!("pools pinned: in-process {pinned}, by the service {}", theirs.is_pinned());
    let (mut sets, mut gets) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for round in 0..=options.rounds as u64 {
        let keys: Vec<BlockKey> = (0..PAGES as u64).map(|at| key(round << 32 | at)).collect();
        [&pool, &lent].into_iter().for_each(|pool| pool.fill(round));
        let own = [
            timed(|| all_done(&block_on(cache.store_from(&keys, None, &pool.places))?))?,
            timed(|| all_done(&block_on(cache.load_into(&keys, &pool.places))?))?,
        ];
        let through = [
            timed(|| all_done(&block_on(client.store_from(&keys, None, &lent.places))?))?,
            timed(|| all_done(&block_on(client.load_into(&keys, &lent.places))?))?,
        ];
        // The first round touches what has not been touched before.
        if round > 0 {
            [own[0], through[0]].into_iter().zip(&mut sets).for_each(|(time, times)| times.push(time));
            [own[1], through[1]].into_iter().zip(&mut gets).for_each(|(time, times)| times.push(time));
        }
    }
    let bytes = (PAGES * options.block_bytes) as f64 / 1e9;
    for (name, [own, through]) in [("set", &mut sets), ("get", &mut gets)] {
        let (own, through) = (bytes / median(own), bytes / median(through));
        println!("{name}: in-process {own:.2} GB/s, service {through:.2} GB/s, ratio {:.3}", through / own);
    }
    block_on(client.unregister(&theirs))?;
    block_on(cache.unregister(&region))?;
    Ok(())
}

/// Look-ups of many keys and of one, beside bare round trips.
fn look_ups(socket: &Path, small: u64) -> Outcome<()> {
    const BLOCK_BYTES: usize = 4096;
    let mut wanted = ClientOptions::new("small", BLOCK_BYTES);
    (wanted.capacity_bytes, wanted.host_bytes) = (small, small);
    let client = block_on(Client::connect(socket, wanted))?;
    let keys: Vec<BlockKey> = (0..LOOKED_UP as u64).map(key).collect();
    let block = Arc::new(SharedMemory::new(BLOCK_BYTES)?);
    block_on(client.register(&block))?;
    let places = vec![vec![Segment { ptr: block.as_ptr(), len: BLOCK_BYTES }]; LOOKED_UP];
    all_done(&block_on(client.store_from(&keys, None, &places))?)?;
    let mut times = Vec::new();
    for _ in 0..300 {
        times.push(timed(|| match block_on(client.match_len(&keys))? {
            LOOKED_UP => Ok(()),
            other => Err(format!("{other} keys found").into()),
        })?);
    }
    println!("exists of {LOOKED_UP} keys: p50 {:.0} us", median(&mut times) * 1e6);
    let (mut ours, mut theirs) = UnixStream::pair()?;
    // As many bytes as a look-up of one key has, each way.
    let echo = thread::spawn(move || {
        let mut frame = [0; 52];
        while theirs.read_exact(&mut frame).is_ok() && theirs.write_all(&frame[..20]).is_ok() {}
    });
    let (mut bare, mut asked) = (Vec::new(), Vec::new());
    for _ in 0..5_000 {
        bare.push(timed(|| {
            ours.write_all(&[0; 52])?;
            Ok(ours.read_exact(&mut [0; 20])?)
        })?);
        asked.push(timed(|| match block_on(client.match_len(&keys[..1]))? {
            1 => Ok(()),
            other => Err(format!("{other} keys found, expected 1").into()),
        })?);
    }
    drop(ours);
    drop(echo.join());
    let (bare, asked) = (median(&mut bare) * 1e6, median(&mut asked) * 1e6);
    println!("small request: p50 {asked:.1} us, bare round trip {bare:.1} us, {:.2} times", asked / bare);
    Ok(())
}

/// Eight clients that load the same pages.
fn sharing(options: &Options, service: &Service, wanted: &ClientOptions, first: Client) -> Outcome<()> {
    const CLIENTS: usize = 8;
    let mut clients = vec![first];
    for _ in 1..CLIENTS {
        clients.push(block_on(Client::connect(&service.socket, wanted.clone()))?);
    }
    let keys: Vec<BlockKey> = (0..PAGES as u64).map(|at| key(1 << 32 | at)).collect();
    let before = block_on(clients[0].stats())?.read_bytes;
    let begin = Barrier::new(CLIENTS);
    let begun = Instant::now();
    thread::scope(|scope| {
        let loads: Vec<_> =
            clients.iter().map(|client| scope.spawn(|| load_all(client, &keys, options, &begin))).collect();
        loads.into_iter().try_for_each(|load| load.join().map_err(|_| "a client's thread panicked")?)
    })?;
    let elapsed = begun.elapsed().as_secs_f64();
    let read = block_on(clients[0].stats())?.read_bytes - before;
    let copy = (PAGES * options.block_bytes) as f64;
    println!(
        "{CLIENTS} clients load the same {PAGES} pages: {:.3} copies read, {:.2} GB/s in all",
        read as f64 / copy,
        CLIENTS as f64 * copy / elapsed / 1e9
    );
    Ok(())
}

fn load_all(client: &Client, keys: &[BlockKey], options: &Options, begin: &Barrier) -> Outcome<()> {
    const CALL: usize = 32;
    let memory = Arc::new(SharedMemory::new(CALL * options.block_bytes)?);
    let region = block_on(client.register(&memory))?;
    let bytes = options.block_bytes;
    let place = |at: usize| vec![Segment { ptr: memory.as_ptr().wrapping_add(at * bytes), len: bytes }];
    let places: Vec<_> = (0..CALL).map(place).collect();
    begin.wait();
    for keys in keys.chunks(CALL) {
        all_done(&block_on(client.load_into(keys, &places[..keys.len()]))?)?;
    }
    Ok(block_on(client.unregister(&region))?)
}

/// What the service costs while nobody asks anything.
fn idle(options: &Options, service: &Service) -> Outcome<()> {
    let mut wanted = ClientOptions::new("small", 4096);
    wanted.host_bytes = 0;
    let connect = |_| block_on(Client::connect(&service.socket, wanted.clone()));
    let clients: Vec<Client> = (0..64).map(connect).collect::<Result<_, _>>()?;
    let before = service.ran()?;
    // The measurement: nothing happens for so long.
    thread::sleep(Duration::from_secs(options.idle_s));
    let ran = service.ran()?.saturating_sub(before);
    println!(
        "{} idle clients: {:.2} ms of the service in {} s",
        clients.len(),
        ran.as_secs_f64() * 1e3,
        options.idle_s
    );
    Ok(())
}

//! The remote tier over S3 through a slow link, beside OpenDAL's own loop, in interleaved rounds.
//!
//!     cargo bench -p kvhoist-remote --bench tier -- [--endpoint URL] [--mib N] [--block-bytes N] [--rounds N]
//!                                                   [--delay-ms N] [--mb-per-s N]
//!
//! The store is a bucket named `bucket` at the endpoint; without one, a double of S3 in a process of its own, so that
//! its processor time is not the contenders'. Either is reached through a proxy, in that process too, which delivers
//! each byte so many milliseconds after it came in, half of them each way, and no more than so many bytes a second.
//!
//! OpenDAL's loop reads the same objects whole, as many at a time as the tier does, and drops what it has read. The
//! tier's calls are one `fetch_many` of a chain by a cache that is opened anew for each round: every block is verified,
//! copied into a host slot and published. After the rounds: requests for each 8 MiB; how long a look-up of 4,096 keys
//! takes, which the store has; and, without an endpoint, how long local hits take while the store is away.

mod away;
#[path = "../../tests/common/double.rs"]
#[allow(dead_code)]
mod double;
mod link;

use std::{
    io::{self, BufRead, BufReader, Write},
    process::{Child, Command, ExitCode, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use double::{Double, Fault};
use futures_util::{StreamExt, TryStreamExt, stream};
use kvhoist::{BlockKey, Cache, Config, RemotePolicy, Tier, remote::RemoteStore};
use kvhoist_bench_kit::{
    drive::{key, other},
    measure::{Entrant, Sample, Spread, Stopwatch, interleave, ratio, table},
    pattern::{stamp, verify},
};
use opendal::{HttpTransporter, OperationContext, Operator, services};
use opendal_http_transport_reqwest::ReqwestTransport;
use tokio::runtime::Runtime;

/// Keys of one look-up.
const LOOKED_UP: u64 = 4096;
const LOOK_UPS: usize = 200;
const LOOKED_UP_BLOCK_BYTES: usize = 4096;

const USAGE: &str =
    "[--endpoint URL] [--mib N] [--block-bytes N] [--rounds N] [--delay-ms N] [--mb-per-s N]; each N 1 or more";

struct Options {
    endpoint: Option<String>,
    mib: u64,
    block_bytes: usize,
    rounds: u64,
    delay_ms: u64,
    mb_per_s: u64,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.first().map(String::as_str) {
        Some("--link") => serve(&arguments[1..]),
        _ => Options::parse(&arguments).and_then(|options| run(&options)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tier: {error}");
            ExitCode::FAILURE
        }
    }
}

impl Options {
    fn parse(arguments: &[String]) -> io::Result<Self> {
        let mut options =
            Options { endpoint: None, mib: 256, block_bytes: 1 << 20, rounds: 5, delay_ms: 20, mb_per_s: 1000 };
        let mut arguments = arguments.iter().filter(|argument| *argument != "--bench");
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or_else(|| other(format!("found no value of {name}, expected {USAGE}")))?;
            let number = || match value.parse::<u64>() {
                Ok(number) if number > 0 => Ok(number),
                _ => Err(other(format!("found {name} {value}, expected {USAGE}"))),
            };
            match name.as_str() {
                "--endpoint" => options.endpoint = Some(value.clone()),
                "--mib" => options.mib = number()?,
                "--block-bytes" => options.block_bytes = number()? as usize,
                "--rounds" => options.rounds = number()?,
                "--delay-ms" => options.delay_ms = number()?,
                "--mb-per-s" => options.mb_per_s = number()?,
                _ => return Err(other(format!("found {name}, expected {USAGE}"))),
            }
        }
        Ok(options)
    }
}

/// The other process: the double, where there is no other server, and the link to it. Ends with its standard input.
fn serve(arguments: &[String]) -> io::Result<()> {
    let [target, delay_ms, mb_per_s] = arguments else { return Err(other("found other arguments of --link")) };
    let double = (target == "double").then(Double::start);
    let target = double.as_ref().map_or_else(|| target.clone(), |double| format!("127.0.0.1:{}", double.port));
    let number = |text: &String| text.parse().map_err(other);
    let is_cut = Arc::new(AtomicBool::new(false));
    let delay = Duration::from_millis(number(delay_ms)?);
    let port = link::start(&target, delay, number(mb_per_s)? * 1_000_000, Arc::clone(&is_cut))?;
    println!("{port}");
    io::stdout().flush()?;
    for trouble in io::stdin().lines() {
        let Some(double) = &double else { continue };
        let trouble = trouble?;
        is_cut.store(trouble == "cut", Ordering::Relaxed);
        double.fail(match trouble.as_str() {
            "503" => Some(Fault::Answer(503, "SlowDown")),
            "silence" => Some(Fault::Silence),
            "slow" => Some(Fault::Slow(Duration::from_secs(2))),
            _ => None,
        });
    }
    Ok(())
}

/// The process with the link, and the port of its near end.
struct Link {
    child: Child,
    port: u16,
}

impl Link {
    fn start(options: &Options) -> io::Result<Link> {
        let endpoint = options.endpoint.as_deref().unwrap_or("http://double");
        let target = endpoint.trim_start_matches("http://").trim_end_matches('/').to_owned();
        let arguments = [target, options.delay_ms.to_string(), options.mb_per_s.to_string()];
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--link").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut told = String::new();
        BufReader::new(child.stdout.take().expect("it is piped")).read_line(&mut told)?;
        let port = told.trim().parse().map_err(|_| other("found no port of the link's process"))?;
        Ok(Link { child, port })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        drop(self.child.wait());
    }
}

fn run(options: &Options) -> io::Result<()> {
    let set = [
        ("AWS_ACCESS_KEY_ID", "AKIATEST"),
        ("AWS_SECRET_ACCESS_KEY", "secretsecret"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ];
    for (name, value) in set.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()) {
        // SAFETY: no other thread has been started.
        unsafe { std::env::set_var(name, value) };
    }
    _ = rustls::crypto::ring::default_provider().install_default();
    let mut link = Link::start(options)?;
    let endpoint = format!("http://127.0.0.1:{}", link.port);
    let store = || kvhoist_remote::open(&format!("s3://bucket/bench?endpoint={endpoint}")).map_err(other);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let blocks = (options.mib << 20) / options.block_bytes as u64;
    let keys: Vec<_> = (0..blocks).map(key).collect();
    // Of this run alone: the server may be another's.
    let namespace = format!("bench-{}", std::process::id());
    let config = Config::default()
        .block_bytes(options.block_bytes)
        .host_blocks(blocks as u32 + 16)
        .namespace(namespace.clone())
        .remote_deadline_ms(600_000);

    runtime.block_on(write(config.clone(), store()?, &keys))?;
    let bytes = blocks * options.block_bytes as u64;
    let mut requests = 0;
    let all = interleave(
        options.rounds,
        &mut [
            Entrant::new("OpenDAL's loop", |_| opendal_loop(&runtime, &endpoint, &*store()?)),
            Entrant::new("the remote tier", |_| {
                let (sample, reads) = runtime.block_on(fetch(config.clone(), store()?, &keys))?;
                requests = reads;
                Ok(sample)
            }),
        ],
    )?;
    let title = format!(
        "{} MiB in blocks of {} KiB, {} ms, {} MB/s",
        options.mib,
        options.block_bytes >> 10,
        options.delay_ms,
        options.mb_per_s
    );
    println!("{}", table(&title, &all));
    println!("the remote tier over OpenDAL's loop: {:.2}", ratio(&all[1], &all[0], Sample::mib_per_s));
    println!("requests for each 8 MiB: {:.2}", requests as f64 / (bytes as f64 / f64::from(8 << 20)));
    let small = config.clone().block_bytes(LOOKED_UP_BLOCK_BYTES).host_blocks(LOOKED_UP as u32 + 16);
    runtime.block_on(look_up(small.namespace(format!("{namespace}-look-up")), store()?))?;
    if options.endpoint.is_none() {
        let control = link.child.stdin.as_mut().expect("it is piped");
        runtime.block_on(away::measure(config, store()?, &keys, options.rounds, control))?;
    }
    Ok(())
}

/// Has a cache write a chain to the store.
async fn write(config: Config, store: Arc<dyn RemoteStore>, keys: &[BlockKey]) -> io::Result<()> {
    let config = config.remote_store(store).remote_policy(RemotePolicy::Stored).remote_upload_bytes_per_s(1 << 40);
    let mut payload = vec![0; config.block_bytes];
    let cache = Cache::open(config).await.map_err(other)?;
    for (n, key) in keys.iter().enumerate() {
        stamp(&mut payload, n as u64);
        let parent = n.checked_sub(1).map(|before| &keys[before]);
        cache.store(key, parent, &payload).await.map_err(other)?;
        // What waits to be written is bounded.
        while cache.stats().stores > cache.stats().tier(Tier::Remote).resident + 512 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    known(&cache, keys.len()).await?;
    cache.close().await.map_err(other)?;
    Ok(())
}

/// Waits until the cache knows that the store has so many blocks.
async fn known(cache: &Cache, blocks: usize) -> io::Result<()> {
    let until = Instant::now() + Duration::from_secs(300);
    loop {
        let found = cache.stats().tier(Tier::Remote).resident;
        if found == blocks as u64 {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(other(format!("found {found} blocks in the store, expected {blocks}")));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Reads every object whole; what the bytes of the blocks in them cost.
fn opendal_loop(runtime: &Runtime, endpoint: &str, store: &dyn RemoteStore) -> io::Result<Sample> {
    let in_flight = store.capabilities().requests_in_flight as usize;
    let service = services::S3::default().bucket("bucket").root("/bench").endpoint(endpoint).region("us-east-1");
    let transport = HttpTransporter::new(ReqwestTransport::new(reqwest::Client::new()));
    let context = OperationContext::new().with_http_transport(transport);
    let operator = Operator::new(service).map_err(other)?.with_context(context);
    runtime.block_on(async {
        let objects = store.list("", None).await.map_err(other)?.objects;
        let watch = Stopwatch::start();
        let read = async |name: String| operator.read(&name).await.map(|buffer| buffer.len() as u64);
        let names = stream::iter(objects.into_iter().map(|object| object.name));
        let lengths: Vec<u64> = names.map(read).buffer_unordered(in_flight).try_collect().await.map_err(other)?;
        Ok(watch.stop(lengths.iter().sum()))
    })
}

/// Fetches the chain by a cache that has nothing of it; also how many reads that took.
async fn fetch(config: Config, store: Arc<dyn RemoteStore>, keys: &[BlockKey]) -> io::Result<(Sample, u64)> {
    let block_bytes = config.block_bytes as u64;
    let cache = Cache::open(config.remote_store(store).remote_policy(RemotePolicy::Never)).await.map_err(other)?;
    known(&cache, keys.len()).await?;
    let watch = Stopwatch::start();
    let found = cache.fetch_many(keys).await;
    let sample = watch.stop(keys.len() as u64 * block_bytes);
    for (n, block) in found.into_iter().enumerate() {
        verify(&block.map_err(other)?.ok_or_else(|| other(format!("block {n} was not brought")))?, n as u64)?;
    }
    let reads = cache.stats().remote_reads;
    cache.close().await.map_err(other)?;
    Ok((sample, reads))
}

/// Looks up a chain of blocks that the store has, again and again.
async fn look_up(config: Config, store: Arc<dyn RemoteStore>) -> io::Result<()> {
    let keys: Vec<_> = (0..LOOKED_UP).map(|n| key(1 << 32 | n)).collect();
    write(config.clone(), Arc::clone(&store), &keys).await?;
    let cache = Cache::open(config.remote_store(store).remote_policy(RemotePolicy::Never)).await.map_err(other)?;
    known(&cache, keys.len()).await?;
    let mut times = Vec::new();
    for _ in 0..LOOK_UPS {
        let began = Instant::now();
        let found = cache.match_len(&keys);
        times.push(began.elapsed().as_secs_f64() * 1e6);
        if found != keys.len() {
            return Err(other(format!("found {found} leading blocks, expected {LOOKED_UP}")));
        }
    }
    let Spread { median, max, .. } = Spread::of(times);
    let reads = cache.stats().remote_reads;
    println!("a look-up of {LOOKED_UP} keys: {median:.0} us (largest {max:.0}), {reads} reads of the store");
    cache.close().await.map_err(other)?;
    Ok(())
}

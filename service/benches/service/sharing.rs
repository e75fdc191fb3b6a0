//! Eight processes that load the same pages, and eight that load pages of their own.

use std::{
    fs::{self, File, OpenOptions},
    io::{BufRead, Write},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use kvhoist::{BlockKey, SharedMemory, block_on};
use kvhoist_service::{Client, ClientOptions};

use crate::{
    node::{Peer, Service, all_go},
    options::{Options, Outcome},
    pool::{PAGES, Pool, all_done, key, median, timed},
};

const CLIENTS: usize = 8;
/// Threads that read as the clients do, without a cache.
const READERS: usize = 32;

/// A client's process: SOCKET SPACE BLOCK_BYTES CAPACITY HOST_BYTES FIRST_KEY SEED STORES. Stores its pages where
/// STORES is 1, then loads all of them for each line of its input.
pub fn client(words: &[String]) -> Outcome<()> {
    let [socket, space, numbers @ ..] = words else { return Err("--client: found too few words".into()) };
    let numbers: Vec<u64> = numbers.iter().map(|word| word.parse()).collect::<Result<_, _>>()?;
    let [block_bytes, capacity, host_bytes, first, seed, stores] = numbers[..] else {
        return Err("--client: found too few numbers".into());
    };
    let mut wanted = ClientOptions::new(space, block_bytes as usize);
    (wanted.capacity_bytes, wanted.host_bytes) = (capacity, host_bytes);
    let client = block_on(Client::connect(socket, wanted))?;
    let pool = Pool::new(block_bytes as usize)?;
    // SAFETY: nobody touches a block of it while the block is on its way.
    let lent = unsafe { kvhoist::Memory::shared(Arc::clone(&pool.memory)) };
    block_on(client.register(lent.pinned(true)))?;
    let keys: Vec<BlockKey> = (first..first + PAGES as u64).map(key).collect();
    pool.fill(seed);
    if stores == 1 {
        all_done(&block_on(client.store_from(&keys, None, &pool.places))?)?;
    }
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        line?;
        all_done(&block_on(client.load_into(&keys, &pool.places))?)?;
        println!("done");
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn start(service: &Service, space: &str, numbers: [u64; 6]) -> Outcome<Peer> {
    let mut words = vec![service.socket.display().to_string(), space.to_owned()];
    words.extend(numbers.map(|number| number.to_string()));
    Peer::start(&words)
}

/// Bytes that a space has read from its drives, and those of its pages in host memory.
fn figures(service: &Service, space: &str) -> Outcome<(u64, u64)> {
    let status = kvhoist_service::status(&service.socket)?;
    let found = status.spaces.iter().find(|found| found.namespace == space).ok_or("no such space")?;
    let stats = found.stats.as_ref().ok_or("it is closed")?;
    Ok((stats.tier(kvhoist::Tier::Disk).bytes_out, stats.tier(kvhoist::Tier::Host).resident * found.block_bytes))
}

/// Eight processes load the same pages, which are on the drive: a tensor-parallel group of an MLA model.
pub fn same_pages(options: &Options, folder: &Path) -> Outcome<()> {
    let bytes = options.block_bytes as u64;
    let copy = PAGES as u64 * bytes;
    let host = (PAGES * options.block_bytes.next_multiple_of(4096)) as u64;
    let capacity = kvhoist::DiskPath::file_bytes(PAGES as u64, bytes);
    let folder = folder.join("same");
    fs::create_dir(&folder)?;
    let numbers = |stores| [bytes, capacity, host, 0, 1, stores];
    let writer = Service::start(std::slice::from_ref(&folder), capacity, host)?;
    start(&writer, "same", numbers(1))?.answered()?;
    // A restart: nothing is in host memory.
    drop(writer);
    let service = Service::start(std::slice::from_ref(&folder), capacity, host)?;
    let without = service.own_bytes()?;
    let peers = (0..CLIENTS).map(|_| start(&service, "same", numbers(0)));
    let mut peers: Vec<Peer> = peers.collect::<Outcome<_>>()?;
    peers.iter_mut().try_for_each(Peer::answered)?;
    let cold = all_go(&mut peers)?;
    let (read, kept) = figures(&service, "same")?;
    let warm = all_go(&mut peers)?;
    let own = service.own_bytes()?.saturating_sub(without);
    let total = (CLIENTS as u64 * copy) as f64;
    println!(
        "{CLIENTS} processes load the same {PAGES} pages: {:.3} copies read, {:.3} copies in host memory, {:.3} copies \
         of memory taken by the service, {:.2} GB/s in all, {:.2} GB/s the second time",
        read as f64 / copy as f64,
        kept as f64 / copy as f64,
        own as f64 / copy as f64,
        total / cold / 1e9,
        total / warm / 1e9
    );
    Ok(())
}

/// Eight processes load pages of their own, beside threads that read the same files. `spaces`: a space for each
/// process,
/// or one for all.
pub fn own_pages(options: &Options, folders: &[PathBuf], spaces: usize) -> Outcome<()> {
    let bytes = options.block_bytes as u64;
    let paths = folders.len() as u64;
    let pages = (PAGES * CLIENTS / spaces) as u64 + 8 * paths;
    let capacity = kvhoist::DiskPath::file_bytes(pages.div_ceil(paths), bytes) * paths;
    let host = 64 * bytes.next_multiple_of(4096);
    let folders: Vec<PathBuf> = folders.iter().map(|folder| folder.join(format!("own-{spaces}"))).collect();
    folders.iter().try_for_each(fs::create_dir)?;
    let service = Service::start(&folders, spaces as u64 * capacity, spaces as u64 * host)?;
    let mut peers = Vec::new();
    for n in 0..CLIENTS {
        let space = format!("own-{}", n % spaces);
        let numbers = [bytes, capacity, host, (n as u64) << 32, n as u64, 1];
        let mut peer = start(&service, &space, numbers)?;
        peer.answered()?;
        peers.push(peer);
    }
    let readers = Readers::new(&folders, options.block_bytes)?;
    let (mut bare, mut through) = (Vec::new(), Vec::new());
    for round in 0..=options.rounds {
        let (one, other) = (readers.read()?, all_go(&mut peers)?);
        // The first round touches what has not been touched before.
        if round > 0 {
            bare.push(one);
            through.push(other);
        }
    }
    let total = (CLIENTS * PAGES * options.block_bytes) as f64 / 1e9;
    let (bare, through) = (total / median(&mut bare), total / median(&mut through));
    println!(
        "{CLIENTS} processes load pages of their own, {paths} drives, {spaces} spaces: pread by {READERS} threads \
         {bare:.2} GB/s, service {through:.2} GB/s, ratio {:.3}",
        through / bare
    );
    Ok(())
}

/// Threads that read blocks of the stores' files, as many as the clients load.
struct Readers {
    files: Vec<(File, u64)>,
    memory: Vec<Arc<SharedMemory>>,
    block_bytes: usize,
}

const READER_BLOCKS: usize = PAGES * CLIENTS / READERS;

impl Readers {
    fn new(folders: &[PathBuf], block_bytes: usize) -> Outcome<Self> {
        let mut files = Vec::new();
        for folder in folders {
            for entry in fs::read_dir(folder)? {
                let path = entry?.path().join("kvhoist.store");
                if path.exists() {
                    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path);
                    let file = direct.or_else(|_| File::open(&path))?;
                    let blocks = file.metadata()?.len() / block_bytes as u64 - 1;
                    files.push((file, blocks));
                }
            }
        }
        let memory = (0..READERS).map(|_| SharedMemory::new(READER_BLOCKS * block_bytes).map(Arc::new));
        Ok(Readers { files, memory: memory.collect::<Result<_, _>>()?, block_bytes })
    }

    /// Seconds in which all have read their share.
    fn read(&self) -> Outcome<f64> {
        timed(|| {
            thread::scope(|scope| {
                let reads: Vec<_> = (0..READERS).map(|reader| scope.spawn(move || self.read_share(reader))).collect();
                reads.into_iter().try_for_each(|read| read.join().map_err(|_| "a reader panicked")?)
            })
        })
    }

    fn read_share(&self, reader: usize) -> Outcome<()> {
        for at in 0..READER_BLOCKS {
            let number = reader * READER_BLOCKS + at;
            let (file, blocks) = &self.files[number % self.files.len()];
            let offset = (number / self.files.len()) as u64 % blocks * self.block_bytes as u64;
            let to = self.memory[reader].as_ptr().wrapping_add(at * self.block_bytes);
            let mut done = 0;
            while done < self.block_bytes {
                let (to, len) = (to.wrapping_add(done), self.block_bytes - done);
                // SAFETY: the range is within the reader's own memory, which is mapped and nobody else's.
                let read = unsafe { libc::pread(file.as_raw_fd(), to.cast(), len, (offset + done as u64) as i64) };
                match usize::try_from(read) {
                    Ok(read) if read > 0 => done += read,
                    Ok(_) => return Err("a store's file ended early".into()),
                    Err(_) => return Err(std::io::Error::last_os_error().into()),
                }
            }
        }
        Ok(())
    }
}

//! The doubles, and caches over them.

use std::{
    ffi::{CStr, CString},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use kvhoist::{Cache, Config, DeviceKind, DiskPath, EngineMode, Layout, Stats, block_on};
use tempfile::TempDir;

use super::{
    apart,
    common::{self, BLOCK_BYTES, key, payload},
};

/// Slots of the device and of host memory: few, so that blocks leave both.
pub const DEVICE_BLOCKS: u32 = 12;
const HOST_BLOCKS: u32 = 8;
pub const BLOCKS: u64 = 48;

/// A directory with the doubles: libcufile's if it is to be there, and without what `define` leaves out.
fn built(cufile: bool, define: Option<&str>) -> TempDir {
    let directory = common::directory();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doubles");
    let compile = |source: &str, library: &str| {
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-pthread"]).args(define.map(|name| format!("-D{name}")));
        compiler.arg("-o").arg(directory.path().join(library)).arg(sources.join(source));
        assert!(compiler.status().expect("Rust links with cc").success(), "{source} does not compile");
    };
    compile("cuda/libcuda.c", "libcuda.so");
    if cufile {
        compile("cufile/libcufile.c", "libcufile.so.0");
    }
    directory
}

/// Runs the body once for each of these ways to behave, in a process that finds both doubles, libcufile's told so.
pub fn with_double(name: &str, modes: &[&str], body: impl FnOnce(&str)) {
    static DOUBLES: OnceLock<TempDir> = OnceLock::new();
    run(name, modes, "", || DOUBLES.get_or_init(|| built(true, None)).path().to_owned(), body);
}

/// The same where the checksum kernel cannot be loaded.
pub fn without_kernel(name: &str, modes: &[&str], body: impl FnOnce(&str)) {
    let mut kept = None;
    run(name, modes, "checksum", || kept.insert(built(true, None)).path().to_owned(), body);
}

/// The same where libcufile is not there, or (`define`) lacks functions.
pub fn with_part(name: &str, cufile: bool, define: Option<&str>, body: impl FnOnce(&str)) {
    let mut kept = None;
    run(name, &["direct"], "", || kept.insert(built(cufile, define)).path().to_owned(), body);
}

fn run(name: &str, modes: &[&str], fault: &str, doubles: impl FnOnce() -> PathBuf, body: impl FnOnce(&str)) {
    if let Some(mode) = apart::case() {
        return apart::apart(name, || body(&mode));
    }
    let doubles = doubles();
    for mode in modes {
        let mut command = apart::command(name, mode);
        command.env("LD_LIBRARY_PATH", &doubles).env("CUFILE_DOUBLE", mode).env("DOUBLE_FAULT", fault);
        let output = command.output().expect("this test starts again");
        let [out, said] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        assert!(output.status.success(), "{mode}: {}: {out}{said}", output.status);
        assert!(out.contains("1 passed"), "found no test of the name {name}: {out}");
    }
}

/// Calls a function of libcufile's double.
pub fn ask(function: &str) -> u64 {
    call(c"libcufile.so.0", &format!("cufile_double_{function}"))
}

/// Launches of the checksum kernel.
pub fn checksum_launches() -> u64 {
    call(c"libcuda.so", "double_checksum_launches")
}

fn call(library: &CStr, function: &str) -> u64 {
    // SAFETY: the library is loaded already; a handle to it is looked up, and none is closed.
    let library = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    assert!(!library.is_null(), "the double is loaded");
    let name = CString::new(function).expect("no zeros");
    // SAFETY: a valid handle and a name.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "the double has {function}");
    // SAFETY: all functions of these names take nothing, and give a number or nothing.
    unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> u64>(found)() }
}

/// How long is waited for what does not come back: the rest has to come within it, on a busy machine too.
pub const STUCK_MS: u64 = 3_000;

/// A cache with a disk tier in `directory`, over the double of a device: blocks of three segments.
pub fn config(directory: &TempDir) -> Config {
    let mode = std::env::var("CUFILE_DOUBLE").unwrap_or_default();
    // What never comes back is waited for in vain; what does may take long on a busy machine.
    let comes_back = !["hang", "hangwrite", "cookie", "status", "open", "register", "exit"].contains(&mode.as_str());
    Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(HOST_BLOCKS)
        .device_blocks(DEVICE_BLOCKS)
        .device(DeviceKind::Cuda)
        .device_layout(Layout::new(vec![4096, 8192, 4096]).expect("16 KiB"))
        .disks(vec![DiskPath::with_blocks(directory.path(), 256)])
        .cufile(EngineMode::Auto)
        .cufile_stuck_ms(if comes_back { 60_000 } else { STUCK_MS })
}

/// A cache whose blocks are on disk and nowhere else.
pub fn cold(config: Config) -> Cache {
    let cache = open(config.clone().cufile(EngineMode::Off));
    for n in 0..BLOCKS {
        block_on(common::store(&cache, n));
    }
    block_on(cache.close()).expect("close");
    drop(cache);
    open(config)
}

pub fn open(config: Config) -> Cache {
    block_on(Cache::open(config)).expect("the double is a device")
}

/// Fetches a block to the device and compares what is there; the route that it took.
pub fn fetch(cache: &Cache, n: u64) -> &'static str {
    let lease = block_on(cache.fetch_to_device(&key(n))).expect("fetch").expect("stored");
    let bytes = block_on(cache.read_device(&lease, Vec::new())).expect("read");
    assert!(bytes == payload(n, BLOCK_BYTES), "block {n} by {}", lease.route());
    lease.route().name()
}

/// Fetches all blocks at once, from several threads, and compares them.
pub fn fetch_all(cache: &Cache) {
    std::thread::scope(|scope| {
        for thread in 0..8 {
            scope.spawn(move || {
                (0..BLOCKS).filter(|n| n % 8 == thread).for_each(|n| assert!(!fetch(cache, n).is_empty()));
            });
        }
    });
}

/// Closes the cache, and sees that nothing is left in the library.
pub fn close(cache: Cache) -> Stats {
    kvhoist::internals::validate(&cache).expect("valid");
    block_on(cache.close()).expect("close");
    let stats = cache.stats();
    drop(cache);
    assert_eq!((ask("handles"), ask("buffers"), ask("in_flight")), (0, 0, 0), "the library has forgotten all");
    stats
}

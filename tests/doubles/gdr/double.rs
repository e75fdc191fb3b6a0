//! The doubles: built, found by processes of their own, told how to behave, and asked what was done with them.

use std::{
    ffi::{CStr, CString},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use super::{apart, common};

/// Functions that the double of libibverbs leaves out where it plays an old one.
pub const WITHOUT_DMA_BUF: &str = "NO_DMABUF";

/// A directory with both doubles.
fn built(define: Option<&str>) -> TempDir {
    let directory = common::directory();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doubles");
    for (source, library) in [("cuda/libcuda.c", "libcuda.so"), ("gdr/libibverbs.c", "libibverbs.so.1")] {
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-g", "-pthread"]).args(define.map(|name| format!("-D{name}")));
        compiler.arg("-o").arg(directory.path().join(library)).arg(sources.join(source));
        assert!(compiler.status().expect("Rust links with cc").success(), "{source} does not compile");
    }
    directory
}

/// Runs the body once for each case, in a process of its own that finds the doubles.
///
/// A case is what `IBV_DOUBLE` says, then other variables of the environment: `late,fail=3:10 DOUBLE_FAULT=export`.
pub fn with_double(name: &str, cases: &[&str], body: impl FnOnce(&str)) {
    static DOUBLES: OnceLock<TempDir> = OnceLock::new();
    run(name, cases, 1, || DOUBLES.get_or_init(|| built(None)).path().to_owned(), body);
}

/// The same, all cases at a time: for those that wait for long and do little.
pub fn with_double_at_once(name: &str, cases: &[&str], body: impl FnOnce(&str)) {
    let mut kept = None;
    run(name, cases, cases.len(), || kept.insert(built(None)).path().to_owned(), body);
}

/// The same where libibverbs lacks functions.
pub fn with_part(name: &str, define: &str, cases: &[&str], body: impl FnOnce(&str)) {
    let mut kept = None;
    run(name, cases, 1, || kept.insert(built(Some(define))).path().to_owned(), body);
}

/// The same where what has the name of libibverbs is none.
pub fn without_library(name: &str, body: impl FnOnce(&str)) {
    let mut kept = None;
    let spoiled = || {
        let directory = kept.insert(built(None));
        std::fs::write(directory.path().join("libibverbs.so.1"), "not a library").expect("a file");
        directory.path().to_owned()
    };
    run(name, &["late"], 1, spoiled, body);
}

fn run(name: &str, cases: &[&str], at_once: usize, doubles: impl FnOnce() -> PathBuf, body: impl FnOnce(&str)) {
    if let Some(case) = apart::case() {
        return apart::apart(name, || body(&case));
    }
    let doubles = doubles();
    let only = std::env::var("GDR_CASE").ok();
    let start = |case: &str| {
        let mut command = apart::command(name, case);
        let mut words = case.split(' ');
        command.env("LD_LIBRARY_PATH", &doubles).env("IBV_DOUBLE", words.next().unwrap_or_default());
        command.env_remove("KVHOIST_GDR").env_remove("KVHOIST_COPY");
        for (variable, value) in words.filter_map(|word| word.split_once('=')) {
            command.env(variable, value);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("this test starts again")
    };
    let end = |case: &str, child: Child| {
        let output = child.wait_with_output().expect("our child");
        let [out, said] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        assert!(output.status.success(), "{case}: {}: {out}{said}", output.status);
        assert!(out.contains("1 passed"), "found no test of the name {name}: {out}");
    };
    let cases: Vec<_> = cases.iter().filter(|case| only.as_ref().is_none_or(|only| case.contains(only))).collect();
    for some in cases.chunks(at_once) {
        let children: Vec<_> = some.iter().map(|case| (case, start(case))).collect();
        children.into_iter().for_each(|(case, child)| end(case, child));
    }
}

fn of_double(name: &CStr) -> *mut libc::c_void {
    // SAFETY: the library is loaded already, or is now for as long as the process lives.
    let library = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW) };
    assert!(!library.is_null(), "the double is found");
    // SAFETY: a valid handle and a name.
    let function = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!function.is_null(), "the double has {name:?}");
    function
}

/// Tells the double how to behave from now on.
pub fn set(words: &str) {
    let words = CString::new(words).expect("no zeros");
    let function = of_double(c"ibv_double_set");
    // SAFETY: the function of this name takes a string, which lives across the call, and gives nothing.
    unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(*const libc::c_char)>(function)(words.as_ptr()) };
}

/// How many of something the double has seen.
pub fn get(what: &str) -> u64 {
    let what = CString::new(what).expect("no zeros");
    let function = of_double(c"ibv_double_get");
    // SAFETY: the function of this name takes a string, which lives across the call, and gives a number.
    unsafe {
        std::mem::transmute::<*mut libc::c_void, extern "C" fn(*const libc::c_char) -> u64>(function)(what.as_ptr())
    }
}

/// Nothing that was made is left: regions, queues, devices.
pub fn is_forgotten() -> bool {
    (get("objects"), get("regions")) == (0, 0)
}

/// Waits until nothing is left; a thread that ends by itself gives it back.
///
/// # Panics
/// If something stays.
pub fn until_forgotten() {
    let started = Instant::now();
    while !is_forgotten() {
        assert!(started.elapsed() < Duration::from_secs(60), "{} objects, {} regions", get("objects"), get("regions"));
        std::thread::sleep(Duration::from_millis(1));
    }
}

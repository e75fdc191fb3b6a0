//! Tests that spoil the process they run in, each in a process of its own.

use std::{
    ffi::{CString, c_int, c_ulong},
    io,
    path::Path,
    process::{Command, ExitStatus, Stdio},
};

use crate::common::beside;

const APART: &str = "KVHOIST_APART";

/// Runs the body of the test `name` in a process of its own. Only there may it change limits, rights or mounts.
pub fn apart(name: &str, body: impl FnOnce()) {
    if std::env::var(APART).is_ok_and(|running| running == name) {
        // SAFETY: takes a number. A hanging process is ended by a signal, and so detected.
        unsafe { libc::alarm(120) };
        return body();
    }
    let output = command(name, "").output().expect("this test starts again");
    print!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
}

/// A process that runs the test `name` of this file as [`apart`] does, and may look up `case` in its environment.
pub fn command(name: &str, case: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this test"));
    command
        .args(["--exact", &beside(module_path!(), name), "--nocapture", "--test-threads", "1"])
        .env(APART, name)
        .env("KVHOIST_CASE", case);
    command.stdin(Stdio::null());
    command
}

/// The case that [`command`] was given.
pub fn case() -> Option<String> {
    std::env::var("KVHOIST_CASE").ok().filter(|case| !case.is_empty())
}

/// The end of a process that was run for its [`case`], with all that it said.
pub fn run_case(name: &str, case: &str) -> (ExitStatus, String) {
    let output = command(name, case).output().expect("this test starts again");
    let said = [&output.stdout[..], &output.stderr[..]].map(String::from_utf8_lossy).concat();
    (output.status, said)
}

pub fn is_root() -> bool {
    // SAFETY: takes nothing, cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Sets the soft limit of a resource.
pub fn limit(resource: libc::__rlimit_resource_t, soft: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid place for the answer.
    assert_eq!(unsafe { libc::getrlimit(resource, &raw mut limit) }, 0);
    limit.rlim_cur = soft.min(limit.rlim_max);
    // SAFETY: a valid limit.
    assert_eq!(unsafe { libc::setrlimit(resource, &raw const limit) }, 0);
}

/// Gives up every capability of this thread and of those that it will start, root or not.
pub fn drop_capabilities() {
    // linux/capability.h, version 3: a header, then effective, permitted and inheritable sets of 2 x 32 bits.
    let header = [0x2008_0522u32, 0];
    let sets = [0u32; 6];
    // SAFETY: both are of the layout and length that version 3 has, and live across the call.
    let result = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
    assert_eq!(result, 0, "capset: {}", io::Error::last_os_error());
}

/// Makes later mounts of this process private: invisible to other processes, and unmounted at its end. False if that
/// is refused.
pub fn private_mounts() -> bool {
    let nowhere = CString::default();
    let root = CString::new("/").expect("no zeros");
    // SAFETY: takes no pointers.
    let unshared = unsafe { libc::unshare(libc::CLONE_NEWNS) };
    if unshared != 0 {
        return false;
    }
    // SAFETY: strings that outlive the call; no data.
    unsafe {
        libc::mount(
            nowhere.as_ptr(),
            root.as_ptr(),
            std::ptr::null(),
            libc::MS_REC | libc::MS_PRIVATE,
            std::ptr::null(),
        ) == 0
    }
}

/// Mounts a file system of the kernel's own.
pub fn mount(kind: &str, at: &Path, options: &str) -> bool {
    run("mount", &["-t", kind, "-o", options, kind, &at.display().to_string()])
}

/// Makes an ext4 of `mib` MiB in `image` and mounts it.
pub fn mount_ext4(image: &Path, mib: u64, at: &Path, mkfs: &[&str], options: &str) -> bool {
    let file = std::fs::File::create(image).expect("an image");
    file.set_len(mib << 20).expect("sized");
    let (image, at) = (image.display().to_string(), at.display().to_string());
    let made = run("mkfs.ext4", &[&["-q", "-F"], mkfs, &[&image]].concat());
    made && run("mount", &["-o", &format!("loop,{options}"), &image, &at])
}

/// True if the program is there and did it.
pub fn run(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).stdin(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// From now on these system calls fail with `errno`, in this thread and in those that it will start.
pub fn forbid(system_calls: &[libc::c_long], errno: c_int) {
    let mut program = vec![load(0)];
    for number in system_calls {
        program.extend(fail_where_equal(*number as u32, errno));
    }
    install(program);
}

/// As [`forbid`], of one system call where its argument of this number is `value`.
pub fn forbid_where(system_call: libc::c_long, argument: u32, value: u32, errno: c_int) {
    let equal = statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, system_call as u32);
    // Past the look at the argument, whose lower half comes first.
    let mut program = vec![load(0), libc::sock_filter { jf: 3, ..equal }, load(16 + 8 * argument)];
    program.extend(fail_where_equal(value, errno));
    install(program);
}

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

/// Loads a word of `seccomp_data`: the number of the call at 0, and from 16 its arguments.
fn load(offset: u32) -> libc::sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset)
}

fn fail_where_equal(value: u32, errno: c_int) -> [libc::sock_filter; 2] {
    let equal = statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value);
    let fail = statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32);
    [libc::sock_filter { jf: 1, ..equal }, fail]
}

fn install(mut program: Vec<libc::sock_filter>) {
    program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let one: c_ulong = 1;
    // SAFETY: takes integers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, one, 0 as c_ulong, 0 as c_ulong, 0 as c_ulong) }, 0);
    // SAFETY: `filter` names a program that lives across the call; the kernel checks and copies it.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER as c_ulong, &raw const filter) };
    assert_eq!(result, 0, "seccomp: {}", io::Error::last_os_error());
}

/// A block device over a file.
pub struct LoopDevice(std::path::PathBuf);

impl LoopDevice {
    pub fn new(file: &Path) -> Option<Self> {
        Self::with_blocks(file, 512)
    }

    pub fn with_blocks(file: &Path, bytes: u32) -> Option<Self> {
        let mut command = Command::new("losetup");
        let output = command.args(["--find", "--show", "--sector-size", &bytes.to_string()]).arg(file).output().ok()?;
        let name = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        (output.status.success() && name.starts_with("/dev/loop")).then(|| LoopDevice(name.into()))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

//! Machines for the tests that need one of their own: guests of an emulator, which run this same program.

use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use tempfile::TempDir;

use crate::common::directory;

/// The file beside the program in the guest that says what to do.
pub const JOB: &str = "guest.job";

/// The program that boots a guest, if this machine has it and the tests were asked for.
pub fn guest_run() -> Option<PathBuf> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/vm/guest-run");
    if !program.exists() {
        crate::common::skip::skipped(format_args!("no {}", program.display()));
        return None;
    }
    if std::env::var("KVHOIST_GUEST").is_err() {
        crate::common::skip::skipped("guests take minutes; run with KVHOIST_GUEST=1");
        return None;
    }
    Some(program)
}

/// Boots of which one at least must succeed: an emulator that gets no processor time cannot calibrate its clocks.
pub const BOOTS: u32 = 4;

/// A guest that is running.
pub struct Guest {
    process: Child,
    /// Its temporary files, and what it prints as it prints it.
    scratch: TempDir,
}

impl Guest {
    /// Boots a guest on `image`, where this program does the job: its test `inside::inside`.
    pub fn boot(program: &Path, image: &Path, job: &str, limit: Duration) -> Self {
        let scratch = directory();
        let file = scratch.path().join(JOB);
        fs::write(&file, job).expect("a job");
        let process = Command::new(program)
            .env("TMPDIR", scratch.path())
            .args(["-t", &limit.as_secs().to_string(), "-m", "1024", "-i"])
            .arg(image)
            .arg("-f")
            .arg(&file)
            .arg("--")
            .arg(lean_program(scratch.path()))
            .args([
                "--exact",
                &crate::common::beside(module_path!(), "inside::inside"),
                "--nocapture",
                "--test-threads",
                "1",
            ])
            .stdin(Stdio::null())
            .stdout(File::create(scratch.path().join("printed")).expect("a file"))
            .spawn()
            .expect("guest-run starts");
        Guest { process, scratch }
    }

    /// What it has printed so far.
    fn said(&self) -> String {
        let Ok(entries) = fs::read_dir(self.scratch.path()) else { return String::new() };
        let mut out = entries.filter_map(Result::ok).map(|entry| entry.path().join("out"));
        let Some(out) = out.find(|out| out.exists()) else { return String::new() };
        let mut bytes = Vec::new();
        let _ = File::open(out).and_then(|mut file| file.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Kills the machine once it has printed `text` and some time has passed, if it did not end before.
    pub fn kill_after(&mut self, text: &str, more: Duration) {
        while !self.said().contains(text) {
            if self.process.try_wait().expect("our child").is_some() {
                return;
            }
            // A file that another process writes cannot be waited for.
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(more);
        if let Some(machine) = machine_below(self.process.id()) {
            // SAFETY: takes numbers. The process is a child of a child of ours, which is waiting for it.
            unsafe { libc::kill(machine as i32, libc::SIGKILL) };
        }
    }

    /// Its end, and all that it printed. `None` if our program was not reached.
    pub fn ended(self) -> Option<(ExitStatus, String)> {
        let (status, printed) = self.wait();
        if printed.contains("inside::inside") {
            return Some((status, printed));
        }
        println!("a guest that did not boot ({status}), once more: {printed}");
        None
    }

    /// Its end, and all that it printed.
    fn wait(mut self) -> (ExitStatus, String) {
        let status = self.process.wait().expect("our child");
        let printed = fs::read(self.scratch.path().join("printed")).expect("printed");
        (status, String::from_utf8_lossy(&printed).into_owned())
    }
}

/// This program without what only debuggers read, where there is a tool for that: the guest holds it in memory.
fn lean_program(scratch: &Path) -> PathBuf {
    let (this, lean) = (std::env::current_exe().expect("this test"), scratch.join("lean"));
    let stripped = Command::new("strip").arg("-g").arg("-o").arg(&lean).arg(&this).status();
    if stripped.is_ok_and(|status| status.success()) { lean } else { this }
}

/// The emulator among the descendants of a process.
fn machine_below(ancestor: u32) -> Option<u32> {
    let parents: Vec<(u32, u32, String)> = fs::read_dir("/proc")
        .ok()?
        .filter_map(|entry| {
            let pid = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let (head, tail) = stat.rsplit_once(')')?;
            let parent = tail.split_whitespace().nth(1)?.parse().ok()?;
            Some((pid, parent, head.split_once('(')?.1.to_owned()))
        })
        .collect();
    let mut family = vec![ancestor];
    let mut at = 0;
    while at < family.len() {
        let of = family[at];
        family.extend(parents.iter().filter(|(_, parent, _)| *parent == of).map(|(pid, ..)| *pid));
        at += 1;
    }
    parents.iter().find(|(pid, _, name)| family.contains(pid) && name.starts_with("qemu")).map(|(pid, ..)| *pid)
}

//! What a test says where it shows nothing on this machine.

use std::{fmt::Display, fs::File, io::Write, path::Path, thread};

/// Prints why a test is skipped, and keeps it for the line at the end of `python/test`. `why` names what to install, if
/// that is all that is missing: `.ci/run` fails on such a test.
pub fn skipped(why: impl Display) {
    println!("SKIPPED: {why}");
    let why = why.to_string().replace(char::is_whitespace, " ");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("skipped");
    let line = format!("{}\t{why}\n", thread::current().name().unwrap_or("a test"));
    // One write: tests and their processes append to the file at the same time.
    let kept =
        File::options().append(true).create(true).open(&path).and_then(|mut file| file.write_all(line.as_bytes()));
    kept.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

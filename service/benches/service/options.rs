//! What the command line of the bench says.

use std::path::PathBuf;

pub type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

pub const SERVE: &str = "--serve";
pub const CLIENT: &str = "--client";
const PARTS: [&str; 7] = ["pages", "host", "requests", "same", "own", "hostile", "idle"];

pub struct Options {
    pub parts: Vec<String>,
    pub paths: Vec<PathBuf>,
    pub block_bytes: usize,
    pub rounds: usize,
    pub idle_s: u64,
    /// Kinds of hostility whose names contain it.
    pub kind: String,
}

impl Options {
    pub fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|wanted| wanted == part)
    }
}

pub fn options(arguments: &[String]) -> Outcome<Options> {
    let mut found = Options {
        parts: Vec::new(),
        paths: Vec::new(),
        block_bytes: 5 << 19,
        rounds: 5,
        idle_s: 10,
        kind: String::new(),
    };
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word}: found no value"));
        match word.as_str() {
            "--path" => found.paths.push(value()?.into()),
            "--block-bytes" => found.block_bytes = value()?.parse()?,
            "--rounds" => found.rounds = value()?.parse()?,
            "--idle-s" => found.idle_s = value()?.parse()?,
            "--kind" => found.kind = value()?.into(),
            "--bench" => {}
            part if PARTS.contains(&part) => found.parts.push(part.into()),
            other => return Err(format!("{other}: expected one of {PARTS:?} or an option of the file's head").into()),
        }
    }
    if found.paths.is_empty() {
        found.paths.push(env!("CARGO_TARGET_TMPDIR").into());
    }
    Ok(found)
}

//! What the command line says.

use std::{ops::RangeInclusive, path::PathBuf};

/// The command line of the comparison and of its child processes.
#[derive(Debug, Clone)]
pub struct Options {
    /// Directories to put the stores in, one table group each.
    pub dirs: Vec<PathBuf>,
    /// Queue depths, one table each.
    pub depths: Vec<usize>,
    /// Size of every block, bytes.
    pub block_bytes: usize,
    /// Blocks in every store.
    pub blocks: u64,
    /// Rounds that count, per fill.
    pub rounds: u64,
    /// How many times everyone fills a new store.
    pub fills: u64,
    /// Contenders to run; empty: all.
    pub only: Vec<String>,
    /// Leave glibc's mmap threshold alone.
    pub plain_malloc: bool,
    /// Set in a child process: which contender it is.
    pub contender: Option<String>,
}

impl Options {
    /// Reads the arguments; an error says what was found and what was expected.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
        let mut options = Options {
            dirs: Vec::new(),
            depths: Vec::new(),
            block_bytes: 128 << 10,
            blocks: 0,
            rounds: 3,
            fills: 3,
            only: Vec::new(),
            plain_malloc: false,
            contender: None,
        };
        let mut file_mib = 512;
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg}: found no value, expected one after it"));
            match arg.as_str() {
                "--dir" => options.dirs.push(value()?.into()),
                "--depth" => options.depths.push(number(&arg, &value()?, 1..=4096)? as usize),
                "--file-mib" => file_mib = number(&arg, &value()?, 128..=1 << 20)?,
                "--rounds" => options.rounds = number(&arg, &value()?, 1..=1000)?,
                "--fills" => options.fills = number(&arg, &value()?, 1..=1000)?,
                "--only" => options.only.push(value()?),
                "--contender" => options.contender = Some(value()?),
                "--plain-malloc" => options.plain_malloc = true,
                other => {
                    let expected = "--dir, --depth, --file-mib, --rounds, --fills, --only or --plain-malloc";
                    return Err(format!("found argument {other}, expected {expected}"));
                }
            }
        }
        for name in options.only.iter().chain(&options.contender) {
            if !crate::NAMES.contains(&name.as_str()) {
                return Err(format!("found contender {name}, expected one of {}", crate::NAMES.join(", ")));
            }
        }
        if options.dirs.is_empty() {
            options.dirs = vec![concat!(env!("CARGO_MANIFEST_DIR"), "/target").into(), "/dev/shm".into()];
        }
        if options.depths.is_empty() {
            options.depths = vec![8, 32, 128];
        }
        options.blocks = (file_mib << 20) / options.block_bytes as u64;
        Ok(options)
    }

    /// The arguments that make a child process `name` of one directory and depth.
    pub fn child_args(&self, name: &str, dir: &std::path::Path, depth: usize) -> Vec<std::ffi::OsString> {
        let file_mib = (self.blocks * self.block_bytes as u64) >> 20;
        let mut args: Vec<std::ffi::OsString> = vec!["--contender".into(), name.into(), "--dir".into(), dir.into()];
        args.extend(["--depth".into(), depth.to_string().into(), "--file-mib".into(), file_mib.to_string().into()]);
        if self.plain_malloc {
            args.push("--plain-malloc".into());
        }
        args
    }
}

fn number(name: &str, text: &str, range: RangeInclusive<u64>) -> Result<u64, String> {
    let wrong = || format!("{name}: found {text}, expected a number from {} to {}", range.start(), range.end());
    text.parse().ok().filter(|number| range.contains(number)).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn a_child_gets_what_its_parent_was_told() {
        let parent = parse("--file-mib 256 --rounds 3 --plain-malloc").expect("valid");
        let args = parent.child_args("bare", "/somewhere".as_ref(), 8);
        let child = Options::parse(args.into_iter().map(|arg| arg.into_string().expect("UTF-8"))).expect("valid");
        assert_eq!((child.blocks, child.block_bytes), (parent.blocks, parent.block_bytes));
        assert_eq!((child.depths, child.contender.as_deref()), (vec![8], Some("bare")));
        assert!(child.plain_malloc);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for line in ["--depth 0", "--depth x", "--depth", "--only nobody", "--what"] {
            let error = parse(line).expect_err(line);
            assert!(error.contains("found") && error.contains("expected"), "{line}: {error}");
        }
    }
}

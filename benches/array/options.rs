//! The arguments of the bench.

use std::{env, io, path::PathBuf};

use kvhoist_bench_kit::drive::other;

/// What is measured, and where.
pub struct Options {
    pub names: Vec<String>,
    pub paths: Vec<PathBuf>,
    pub block_bytes: Vec<usize>,
    pub drive_bytes: u64,
    pub rounds: u64,
    pub workers: Option<u32>,
    /// Bytes that the cache may have in flight.
    pub read_bytes: Option<u64>,
    pub write_bytes: Option<u64>,
    /// Numbers of tasks that fetch.
    pub tasks: Vec<usize>,
    /// How many drives of the paths make an array.
    pub drives: Vec<usize>,
    pub csv: Option<PathBuf>,
}

impl Options {
    /// From the command line.
    pub fn parse() -> io::Result<Options> {
        let mut options = Options {
            names: Vec::new(),
            paths: Vec::new(),
            block_bytes: Vec::new(),
            drive_bytes: 1 << 30,
            rounds: 5,
            workers: None,
            read_bytes: None,
            write_bytes: None,
            tasks: Vec::new(),
            drives: Vec::new(),
            csv: None,
        };
        let mut args = env::args().skip(1).filter(|arg| arg != "--bench");
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| other(format!("{arg}: found nothing, expected a value")));
            let number =
                |text: String| text.parse::<u64>().map_err(|_| other(format!("found {text}, expected a number")));
            match arg.as_str() {
                "--path" => options.paths.push(value()?.into()),
                "--block-bytes" => options.block_bytes.push(number(value()?)? as usize),
                "--drive-mib" => options.drive_bytes = number(value()?)? << 20,
                "--rounds" => options.rounds = number(value()?)?.max(1),
                "--workers" => options.workers = Some(number(value()?)? as u32),
                "--read-mib" => options.read_bytes = Some(number(value()?)? << 20),
                "--write-mib" => options.write_bytes = Some(number(value()?)? << 20),
                "--tasks" => options.tasks.push((number(value()?)? as usize).max(1)),
                "--drives" => options.drives.push(number(value()?)? as usize),
                "--csv" => options.csv = Some(value()?.into()),
                "load" | "store" | "fetch" | "device" | "syscalls" | "reactor" => options.names.push(arg),
                _ => return Err(other(format!("found {arg}, expected a name or an option of the file's head"))),
            }
        }
        if options.names.is_empty() {
            options.names = ["load", "store", "fetch"].map(String::from).to_vec();
        }
        if options.tasks.is_empty() {
            options.tasks = vec![16, 64];
        }
        if options.block_bytes.is_empty() {
            options.block_bytes = vec![2_621_440, 128 << 10];
        }
        Ok(options)
    }
}

//! `kvhoist remote`: what a store beyond the node has, whether it is right, and deletion from it.

use std::{
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use clap::{Args as ClapArgs, Subcommand};
use kvhoist::{
    block_on,
    remote::{RemoteError, RemoteStore},
};
use kvhoist_remote::{maintenance, open};
use serde_json::json;

use crate::{
    columns::columns,
    failure::{EXIT_STATUS, Failure},
    interrupt,
    output::{emit, emit_part},
    progress::Progress,
    shown::plain,
    size::{parse_bytes, show_bytes},
};

/// Flags of `kvhoist remote`.
#[derive(ClapArgs)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the objects of a store. Changes nothing.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Ls(Ls),
    /// Count the objects and the bytes of each namespace. Changes nothing.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Du(Du),
    /// Delete objects by age and by bytes, the oldest first. Any node may do that while all others run.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Gc(Gc),
    /// Read every object, and check the checksums of its table and its blocks. Changes nothing.
    #[command(after_help = EXIT_STATUS, arg_required_else_help = true)]
    Verify(Verify),
}

/// The store. Credentials come from the environment and from files.
#[derive(ClapArgs)]
struct Place {
    /// The store, as the setting `remote` names it: s3://BUCKET/PREFIX, redis://HOST:PORT/DATABASE or
    /// rediss://HOST:PORT/DATABASE, with parameters such as ?endpoint=http://HOST:PORT.
    url: String,
}

/// Flags of `kvhoist remote ls`.
#[derive(ClapArgs)]
struct Ls {
    #[command(flatten)]
    place: Place,
    /// Only this namespace: its digest, or the first digits of it, as `kvhoist remote du` prints it.
    #[arg(long, value_name = "DIGEST")]
    namespace: Option<String>,
    /// Print one JSON object a line instead of text.
    #[arg(long)]
    json: bool,
}

/// Flags of `kvhoist remote verify`.
#[derive(ClapArgs)]
struct Verify {
    #[command(flatten)]
    objects: Ls,
    /// Print no progress.
    #[arg(long)]
    quiet: bool,
}

/// Flags of `kvhoist remote du`.
#[derive(ClapArgs)]
struct Du {
    #[command(flatten)]
    place: Place,
    /// Print one JSON list instead of a table.
    #[arg(long)]
    json: bool,
}

/// Flags of `kvhoist remote gc`.
#[derive(ClapArgs)]
struct Gc {
    #[command(flatten)]
    place: Place,
    /// Delete what was created longer ago than this: a number with h or d, such as 36h or 7d.
    #[arg(long, value_name = "AGE", value_parser = parse_age, required_unless_present = "max_bytes")]
    older_than: Option<Duration>,
    /// Delete the oldest objects until the others have as many bytes, such as 500GiB; 0 deletes all.
    #[arg(long, value_name = "SIZE", value_parser = parse_kept)]
    max_bytes: Option<usize>,
    /// Only this namespace: its digest, or the first digits of it.
    #[arg(long, value_name = "DIGEST")]
    namespace: Option<String>,
    /// Say what would be deleted, and delete nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object instead of a line.
    #[arg(long)]
    json: bool,
    /// Print no progress.
    #[arg(long)]
    quiet: bool,
}

/// Bytes that are kept: a size, or none.
fn parse_kept(text: &str) -> Result<usize, String> {
    if text == "0" { Ok(0) } else { parse_bytes(text).map_err(|expected| format!("{expected}, or 0 to delete all")) }
}

/// Runs it.
pub fn run(args: &Args) -> Result<(), Failure> {
    match &args.command {
        Command::Ls(args) => ls(args),
        Command::Du(args) => du(args),
        Command::Gc(args) => gc(args),
        Command::Verify(args) => verify(args),
    }
}

impl Place {
    fn open(&self) -> Result<Arc<dyn RemoteStore>, Failure> {
        open(&self.url).map_err(|error| Failure::usage(error.to_string()))
    }

    /// Why the store did not do what was asked. Its URL has no credential: it was opened.
    fn failed(&self, error: &RemoteError) -> Failure {
        let text = format!("{}: {error}", self.url);
        match error {
            RemoteError::Refused(_) | RemoteError::Invalid { .. } => Failure::usage(text),
            _ => Failure::run(text),
        }
    }
}

/// With what the names of a namespace begin, or of all.
fn prefix(namespace: Option<&str>) -> Result<String, Failure> {
    // A variable of a script that has no value shall not mean all of them.
    if namespace.is_some_and(str::is_empty) {
        let text = "found an empty text, expected the digits of a digest, or no --namespace for all of them";
        return Err(Failure::usage(format!("--namespace: {text}")));
    }
    let digest = namespace.unwrap_or_default();
    if digest.len() > 64 || !digest.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        let text = "found another text, expected up to 64 digits 0 to f of a digest, as `kvhoist remote du` prints it";
        return Err(Failure::usage(format!("--namespace: {text}")));
    }
    Ok(format!("{}{digest}", maintenance::PREFIX))
}

fn ls(args: &Ls) -> Result<(), Failure> {
    let (prefix, store) = (prefix(args.namespace.as_deref())?, args.place.open()?);
    let mut printed = Ok(true);
    // Line by line: a store may have millions.
    let listed = block_on(maintenance::list(&*store, &prefix, |object| {
        let line = if args.json {
            let created = object.modified.map(seconds);
            format!("{}\n", json!({ "name": object.name, "bytes": object.bytes, "created": created }))
        } else {
            format!("{:>11}  {}\n", show_bytes(object.bytes), plain(&object.name))
        };
        printed = emit_part(&line);
        // Nobody gets what follows, which costs requests.
        if matches!(printed, Ok(true)) { Ok(()) } else { Err(RemoteError::Refused("standard output is closed".into())) }
    }));
    if printed? { listed.map_err(|error| args.place.failed(&error)) } else { Ok(()) }
}

fn du(args: &Du) -> Result<(), Failure> {
    let store = args.place.open()?;
    let found = block_on(maintenance::usage(&*store)).map_err(|error| args.place.failed(&error))?;
    if args.json {
        let of = |(namespace, usage): (&String, &maintenance::Usage)| {
            json!({
                "namespace": namespace,
                "objects": usage.objects,
                "bytes": usage.bytes,
                "oldest": usage.oldest.map(seconds),
                "newest": usage.newest.map(seconds),
            })
        };
        return emit(&format!("{:#}\n", found.iter().map(of).collect::<serde_json::Value>()));
    }
    if found.is_empty() {
        return emit("no objects\n");
    }
    let age = |time: Option<SystemTime>| time.map_or_else(|| "unknown".into(), shown_age);
    let row = |(namespace, usage): (&String, &maintenance::Usage)| {
        let digest = namespace[..16].to_owned();
        vec![usage.objects.to_string(), show_bytes(usage.bytes), age(usage.oldest), age(usage.newest), digest]
    };
    let rows: Vec<Vec<String>> = found.iter().map(row).collect();
    emit(&columns(&["objects", "bytes", "oldest", "newest", "namespace"], &rows))
}

fn gc(args: &Gc) -> Result<(), Failure> {
    let (prefix, store) = (prefix(args.namespace.as_deref())?, args.place.open()?);
    let limits = maintenance::Limits { age_max: args.older_than, bytes_max: args.max_bytes.map(|bytes| bytes as u64) };
    let failed = |error| args.place.failed(&error);
    let found = block_on(maintenance::plan(&*store, &prefix, limits, SystemTime::now())).map_err(failed)?;
    if args.namespace.is_some() && found.namespaces.len() > 1 {
        let all = found.namespaces.into_iter().collect::<Vec<_>>().join(", ");
        return Err(Failure::usage(format!(
            "--namespace: found digits with which several begin ({all}), expected more"
        )));
    }
    if !args.dry_run {
        let interrupted = interrupt::catch()?;
        let (count, mut deleted) = (found.names.len(), 0);
        let mut progress = Progress::new(count, "objects", args.quiet);
        let ended = block_on(maintenance::delete(&*store, &found.names, |done| {
            deleted = done;
            progress.update(done, || "deleted".into());
            go_on(&interrupted)
        }));
        progress.finish();
        let ended =
            ended.map_err(failed).and_then(|()| if deleted < count { Err(Failure::interrupted()) } else { Ok(()) });
        ended.map_err(|failure| {
            let text = format!("{failure}; {deleted} of {count} objects are deleted");
            failure.saying(text)
        })?;
    }
    let (count, kept) = (found.names.len(), &found.kept);
    if args.json {
        let object = json!({
            "deleted": !args.dry_run,
            "objects": count,
            "bytes": found.bytes,
            "kept_objects": kept.objects,
            "kept_bytes": kept.bytes,
        });
        return emit(&format!("{object:#}\n"));
    }
    let did = if args.dry_run { "would delete" } else { "deleted" };
    let (bytes, left) = (show_bytes(found.bytes), show_bytes(kept.bytes));
    emit(&format!("{did} {count} objects ({bytes}); {} are left ({left})\n", kept.objects))
}

fn verify(Verify { objects: args, quiet }: &Verify) -> Result<(), Failure> {
    let (prefix, store) = (prefix(args.namespace.as_deref())?, args.place.open()?);
    let interrupted = interrupt::catch()?;
    let (mut right, mut blocks, mut wrong, mut printed) = (0, 0, 0, Ok(()));
    let (mut progress, mut is_complete) = (None, true);
    let read = block_on(maintenance::verify(&*store, &prefix, |total, object, found| {
        match found {
            Ok(count) => (right, blocks) = (right + 1, blocks + count),
            Err(error) => {
                wrong += 1;
                let line = if args.json {
                    format!("{}\n", json!({ "name": object.name, "wrong": error.to_string() }))
                } else {
                    format!("{}: {}\n", plain(&object.name), plain(&error.to_string()))
                };
                printed = emit(&line);
            }
        }
        let progress = progress.get_or_insert_with(|| Progress::new(total, "objects", *quiet));
        progress.update(right + wrong, || format!("{wrong} wrong"));
        let next = if printed.is_err() { ControlFlow::Break(()) } else { go_on(&interrupted) };
        is_complete = next.is_continue() || right + wrong == total;
        next
    }));
    drop(progress);
    printed?;
    is_complete &= read.is_ok();
    emit(&if args.json {
        let object = json!({
            "right_objects": right,
            "blocks": blocks,
            "wrong_objects": wrong,
            "complete": is_complete,
        });
        format!("{object}\n")
    } else {
        let so_far = if is_complete { "" } else { "so far " };
        format!("{so_far}{right} objects are right, with {blocks} blocks; {wrong} are wrong\n")
    })?;
    read.map_err(|error| args.place.failed(&error))?;
    match wrong {
        _ if !is_complete => Err(Failure::interrupted()),
        0 => Ok(()),
        _ => {
            Err(Failure::run(format!("{wrong} wrong objects found: readers pass them over, `gc` deletes them in time")))
        }
    }
}

/// Whether a signal has ended the command.
fn go_on(interrupted: &AtomicBool) -> ControlFlow<()> {
    if interrupted.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

fn shown_age(time: SystemTime) -> String {
    let age = SystemTime::now().duration_since(time).unwrap_or_default().as_secs();
    match age {
        0..3600 => format!("{} min ago", age / 60),
        3600..172_800 => format!("{} h ago", age / 3600),
        _ => format!("{} days ago", age / 86_400),
    }
}

/// A number of hours or days.
fn parse_age(text: &str) -> Result<Duration, String> {
    let seconds_each = match text.chars().last() {
        Some('h') => 3600,
        Some('d') => 86_400,
        _ => 0,
    };
    let number: Option<u64> = text.get(..text.len().saturating_sub(1)).and_then(|digits| digits.parse().ok());
    match number.and_then(|number| number.checked_mul(seconds_each)) {
        Some(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds)),
        _ => Err("expected a number of hours or days, such as 36h or 7d".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_a_unit() {
        assert_eq!(parse_age("36h"), Ok(Duration::from_secs(36 * 3600)));
        assert_eq!(parse_age("7d"), Ok(Duration::from_secs(7 * 86_400)));
        for wrong in ["", "7", "0d", "d", "-1d", "7 d", "99999999999999999999d", "9999999999999999999d", "7\u{e4}"] {
            assert!(parse_age(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_namespace_is_digits_of_a_digest() {
        assert_eq!(prefix(None).expect("all"), "kvhoist1/");
        assert_eq!(prefix(Some("0a")).expect("digits"), "kvhoist1/0a");
        assert_eq!(prefix(Some("../x")).expect_err("no digits").exit_status(), Failure::USAGE);
    }
}

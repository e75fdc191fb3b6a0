//! `kvhoist verify`: every checksum of a store.

use std::{ops::ControlFlow, sync::atomic::Ordering};

use kvhoist::store::{Duplicate, Verification};
use serde_json::{Value, json};

use crate::{
    failure::Failure,
    interrupt,
    ls::refuse_what_is_above,
    output::emit,
    progress::Progress,
    shown::shown,
    size::show_bytes,
    store::{StoreArgs, Table, faults_object, shape_object, total},
};

/// Flags of `kvhoist verify`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Slots to read at the same time.
    #[arg(long, value_name = "N", default_value_t = 32)]
    depth: u32,
    /// No progress on stderr.
    #[arg(long)]
    quiet: bool,
}

/// Verifies a store and prints the report.
pub fn run(args: &Args) -> Result<(), Failure> {
    let interrupted = interrupt::catch()?;
    let (mut progress, mut waiting) = (None, None);
    refuse_what_is_above(&args.store.paths)?;
    let report = args.store.store().depth(args.depth).verify(|now| {
        if now.blocks() > 0 {
            // Before the next one is shown. It is not waited for again.
            drop(waiting.replace(Progress::Quiet));
            let blocks = usize::try_from(now.blocks()).unwrap_or(usize::MAX);
            let progress = progress.get_or_insert_with(|| Progress::new(blocks, "blocks", args.quiet));
            let done = usize::try_from(now.blocks_read()).unwrap_or(usize::MAX);
            progress.update(done, || {
                let faults = match total(now.fault_counts()) {
                    1 => "1 fault".to_owned(),
                    count => format!("{count} faults"),
                };
                format!("{} read, {faults}", show_bytes(now.bytes_read))
            });
        } else {
            waiting.get_or_insert_with(|| Progress::waiting("reading the records of the store", args.quiet));
        }
        match interrupted.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    drop((progress, waiting));
    emit(&if args.store.json { format!("{:#}\n", object(&report)) } else { table(&report) })?;
    match total(report.fault_counts()) {
        _ if !report.complete => Err(Failure::interrupted()),
        0 => Ok(()),
        1 => Err(Failure::run("1 fault found")),
        faults => Err(Failure::run(format!("{faults} faults found"))),
    }
}

fn bytes_per_second(report: &Verification) -> f64 {
    report.bytes_read as f64 / report.elapsed.as_secs_f64().max(1e-9)
}

fn object(report: &Verification) -> Value {
    let duplicate = |duplicate: &Duplicate| {
        json!({
            "key_prefix": duplicate.key_prefix,
            "slot": duplicate.slot,
            "generation": duplicate.generation,
            "superseded_slot": duplicate.superseded_slot,
            "superseded_generation": duplicate.superseded_generation,
        })
    };
    json!({
        "clean": report.is_clean(),
        "complete": report.complete,
        "in_use": report.in_use,
        "store": report.shape.as_ref().map(shape_object),
        "paths": report.paths.iter().map(|path| path.to_string_lossy()).collect::<Vec<_>>(),
        "full": report.committed,
        "empty": report.empty,
        "records_bad": report.records_bad,
        "superseded": report.superseded,
        "duplicates": report.duplicates.iter().map(duplicate).collect::<Vec<_>>(),
        "payloads_good": report.payloads_good,
        "payloads_bad": report.payloads_bad,
        "faults": faults_object(report.faults(), report.fault_counts()),
        "bytes_read": report.bytes_read,
        "seconds": report.elapsed.as_secs_f64(),
        "gb_per_second": bytes_per_second(report) / 1e9,
        "storage": report.storage,
        "direct_io": report.direct_io,
    })
}

fn table(report: &Verification) -> String {
    let mut table = Table::default();
    for path in &report.paths {
        table.row("path", shown(path));
    }
    if let Some(shape) = &report.shape {
        table.shape(shape);
    }
    table.row("full", report.committed);
    table.row("empty", report.empty);
    table.row("records bad", report.records_bad);
    table.row("superseded", report.superseded);
    table.row("payloads good", report.payloads_good);
    table.row("payloads bad", report.payloads_bad);
    table.row("bytes read", show_bytes(report.bytes_read));
    table.row("seconds", format!("{:.2}", report.elapsed.as_secs_f64()));
    table.row("GB/s", format!("{:.2}", bytes_per_second(report) / 1e9));
    table.row("storage", report.storage);
    table.row("direct I/O", if report.direct_io { "yes" } else { "no" });
    for it in &report.duplicates {
        table.line(format!(
            "key {}.. twice: slot {} (generation {}) counts, slot {} (generation {}) does not",
            it.key_prefix, it.slot, it.generation, it.superseded_slot, it.superseded_generation
        ));
    }
    if report.in_use {
        table.line("a cache had the store open: blocks on the move look damaged");
    }
    table.faults(report.faults(), report.fault_counts());
    if !report.complete {
        table.line("interrupted: the rest was not read");
    }
    table.text().to_owned()
}

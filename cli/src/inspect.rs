//! `kvhoist inspect`: what a store is and how full.

use kvhoist::store::{Inspection, Member};
use serde_json::{Value, json};

use crate::{
    columns::columns,
    failure::Failure,
    ls::refuse_what_is_above,
    output::emit,
    shown::shown,
    size::show_bytes,
    store::{StoreArgs, Table, faults_object, shape_object},
};

/// Flags of `kvhoist inspect`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    store: StoreArgs,
}

/// Prints a store's format, settings and fill. Damage is printed too, and is no failure of this command.
pub fn run(args: &Args) -> Result<(), Failure> {
    refuse_what_is_above(&args.store.paths)?;
    let found = args.store.store().inspect()?;
    emit(&if args.store.json { format!("{:#}\n", object(&found)) } else { table(&found) })
}

fn fill(found: &Inspection) -> f64 {
    found.full as f64 / f64::from(found.shape.slots)
}

fn object(found: &Inspection) -> Value {
    let range = |range: Option<(u64, u64)>| range.map(|(low, high)| json!({ "lowest": low, "highest": high }));
    let member = |member: &Member| {
        json!({
            "path": member.path.to_string_lossy(),
            "bytes": member.bytes,
            "device": member.device,
            "slots": member.slots,
            "full": member.full,
            "data_offset": member.data_offset,
            "sequence": member.sequence,
        })
    };
    json!({
        "store": shape_object(&found.shape),
        "members": found.members.iter().map(member).collect::<Vec<_>>(),
        "full": found.full,
        "fill": fill(found),
        "empty": found.empty,
        "bad": found.bad,
        "superseded": found.superseded,
        "roots": found.roots,
        "bytes": found.bytes,
        // A store has one namespace, and so all blocks are its.
        "blocks_by_namespace": { &found.shape.namespace: found.full },
        "generations": range(found.generations),
        "last_uses": range(found.last_uses),
        "in_use": found.in_use,
        "faults": faults_object(found.faults(), found.fault_counts()),
    })
}

fn table(found: &Inspection) -> String {
    let mut table = Table::default();
    table.shape(&found.shape);
    table.row("full", format!("{} ({:.1}%)", found.full, fill(found) * 100.0));
    table.row("empty", found.empty);
    table.row("bad", found.bad);
    table.row("superseded", found.superseded);
    table.row("chains", found.roots);
    table.row("bytes", show_bytes(found.bytes));
    let range = |range: Option<(u64, u64)>| range.map_or("none".into(), |(low, high)| format!("{low} to {high}"));
    table.row("generations", range(found.generations));
    table.row("last uses", range(found.last_uses));
    table.row("in use", if found.in_use { "yes" } else { "no" });
    table.line("");
    let row = |(at, member): (usize, &Member)| {
        let [at, slots, full] = [at as u64, member.slots.into(), member.full].map(|count: u64| count.to_string());
        vec![at, slots, full, show_bytes(member.bytes), member.sequence.to_string(), shown(&member.path)]
    };
    let rows: Vec<Vec<String>> = found.members.iter().enumerate().map(row).collect();
    table.line(columns(&["member", "slots", "full", "size", "sequence", "path"], &rows));
    table.faults(found.faults(), found.fault_counts());
    table.text().to_owned()
}

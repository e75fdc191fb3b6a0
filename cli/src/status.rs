//! `kvhoist status`: spaces, clients and figures of a running service.

use std::path::PathBuf;

use kvhoist::{Durations, Route, Tier};
use kvhoist_service::{ClientStatus, ServiceStatus, SpaceStatus};
use serde_json::{Value, json};

use crate::{
    columns::columns,
    failure::Failure,
    http::Drive,
    output::emit,
    shown::plain,
    size::{show_bytes, show_time},
    socket::Socket,
    store::Table,
};

/// Flags of `kvhoist status`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: Socket,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// Prints the status of a service.
pub fn run(args: &Args) -> Result<(), Failure> {
    let status = args.socket.status()?;
    // The service itself does no such thing on its thread.
    let drives = Drive::of(&status.paths.iter().map(PathBuf::from).collect::<Vec<_>>());
    emit(&if args.json {
        let mut object = object(&status);
        object["drives"] = drives.iter().map(Drive::object).collect();
        format!("{object:#}\n")
    } else {
        table(&status, &drives)
    })
}

/// A table for people.
pub fn table(status: &ServiceStatus, drives: &[Drive]) -> String {
    let mut table = Table::default();
    table.row("version", plain(&status.version));
    table.row("process", status.pid);
    table.row("state", if status.draining { "draining" } else { "serving" });
    table.row("disk", format!("{}, {} left", show_bytes(status.capacity_bytes), show_bytes(status.capacity_left)));
    table.row("host memory", format!("{}, {} left", show_bytes(status.host_bytes), show_bytes(status.host_left)));
    table.row("clients cut off", status.cut_off);
    drives.iter().for_each(|drive| table.row("drive", plain(&drive.wear)));
    for space in &status.spaces {
        space_rows(&mut table, space);
    }
    if !status.clients.is_empty() {
        table.line("");
        let heads = ["client", "pid", "uid", "regions", "lent", "in flight", "requests", "space"];
        table.line(columns(&heads, &status.clients.iter().map(client_row).collect::<Vec<_>>()));
    }
    table.text().to_owned()
}

fn client_row(client: &ClientStatus) -> Vec<String> {
    let ClientStatus { id, pid, uid, namespace, regions, requests, region_bytes, bytes_in_flight } = client;
    let [lent, moving] = [*region_bytes, *bytes_in_flight].map(show_bytes);
    let [id, pid, uid] = [id.to_string(), pid.to_string(), uid.to_string()];
    vec![id, pid, uid, regions.to_string(), lent, moving, requests.to_string(), plain(namespace).into_owned()]
}

fn space_rows(table: &mut Table, space: &SpaceStatus) {
    table.line("");
    table.row("space", plain(&space.namespace));
    table.row("folder", plain(&space.folder));
    table.row("user", format!("{}{}", space.uid, if space.shared { ", shared with all" } else { "" }));
    table.row("block", show_bytes(space.block_bytes));
    table.row("disk", show_bytes(space.capacity_bytes));
    let Some(stats) = &space.stats else { return table.row("state", "closed: no client since the service began") };
    table.row("host memory", show_bytes(space.host_bytes));
    table.row("clients", space.clients);
    for (name, tier) in [("host", Tier::Host), ("disk", Tier::Disk)] {
        let tier = stats.tier(tier);
        table.row(name, format!("{} hits, {} of {} slots resident", tier.hits, tier.resident, tier.slots));
    }
    table.row("misses", stats.misses);
    table.row("stores", stats.stores);
    table.row("written to disk", show_bytes(stats.tier(Tier::Disk).bytes_in));
    let (declined, over, failed) = (stats.writes_declined, stats.writes_over_budget, stats.writes_refused);
    let refused: u64 = stats.tiers.iter().map(|tier| tier.refused).sum();
    table.row("not written", format!("{declined} not worth it, {over} over the budget, {failed} failed"));
    table.row("refused by policy", refused);
    table.row("straight", show_bytes(stats.straight_bytes));
    table.row("read", show_bytes(stats.read_bytes));
    let routes: Vec<Vec<String>> = Route::ALL
        .into_iter()
        .filter_map(|route| {
            let durations = stats.route_durations(route);
            let count = durations.count();
            (count > 0).then(|| [vec![route.name().to_owned(), count.to_string()], quantiles(durations)].concat())
        })
        .collect();
    if !routes.is_empty() {
        table.line(columns(&["route", "movements", "p50", "p99"], &routes));
    }
    if stats.checksum_failures + stats.read_errors + stats.write_errors > 0 {
        table.row("checksum failures", stats.checksum_failures);
        table.row("read errors", stats.read_errors);
        table.row("write errors", stats.write_errors);
        table.row("quarantined", stats.quarantined);
        table.row("changed while stored", stats.changed_memory);
    }
    if !stats.disk_trouble.is_empty() {
        table.row("disk trouble", plain(&stats.disk_trouble));
    }
}

/// The median and the 99th percentile of durations, for people.
pub fn quantiles(durations: &Durations) -> Vec<String> {
    [0.5, 0.99].map(|q| durations.quantile(q).map_or("-".into(), show_time)).into()
}

/// An object for programs.
pub fn object(status: &ServiceStatus) -> Value {
    json!({
        "version": status.version,
        "pid": status.pid,
        "draining": status.draining,
        "capacity_bytes": status.capacity_bytes,
        "capacity_left": status.capacity_left,
        "host_bytes": status.host_bytes,
        "host_left": status.host_left,
        "cut_off": status.cut_off,
        "spaces": status.spaces.iter().map(space_object).collect::<Vec<_>>(),
        "clients": status.clients.iter().map(client_object).collect::<Vec<_>>(),
    })
}

fn space_object(space: &SpaceStatus) -> Value {
    let stats = space.stats.as_ref().map(|stats| {
        let tiers = ["device", "host", "disk"].into_iter().zip(&stats.tiers).map(|(name, tier)| {
            let figures = json!({
                "hits": tier.hits,
                "resident": tier.resident,
                "slots": tier.slots,
                "evictions": tier.evictions,
                "refused": tier.refused,
                "bytes_in": tier.bytes_in,
            });
            (name.to_owned(), figures)
        });
        let routes = Route::ALL.into_iter().filter(|&route| stats.route_durations(route).count() > 0);
        let routes = routes.map(|route| (route.name().to_owned(), json!({ "seconds": stats.route_durations(route) })));
        json!({
            "tiers": tiers.collect::<serde_json::Map<_, _>>(),
            "routes": routes.collect::<serde_json::Map<_, _>>(),
            "misses": stats.misses,
            "stores": stats.stores,
            "stores_known": stats.stores_known,
            "writes_refused": stats.writes_refused,
            "writes_declined": stats.writes_declined,
            "writes_over_budget": stats.writes_over_budget,
            "checksum_failures": stats.checksum_failures,
            "read_errors": stats.read_errors,
            "write_errors": stats.write_errors,
            "quarantined": stats.quarantined,
            "changed_memory": stats.changed_memory,
            "straight_bytes": stats.straight_bytes,
            "read_bytes": stats.read_bytes,
            "disk_trouble": stats.disk_trouble,
        })
    });
    json!({
        "namespace": space.namespace,
        "folder": space.folder,
        "uid": space.uid,
        "shared": space.shared,
        "block_bytes": space.block_bytes,
        "capacity_bytes": space.capacity_bytes,
        "host_bytes": space.host_bytes,
        "clients": space.clients,
        "stats": stats,
    })
}

fn client_object(client: &ClientStatus) -> Value {
    json!({
        "id": client.id,
        "pid": client.pid,
        "uid": client.uid,
        "namespace": client.namespace,
        "regions": client.regions,
        "region_bytes": client.region_bytes,
        "requests": client.requests,
        "bytes_in_flight": client.bytes_in_flight,
    })
}

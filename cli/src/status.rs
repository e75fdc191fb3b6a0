//! `kvhoist status`: spaces, clients and figures of a running service.

use std::path::PathBuf;

use kvhoist::{Durations, Route, Stats, Tier};
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
    if let Some(trouble) = &status.trouble {
        table.row("trouble", plain(&format!("spaces cannot be opened: {trouble}")));
    }
    table.row("disk", format!("{}, {} left", show_bytes(status.capacity_bytes), show_bytes(status.capacity_left)));
    table.row("host memory", format!("{}, {} left", show_bytes(status.host_bytes), show_bytes(status.host_left)));
    if status.files > 0 {
        table.row("files held", format!("{}, {}", status.files, show_bytes(status.file_bytes)));
    }
    table.row("clients cut off", status.cut_off);
    drives.iter().for_each(|drive| table.row("drive", plain(&drive.words())));
    for space in &status.spaces {
        space_rows(&mut table, space);
    }
    // Who is attached to nothing only asks, as this command does.
    let attached = status.clients.iter().filter(|client| !client.namespace.is_empty());
    let rows: Vec<_> = attached.map(client_row).collect();
    if !rows.is_empty() {
        table.line("");
        let heads = ["client", "pid", "uid", "regions", "lent", "in flight", "requests", "space"];
        table.line(columns(&heads, &rows));
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
    let remote = stats.tier(Tier::Remote);
    let is_failing = stats.remote_standing_down.is_some() || stats.remote_read_only.is_some();
    if remote.resident + remote.hits + remote.bytes_in > 0 || is_failing {
        let text =
            format!("{} hits, {} blocks known in {} objects", remote.hits, remote.resident, stats.remote_objects);
        table.row("remote", text);
    }
    table.row("misses", stats.misses);
    table.row("stores", stats.stores);
    table.row("written to disk", show_bytes(stats.tier(Tier::Disk).bytes_in));
    let (declined, over, failed) = (stats.writes_declined, stats.writes_over_budget, stats.writes_refused);
    let refused: u64 = Tier::ALL.iter().map(|&tier| stats.tier(tier).refused).sum();
    table.row("not written", format!("{declined} not worth it, {over} over the budget, {failed} failed"));
    table.row("refused by policy", refused);
    table.row("straight", show_bytes(stats.straight_bytes()));
    table.row("read", show_bytes(stats.tier(Tier::Disk).bytes_out));
    for (name, count) in stats.counters().filter(|(name, count)| *count > 0 && !SHOWN.contains(name)) {
        table.row(&name.replace('_', " "), count);
    }
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
    if let Some(trouble) = stats.disk_trouble() {
        table.row("disk trouble", plain(trouble));
    }
    if let Some(reason) = &stats.device_retired {
        table.row("device trouble", plain(reason));
    }
    if let Some(reason) = &stats.remote_standing_down {
        table.row("remote offers nothing", plain(reason));
    }
    if let Some(reason) = &stats.remote_read_only {
        table.row("remote takes nothing", plain(reason));
    }
}

/// Counters that rows of their own show.
const SHOWN: [&str; 3] = ["misses", "stores", "writes_refused"];

/// The median and the 99th percentile of durations, for people.
pub fn quantiles(durations: &Durations) -> Vec<String> {
    [0.5, 0.99].map(|q| durations.quantile(q).map_or("-".into(), show_time)).into()
}

/// An object for programs.
pub fn object(status: &ServiceStatus) -> Value {
    let mut object = json!(status);
    // `drives` has more of them.
    object.as_object_mut().expect("a struct").remove("paths");
    for (space, found) in status.spaces.iter().zip(object["spaces"].as_array_mut().expect("a list")) {
        if let Some(stats) = &space.stats {
            found["stats"] = figures(stats);
        }
    }
    object
}

/// The figures of a space: those of its cache, but for routes that moved nothing, and sums of some.
fn figures(stats: &Stats) -> Value {
    let mut object = json!(stats);
    object["straight_bytes"] = stats.straight_bytes().into();
    object["read_bytes"] = stats.tier(Tier::Disk).bytes_out.into();
    object["disk_trouble"] = stats.disk_trouble().unwrap_or_default().into();
    let routes = object["routes"].as_object_mut().expect("a map");
    routes.retain(|_, route| route["seconds"]["count"] != 0);
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_space_says_why_a_tier_is_out_of_service() {
        let mut stats = Stats::default();
        stats.disk_retired = Some("no superblock".into());
        stats.device_retired = Some("CUDA_ERROR_ILLEGAL_ADDRESS".into());
        let space = SpaceStatus { stats: Some(stats), ..SpaceStatus::default() };
        let text = table(&ServiceStatus { spaces: vec![space], ..ServiceStatus::default() }, &[]);
        assert!(text.contains("no superblock") && text.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{text}");
    }
}

//! The files by which a service is found: its socket, its folders, and where its figures are.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use kvhoist_service::Server;
use serde_json::json;

use crate::{failure::Failure, output::OutputFile, shown::shown};

/// How often a service looks whether its files are still there.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The file beside a socket that says where the figures of its service are, as Prometheus reads it (`file_sd_configs`).
/// Removed when it is dropped.
pub struct Targets(PathBuf);

impl Targets {
    /// Writes the file.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn write(socket: &Path, address: SocketAddr) -> Result<Self, Failure> {
        let path = socket.with_added_extension("targets.json");
        let targets = json!([{ "targets": [address.to_string()], "labels": { "socket": socket.to_string_lossy() } }]);
        // Prometheus runs as another user; it holds an address only.
        let file = OutputFile::create("--http", &path).map_err(|failure| Failure::run(failure.to_string()))?;
        file.readable_by_all()?.write(format!("{targets}\n").as_bytes())?;
        Ok(Targets(path))
    }
}

impl Drop for Targets {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.0));
    }
}

/// Drains a service that ends by itself when its socket or a folder of it was deleted or replaced: nobody will find it.
/// Any other may outlive its socket, which a cleaner of old files may delete.
///
/// # Errors
/// Where there is no thread.
pub fn end_when_lost(server: Arc<Server>) -> Result<(), Failure> {
    let watch = move || {
        loop {
            thread::sleep(LOOK_EVERY);
            if let Some(path) = server.lost() {
                tracing::warn!(path = %shown(path), "it was deleted or replaced: this service ends");
                return server.drain();
            }
        }
    };
    let failed = |error| Failure::run(format!("cannot start a thread: {error}"));
    thread::Builder::new().name("kvhoist-found".into()).spawn(watch).map(drop).map_err(failed)
}

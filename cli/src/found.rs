//! The files by which a service is found: its socket, its folders, and where its figures are.

use std::{
    fs::{self, File},
    io,
    net::SocketAddr,
    os::unix::fs::MetadataExt,
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

/// The file beside a socket that says where the figures of its service are, as Prometheus reads it (`file_sd_configs`):
/// what is not in it is never found to be away. So it stays, but for a service that ends by itself, until one without
/// figures takes the socket.
pub struct Targets {
    /// Removed when this is dropped, unless another service's has taken its place.
    is_passing: bool,
    path: PathBuf,
    /// Open, so that no later file has its number.
    file: File,
}

impl Targets {
    /// Checks that there is no directory in its place, before the service starts, which says what is wrong with the
    /// socket's folder.
    ///
    /// # Errors
    /// Where there is one.
    pub fn check(socket: &Path) -> Result<(), Failure> {
        if Self::path(socket).is_dir() { Self::create(socket).map(drop) } else { Ok(()) }
    }

    fn path(socket: &Path) -> PathBuf {
        socket.with_added_extension("targets.json")
    }

    fn create(socket: &Path) -> Result<OutputFile, Failure> {
        OutputFile::replacing("--http", Self::path(socket)).map_err(|failure| Failure::run(failure.to_string()))
    }

    /// Writes the file. `is_passing`: of a service that ends by itself.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn write(socket: &Path, address: SocketAddr, is_passing: bool) -> Result<Self, Failure> {
        let targets = json!([{ "targets": [address.to_string()], "labels": { "socket": socket.to_string_lossy() } }]);
        // Prometheus runs as another user; it holds an address only.
        let file = Self::create(socket)?.readable_by_all()?.write(format!("{targets}\n").as_bytes())?;
        Ok(Targets { is_passing, path: Self::path(socket), file })
    }

    /// Removes the file of an earlier service at this socket, whose lock is held: nothing serves there what it names.
    pub fn remove(socket: &Path) {
        // Nor does anything show in the place of a directory.
        drop(fs::remove_file(Self::path(socket)));
    }

    fn is_in_place(&self) -> io::Result<bool> {
        let (found, own) = (fs::symlink_metadata(&self.path)?, self.file.metadata()?);
        Ok((found.dev(), found.ino()) == (own.dev(), own.ino()))
    }
}

impl Drop for Targets {
    fn drop(&mut self) {
        if self.is_passing && self.is_in_place().unwrap_or(false) {
            drop(fs::remove_file(&self.path));
        }
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_that_others_have_put_there_is_replaced_and_only_the_own_file_is_removed() {
        let folder = tempfile::tempdir().expect("a directory");
        let (socket, victim) = (folder.path().join("kvhoist.sock"), folder.path().join("victim"));
        let path = folder.path().join("kvhoist.sock.targets.json");
        fs::write(&victim, "theirs").expect("written");
        symlink(&victim, &path).expect("linked");
        let write =
            |port, is_passing| Targets::write(&socket, ([127, 0, 0, 1], port).into(), is_passing).expect("written");
        let first = write(1, true);
        assert_eq!(fs::read_to_string(&victim).expect("there"), "theirs");
        assert!(!path.is_symlink() && fs::read_to_string(&path).expect("there").contains("127.0.0.1:1"));
        let next = write(2, true);
        drop(first);
        assert!(fs::read_to_string(&path).expect("the next service's").contains("127.0.0.1:2"));
        drop(next);
        assert!(!path.exists());
        drop(write(3, false));
        assert!(fs::read_to_string(&path).expect("it stays").contains("127.0.0.1:3"));
    }
}

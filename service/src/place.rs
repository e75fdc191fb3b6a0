//! Files at known paths, and whether they are still the same.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// What is at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Gone,
    /// It cannot be looked at now, which says nothing.
    Unknown,
    /// When it was made, too: a file system gives the number of a deleted file to the next one.
    There(u64, u64, Option<SystemTime>),
}

impl Place {
    pub(super) fn of(path: &Path) -> Self {
        match fs::metadata(path) {
            Ok(found) => Place::There(found.dev(), found.ino(), found.created().ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Place::Gone,
            Err(_) => Place::Unknown,
        }
    }

    /// Whether the same file is at the path now.
    pub(super) fn is_at(self, path: &Path) -> bool {
        matches!(self, Place::There(..)) && Place::of(path) == self
    }
}

/// The files by which a service is found, as they were before anybody could find it.
#[derive(Debug)]
pub(super) struct Places(Vec<(PathBuf, Place)>);

impl Places {
    pub(super) fn of(paths: &[PathBuf]) -> Self {
        Places(paths.iter().map(|path| (path.clone(), Place::of(path))).collect())
    }

    pub(super) fn add(&mut self, path: PathBuf, place: Place) {
        self.0.push((path, place));
    }

    /// One that was deleted or replaced.
    pub(super) fn lost(&self) -> Option<&Path> {
        let is_lost = |(path, before): &&(PathBuf, Place)| {
            let now = Place::of(path);
            now != *before && now != Place::Unknown
        };
        self.0.iter().find(is_lost).map(|(path, _)| path.as_path())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_deleted_or_replaced_is_lost() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = ["folder", "file"].map(|name| directory.path().join(name));
        let make = || {
            fs::create_dir(&paths[0]).expect("made");
            fs::write(&paths[1], "").expect("written");
        };
        make();
        let mut places = Places::of(&paths[..1]);
        let file = Place::of(&paths[1]);
        places.add(paths[1].clone(), file);
        fs::write(paths[0].join("more"), "").expect("written");
        fs::write(&paths[1], "other bytes").expect("written");
        assert!(places.lost().is_none() && file.is_at(&paths[1]), "{places:?}");
        fs::remove_file(&paths[1]).expect("deleted");
        assert!(places.lost() == Some(&paths[1]) && !file.is_at(&paths[1]), "{places:?}");
        fs::remove_dir_all(&paths[0]).expect("deleted");
        make();
        assert!(places.lost() == Some(&paths[0]) && !file.is_at(&paths[1]), "{places:?}");
        assert!(!Place::Gone.is_at(&paths[0].join("none")), "nothing is nobody's");
    }

    #[test]
    fn a_service_whose_socket_has_a_successor_is_lost() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut config = crate::ServerConfig::new(directory.path().join("socket"));
        config.paths = vec![directory.path().to_owned()];
        (config.capacity_bytes, config.host_bytes) = (4 << 20, 1 << 20);
        config.cache = kvhoist::Config::default().direct_io(kvhoist::DirectIo::Prefer);
        let server = crate::Server::start(config).expect("a service");
        let socket = server.socket().to_owned();
        assert_eq!(server.lost(), None);
        // Replaced before anybody has asked: what was there when it began counts.
        fs::remove_file(&socket).expect("deleted");
        let (_successor, place) = crate::socket::listen(&socket, 0o600, None).expect("listening");
        assert_eq!(server.lost(), Some(&*socket));
        server.drain();
        server.wait().expect("a whole store");
        assert!(place.is_at(&socket), "its successor's socket is left alone");
    }
}

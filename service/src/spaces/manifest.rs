//! The file that describes a space, and the folders of spaces.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    config::ServerConfig,
    error::{Error, Result},
    peers::own_uid,
    protocol::NAMESPACE_BYTES_MAX,
    shares::SpaceOf,
    system::{FOLDER_PREFIX, System},
};

/// The version of the file's fields.
const VERSION: u32 = 2;
/// Stands for all users in the name of a folder. No user has this number.
const EVERYONE: u32 = u32::MAX;

/// The description of a space: its file has these fields as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SpaceManifest {
    /// Of these fields.
    #[serde(rename = "kvhoist_space")]
    pub(super) version: u32,
    pub(super) namespace: String,
    /// The user that made it.
    pub(super) uid: u32,
    /// Whether all users share it.
    pub(super) shared: bool,
    pub(super) block_bytes: u64,
    /// Of all paths, bytes.
    pub(super) capacity_bytes: u64,
}

impl SpaceManifest {
    pub(super) fn new(namespace: String, uid: u32, shared: bool, block_bytes: u64) -> Self {
        SpaceManifest { version: VERSION, namespace, uid, shared, block_bytes, capacity_bytes: 0 }
    }

    /// Of a space whose file says nothing: named after its folder.
    pub(super) fn unknown(folder: &str) -> Self {
        Self::new(folder.into(), own_uid(), false, 0)
    }

    /// What shares know it by.
    pub(super) fn of(&self) -> SpaceOf<'_> {
        SpaceOf { uid: self.uid, name: &self.namespace }
    }

    /// What tells its objects in a remote store from those of other users' spaces of this name: whoever may write
    /// there gives all who read there their blocks. A cache of a program has none, as those of the service's own user.
    pub(super) fn remote_owner(&self) -> String {
        match (self.shared, self.uid) {
            (true, _) => "\0of all users".into(),
            (false, uid) if uid == own_uid() => String::new(),
            (false, uid) => format!("\0of user {uid}"),
        }
    }

    /// The folder of the space below every path.
    pub(super) fn folder(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(if self.shared { EVERYONE } else { self.uid }.to_le_bytes());
        hash.update(self.block_bytes.to_le_bytes());
        hash.update(self.namespace.as_bytes());
        let digest = hash.finalize();
        let hex: String = digest.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
        format!("{FOLDER_PREFIX}{hex}")
    }

    pub(super) fn text(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain fields")
    }

    fn parse(text: &str) -> std::result::Result<SpaceManifest, String> {
        let manifest: SpaceManifest = serde_json::from_str(text).map_err(|error| error.to_string())?;
        match &manifest {
            SpaceManifest { version, .. } if *version != VERSION => Err(format!("version {version}")),
            // Without paths a space has no file.
            SpaceManifest { capacity_bytes: 0, .. } => Err("a capacity of 0 bytes".into()),
            SpaceManifest { namespace, .. } if namespace.len() > NAMESPACE_BYTES_MAX => {
                Err(format!("a namespace of {} bytes", namespace.len()))
            }
            _ => Ok(manifest),
        }
    }
}

/// A space below the first path: its file, the name of its folder, and its description.
type Read = (PathBuf, String, Result<SpaceManifest>);

/// The spaces below the first path.
///
/// # Errors
/// [`Error::Io`] if it cannot be read; [`Error::Config`] if it has none, and another path has been the first.
pub(super) fn manifests(system: &dyn System, config: &ServerConfig) -> Result<Vec<Read>> {
    let [path, others @ ..] = &config.paths[..] else { return Ok(Vec::new()) };
    let read = |(file, text): (PathBuf, Result<String>)| {
        let folder = folder_of(&file);
        let manifest = text.and_then(|text| {
            let of_this = |manifest: SpaceManifest| match manifest.folder() == folder {
                true => Ok(manifest),
                false => Err(format!("the space of the folder {}", manifest.folder())),
            };
            SpaceManifest::parse(&text).and_then(of_this).map_err(|found| {
                Error::store(
                    file.clone(),
                    format!("no description of this space ({found})"),
                    format!("version {VERSION} of a space's fields, and the space of this folder"),
                    "put the file back and restart the service, or remove the space by its folder's name, as the \
                     service's user (`kvhoist space rm`)",
                )
            })
        });
        (file, folder, manifest)
    };
    let spaces: Vec<Read> = system.spaces(path)?.into_iter().map(read).collect();
    for other in others {
        // What cannot be read says nothing.
        let below = system.spaces(other).unwrap_or_default();
        let unknown = |file: &PathBuf| !spaces.iter().any(|(_, folder, _)| *folder == folder_of(file));
        let files: Vec<PathBuf> = below.into_iter().map(|(file, _)| file).filter(unknown).collect();
        let Some(file) = files.first() else { continue };
        let found =
            format!("{} after {}, and the file of a space, {}", other.display(), path.display(), file.display());
        let expected = "the order in which they were when their spaces were made, the one with these files first; \
                        or none of these, where they are of a service that had this path alone";
        if spaces.is_empty() {
            return Err(Error::config("paths", found, expected));
        }
        // Both have been the first: no order is that of all spaces.
        tracing::warn!(?files, expected, "spaces that were made with another path first are not served");
    }
    Ok(spaces)
}

fn folder_of(file: &Path) -> String {
    file.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_is_read_as_it_was_written() {
        let new = SpaceManifest::new("a b\n\u{fc}".into(), 7, false, 4096);
        let manifest = SpaceManifest { capacity_bytes: 1 << 40, ..new.clone() };
        assert_eq!(SpaceManifest::parse(&manifest.text()), Ok(manifest.clone()));
        let shared = SpaceManifest { shared: true, ..manifest.clone() };
        assert_eq!(SpaceManifest::parse(&shared.text()), Ok(shared.clone()));
        assert_ne!(shared.folder(), manifest.folder());
        assert_eq!(SpaceManifest { uid: 8, ..shared.clone() }.folder(), shared.folder(), "any user's");
        assert_ne!(SpaceManifest { uid: 8, ..manifest.clone() }.folder(), manifest.folder(), "a space is its user's");
        assert_ne!(SpaceManifest { block_bytes: 8192, ..manifest.clone() }.folder(), manifest.folder());
        let own = SpaceManifest { uid: own_uid(), ..manifest.clone() };
        let owners =
            [&own, &manifest, &SpaceManifest { uid: 8, ..manifest.clone() }, &shared].map(SpaceManifest::remote_owner);
        assert_eq!(owners[0], "", "as of a program's cache");
        assert_eq!(owners.iter().collect::<std::collections::BTreeSet<_>>().len(), 4, "{owners:?}");
        assert_eq!(SpaceManifest { uid: 8, ..shared.clone() }.remote_owner(), owners[3], "any user's");
        let text = manifest.text();
        for text in
            ["", &text[..40], &text.replace(": 7", ": \"x\""), &text.replace("_space\": 2", "_space\": 3"), &new.text()]
        {
            assert!(SpaceManifest::parse(text).is_err(), "{text}");
        }
    }
}

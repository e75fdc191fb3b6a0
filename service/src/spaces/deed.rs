//! The file that describes a space, and the folders of spaces.

use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::{
    config::ServerConfig,
    error::{Error, Result},
    peers::own_uid,
    protocol::NAMESPACE_BYTES_MAX,
    shares::SpaceOf,
    system::{FOLDER_PREFIX, System},
};

const FILE_HEADER: &str = "kvhoist space 1";
/// Stands for all users in the name of a folder. No user has this number.
const EVERYONE: u32 = u32::MAX;

/// The description of a space, as its file has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Deed {
    pub(super) namespace: String,
    /// The user that made it.
    pub(super) uid: u32,
    /// Whether all users share it.
    pub(super) shared: bool,
    pub(super) block_bytes: u64,
    /// Of all paths, bytes.
    pub(super) capacity_bytes: u64,
}

impl Deed {
    /// Of a space whose file says nothing: named after its folder.
    pub(super) fn unknown(folder: &str) -> Self {
        Deed { namespace: folder.into(), uid: own_uid(), shared: false, block_bytes: 0, capacity_bytes: 0 }
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
        let namespace: String = self.namespace.bytes().map(|byte| format!("{byte:02x}")).collect();
        let Deed { uid, block_bytes, capacity_bytes, .. } = self;
        let shared = if self.shared { "shared\n" } else { "" };
        format!(
            "{FILE_HEADER}\nnamespace {namespace}\nuid {uid}\nblock_bytes {block_bytes}\ncapacity_bytes \
             {capacity_bytes}\n{shared}"
        )
    }

    fn parse(text: &str) -> Option<Deed> {
        let mut lines = text.lines();
        (lines.next()? == FILE_HEADER).then_some(())?;
        let mut value = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned);
        let hex = value("namespace")?;
        let digits: Vec<u8> = hex.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect::<Option<_>>()?;
        let bytes = digits.chunks(2).map(|pair| Some(pair[0] << 4 | *pair.get(1)?)).collect::<Option<Vec<u8>>>()?;
        let mut deed = Deed {
            namespace: String::from_utf8(bytes).ok()?,
            uid: value("uid")?.parse().ok()?,
            shared: false,
            block_bytes: value("block_bytes")?.parse().ok()?,
            capacity_bytes: value("capacity_bytes")?.parse().ok()?,
        };
        deed.shared = match lines.next() {
            None => false,
            Some("shared") => true,
            Some(_) => return None,
        };
        // Without paths a space has no file.
        (deed.namespace.len() <= NAMESPACE_BYTES_MAX && deed.capacity_bytes > 0).then_some(deed)
    }
}

/// A space below the first path: its file, the name of its folder, and its description.
type Read = (PathBuf, String, Result<Deed>);

/// The spaces below the first path.
pub(super) fn deeds(system: &dyn System, config: &ServerConfig) -> Result<Vec<Read>> {
    let Some(path) = config.paths.first() else { return Ok(Vec::new()) };
    let read = |(file, text): (PathBuf, Result<String>)| {
        let folder = file.parent().and_then(|folder| folder.file_name()).unwrap_or_default().to_string_lossy();
        let folder = folder.into_owned();
        let deed = text.and_then(|text| {
            Deed::parse(&text).filter(|deed| deed.folder() == folder).ok_or_else(|| {
                Error::store(
                    file.clone(),
                    "a file that describes no space, or another one",
                    format!("`{FILE_HEADER}` and the space of this folder"),
                    "put the file back and restart the service, or remove the space (`kvhoist space rm`)",
                )
            })
        });
        (file, folder, deed)
    };
    Ok(system.spaces(path)?.into_iter().map(read).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deed_is_read_as_it_was_written() {
        let deed =
            Deed { namespace: "a b\n\u{fc}".into(), uid: 7, shared: false, block_bytes: 4096, capacity_bytes: 1 << 40 };
        assert_eq!(Deed::parse(&deed.text()), Some(deed.clone()));
        let shared = Deed { shared: true, ..deed.clone() };
        assert_eq!(Deed::parse(&shared.text()), Some(shared.clone()));
        assert_ne!(shared.folder(), deed.folder());
        assert_eq!(Deed { uid: 8, ..shared.clone() }.folder(), shared.folder(), "any user's");
        assert_ne!(Deed { uid: 8, ..deed.clone() }.folder(), deed.folder(), "a space is its user's");
        assert_ne!(Deed { block_bytes: 8192, ..deed.clone() }.folder(), deed.folder());
        let own = Deed { uid: own_uid(), ..deed.clone() };
        let owners = [&own, &deed, &Deed { uid: 8, ..deed.clone() }, &shared].map(Deed::remote_owner);
        assert_eq!(owners[0], "", "as of a program's cache");
        assert_eq!(owners.iter().collect::<std::collections::BTreeSet<_>>().len(), 4, "{owners:?}");
        assert_eq!(Deed { uid: 8, ..shared.clone() }.remote_owner(), owners[3], "any user's");
        for text in ["", "kvhoist space 2\n", &deed.text()[..40], &deed.text().replace("uid 7", "uid x")] {
            assert_eq!(Deed::parse(text), None, "{text}");
        }
    }
}

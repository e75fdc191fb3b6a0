//! Decides from the members' superblocks whether to open a store, create one, or refuse.

use std::path::Path;

use super::{
    HEAD_BYTES, PAGE_BYTES, SUPERBLOCK_OFFSETS,
    pair::{SuperblockPair, foreign_copy},
    stripe::{MemberGeometry, SLOTS_MAX, Stripe},
    superblock::{StoreState, Superblock, SuperblockError, VERSION, fingerprint},
};
use crate::{
    config::Config,
    error::{Error, Result},
};

/// A member as found on the medium.
#[derive(Debug, Clone, Copy)]
pub struct Found<'a> {
    /// Name in errors.
    pub path: &'a Path,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether it is a device, whose size is fixed; a file has exactly the size of its store.
    pub device: bool,
    /// Its first bytes, padded with zeros.
    pub head: &'a [u8; HEAD_BYTES],
}

/// How to proceed with the members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenPlan {
    /// Create a store: by the superblocks, no block was ever stored.
    Create,
    /// Open the store. One superblock per member, with the copy to repair.
    Open(Vec<MemberState>),
}

/// A member's superblock in a store to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberState {
    /// The valid copy.
    pub superblock: Superblock,
    /// Its position: 0 for copy A, 1 for B.
    pub copy: usize,
    /// Whether the other copy must be rewritten, because it is torn, corrupted, blank or forming.
    pub repair_other: bool,
}

/// Validates all members against each other and against the settings, which must be valid. For readers; whoever writes
/// needs [`survey_to_write`].
///
/// # Errors
/// [`Error::Store`] with the reason and the fix.
pub fn survey(found: &[Found<'_>], config: &Config) -> Result<OpenPlan> {
    assert_eq!(found.len(), config.disk.paths.len(), "one member a configured path");
    let stripe = Stripe::new(config);
    let heads: Vec<SuperblockPair> = found.iter().map(|member| SuperblockPair::decode(member.head)).collect();
    for (member, head) in found.iter().zip(&heads) {
        check_readable(member, head)?;
    }
    let whole = found.iter().zip(&heads).find_map(|(member, head)| match head {
        SuperblockPair::Valid { superblock, .. } if superblock.state == StoreState::Whole => Some((member, superblock)),
        _ => None,
    });
    let Some((whole_member, whole)) = whole else {
        for (member, geometry) in found.iter().zip(stripe.members()) {
            check_room_for_new(member, geometry.bytes)?;
        }
        return Ok(OpenPlan::Create);
    };
    // First: with more paths than members no path misses a member.
    check_count(whole_member, whole, config)?;
    let mut states = Vec::with_capacity(found.len());
    for (index, (member, head)) in found.iter().zip(heads.iter()).enumerate() {
        let SuperblockPair::Valid { superblock, copy, other_is_whole } = head else {
            return Err(missing_member(member, head, whole));
        };
        check_family(member, superblock, whole, index, config)?;
        check_settings(member, superblock, index, config)?;
        check_size(member, stripe.members()[index].bytes)?;
        states.push(MemberState { superblock: superblock.clone(), copy: *copy, repair_other: !other_is_whole });
    }
    Ok(OpenPlan::Open(states))
}

const START_EMPTY: &str = "or remove the store's files (wipe its devices) to start empty";

fn put_back() -> String {
    format!("list the store's own paths in `disks` in their first order, {START_EMPTY}")
}

fn check_readable(member: &Found<'_>, head: &SuperblockPair) -> Result<()> {
    let SuperblockPair::Bad(error) = head else { return Ok(()) };
    let path = member.path;
    Err(match error {
        SuperblockError::Foreign | SuperblockError::Blank => Error::store(
            path,
            format!("data that kvhoist did not write (it begins with {})", Hex(&member.head[..8])),
            "a store, or nothing but zeros",
            "choose another path in `disks`, or remove what is there if its data is not needed",
        ),
        SuperblockError::Newer(version) => newer(path, *version),
        SuperblockError::Damaged => Error::store(
            path,
            "a store whose two superblocks are both damaged (bad crc)",
            "at least one sound superblock",
            format!("check the disk, {START_EMPTY}"),
        ),
        SuperblockError::Field(field) => Error::store(
            path,
            format!("a superblock with an impossible {field}"),
            format!("a superblock as format version {VERSION} writes it"),
            format!("restore the file from where it came from, {START_EMPTY}"),
        ),
    })
}

/// The refusal of a store of a later format version.
pub(crate) fn newer(path: &Path, version: u32) -> Error {
    Error::store(
        path,
        format!("a store of format version {version}"),
        format!("format version {VERSION}"),
        format!("open it with the newer kvhoist that wrote it, {START_EMPTY}"),
    )
}

/// As [`survey`], for an open that writes: it would repair a copy of the superblock that became another program's.
///
/// # Errors
/// As [`survey`], and [`Error::Store`] for a device with another program's data.
pub fn survey_to_write(found: &[Found<'_>], config: &Config) -> Result<OpenPlan> {
    let plan = survey(found, config)?;
    found.iter().try_for_each(check_no_foreign_copy)?;
    Ok(plan)
}

/// Refuses a device that has become another program's since: a repair of the superblock or a wipe would destroy what
/// that has. Rot of the magic looks the same.
pub(crate) fn check_no_foreign_copy(member: &Found<'_>) -> Result<()> {
    let Some(copy) = foreign_copy(member.head).filter(|_| member.device) else { return Ok(()) };
    let at = SUPERBLOCK_OFFSETS[copy];
    Err(Error::store(
        member.path,
        format!("data that kvhoist did not write over a superblock (bytes {at} to {})", at + PAGE_BYTES as u64),
        "both superblocks of a store, or nothing but zeros",
        format!(
            "look what it is (wipefs); if it is not needed, zero it (blkdiscard --zeroout --offset {at} --length \
             {PAGE_BYTES}), and the store opens by its other superblock if that is sound, or choose another path in \
             `disks`"
        ),
    ))
}

fn check_room_for_new(member: &Found<'_>, wanted: u64) -> Result<()> {
    if member.device {
        return check_size(member, wanted);
    }
    // An empty file will be preallocated; a file of the right size was preallocated by an interrupted creation.
    if member.bytes == 0 || member.bytes == wanted {
        return Ok(());
    }
    Err(Error::store(
        member.path,
        format!("a file of {} bytes that holds no store", member.bytes),
        format!("no file, an empty file, or one of exactly {wanted} bytes left by an interrupted creation"),
        "choose another path in `disks`, or remove the file if its data is not needed",
    ))
}

fn check_size(member: &Found<'_>, wanted: u64) -> Result<()> {
    if member.bytes >= wanted {
        return Ok(());
    }
    let (found, action) = if member.device {
        (format!("a device of {} bytes", member.bytes), "lower `disks.blocks` for this path".to_owned())
    } else {
        (format!("a file truncated to {} bytes", member.bytes), format!("restore the whole file, {START_EMPTY}"))
    };
    Err(Error::store(member.path, found, format!("at least {wanted} bytes"), action))
}

fn missing_member(member: &Found<'_>, head: &SuperblockPair, whole: &Superblock) -> Error {
    let found = match head {
        SuperblockPair::Blank if member.bytes == 0 => "no file, or an empty one",
        SuperblockPair::Blank => "no superblock (all zeros)",
        _ => "a damaged superblock",
    };
    Error::store(
        member.path,
        found,
        format!("a member of store {}, which another path holds", Hex(&whole.uuid)),
        format!("bring back the file or device that belongs here, {START_EMPTY}"),
    )
}

fn check_count(member: &Found<'_>, superblock: &Superblock, config: &Config) -> Result<()> {
    if usize::from(superblock.members) == config.disk.paths.len() {
        return Ok(());
    }
    let found = format!("a store of {} members", superblock.members);
    let expected = format!("one of {}, as many as `disks` has paths", config.disk.paths.len());
    Err(Error::store(member.path, found, expected, put_back()))
}

fn check_family(
    member: &Found<'_>,
    superblock: &Superblock,
    whole: &Superblock,
    index: usize,
    config: &Config,
) -> Result<()> {
    if superblock.uuid != whole.uuid {
        let found = format!("a member of store {}", Hex(&superblock.uuid));
        let expected = format!("a member of store {}, like the other paths", Hex(&whole.uuid));
        return Err(Error::store(member.path, found, expected, put_back()));
    }
    check_count(member, superblock, config)?;
    if usize::from(superblock.member) != index {
        let found = format!("member {} of the store", superblock.member);
        return Err(Error::store(member.path, found, format!("member {index}, its place in `disks`"), put_back()));
    }
    Ok(())
}

fn check_settings(member: &Found<'_>, superblock: &Superblock, index: usize, config: &Config) -> Result<()> {
    let differs = |setting: &str, found: &dyn std::fmt::Display, expected: &dyn std::fmt::Display| {
        Err(Error::store(
            member.path,
            format!("a store with `{setting}` = {found}"),
            format!("`{setting}` = {expected}, as configured"),
            format!("set `{setting}` to {found}, {START_EMPTY}"),
        ))
    };
    let blocks = u64::from(config.path_slots(&config.disk.paths[index]));
    if superblock.namespace != config.namespace {
        return differs("namespace", &format!("{:?}", superblock.namespace), &format!("{:?}", config.namespace));
    }
    if superblock.block_bytes != config.block_bytes as u64 {
        return differs("block_bytes", &superblock.block_bytes, &config.block_bytes);
    }
    if superblock.slots != blocks || superblock.slots_all != config.disk_slots() {
        let size = |here: u64, all: u64| {
            let bytes = MemberGeometry::of(here.min(SLOTS_MAX) as u32, config.slot_bytes() as u64).bytes;
            format!("{here} slots on this path ({bytes} bytes), {all} in all")
        };
        return Err(Error::store(
            member.path,
            format!("a store of {}", size(superblock.slots, superblock.slots_all)),
            format!("{}, by `disks.blocks`", size(blocks, config.disk_slots())),
            format!("set `disks.blocks` to what the store has, {START_EMPTY}"),
        ));
    }
    let (found, expected) = (superblock.fingerprint, fingerprint(config));
    if found != expected {
        return Err(Error::store(
            member.path,
            format!("a store with layout fingerprint {found:016x}"),
            format!("{expected:016x}, from block_bytes, namespace and the sizes of all members"),
            format!("list `disks` as when the store was created, {START_EMPTY}"),
        ));
    }
    Ok(())
}

/// Formats bytes, such as a store's id or the start of a file, as hexadecimal digits.
pub(crate) struct Hex<'a>(pub(crate) &'a [u8]);

impl std::fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests;

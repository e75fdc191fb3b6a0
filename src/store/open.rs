//! Opens the paths of a store for reading: validates them and puts them in the store's order.

use std::path::{Path, PathBuf};

use super::{
    Options,
    fault::{Fault, FaultKind},
};
use crate::{
    config::{Config, DiskPath},
    disk::{
        ReadOnlyFile,
        format::{
            PAGE_BYTES, SUPERBLOCK_OFFSETS,
            pair::SuperblockPair,
            stripe::{MemberGeometry, SLOTS_MAX, Stripe},
            superblock::{StoreState, Superblock, SuperblockError},
            survey::{Found, Hex, newer, survey},
        },
        open_read_only,
        recovery::Member,
    },
    error::{Error, Result},
};

/// The fix in refusals: without settings, only the paths can be wrong.
const ACTION: &str = "name every path of one store, each once; symbolic links are not followed";

/// The fix where an open was killed while it created the store.
const FINISH: &str = "its first and last MiB hold no block: open it again with the same settings, or `kvhoist wipe` it";

/// The fix where a file of zeros has another name than a store's.
const ZEROS: &str = "name every path of one store, each once; if an open was killed while it created this file, open \
                     it again with the same settings, or delete the file";

/// A store's identity and geometry, from its superblocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Format version.
    pub version: u32,
    /// Random id of the store.
    pub uuid: [u8; 16],
    /// The namespace of its keys. A store has one, and only caches with the same namespace can open it.
    pub namespace: String,
    /// Bytes per block.
    pub block_bytes: u64,
    /// Bytes per slot: a block, padded.
    pub slot_bytes: u64,
    /// Slots over all paths.
    pub slots: u32,
}

/// A store open for reading, its members in the store's order.
pub(super) struct OpenStore {
    pub files: Vec<ReadOnlyFile>,
    pub superblocks: Vec<Superblock>,
    /// The settings of the store, as created.
    pub config: Config,
    pub stripe: Stripe,
    pub shape: Shape,
    /// Faults of the superblocks that do not prevent opening.
    pub faults: Vec<Fault>,
}

impl OpenStore {
    /// The files, as the pass over the record tables needs them.
    pub fn members(&self) -> Vec<Member> {
        self.files.iter().map(ReadOnlyFile::member).collect()
    }

    /// Whether a cache has the store open.
    pub fn in_use(&self) -> bool {
        self.files.iter().any(|file| file.in_use)
    }
}

/// Result of opening the paths.
pub(super) enum Opened {
    Store(Box<OpenStore>),
    /// A store of kvhoist, too damaged to be opened by a cache.
    Lost {
        files: Vec<ReadOnlyFile>,
        faults: Vec<Fault>,
    },
}

/// What is left of a store.
pub(super) enum Rest {
    Opened(Opened),
    /// Files and devices of which an open that was killed had begun to make a store: no block was ever stored there.
    Unfinished(Vec<ReadOnlyFile>),
}

/// A refusal of a store, and what that makes of it in a word.
pub(super) struct Refused {
    pub state: &'static str,
    pub error: Error,
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Refused { state: "unreadable", error }
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        refused.error
    }
}

/// Opens the store at `paths`, in any order.
///
/// # Errors
/// [`Error::Store`] if they are not the members of one store, or a cache has it open; [`Error::Io`].
pub(super) fn open(paths: &[&Path], options: &Options) -> Result<Opened, Refused> {
    match open_rest(paths, 0, options)? {
        Rest::Opened(opened) => Ok(opened),
        Rest::Unfinished(files) => {
            let (found, action) = match files.iter().any(|file| file.in_use) {
                true => ("a store that is being created", "look again once it is open"),
                false => ("a store whose creation was cut off", FINISH),
            };
            let error = Error::store(&files[0].path, found, "a whole store", action);
            Err(Refused { state: "unfinished", error })
        }
    }
}

/// Opens what is left of a store of which so many members are `gone`: [`Opened::Lost`] if any is.
///
/// # Errors
/// As those of [`open`].
pub(super) fn open_rest(paths: &[&Path], gone: usize, options: &Options) -> Result<Rest, Refused> {
    if paths.is_empty() {
        let expected = "the files, directories or devices of one store";
        return Err(Error::argument("paths", "no path", expected).into());
    }
    let open = |path: &&Path| open_read_only(path, options.direct_io, options.allow_in_use);
    let files: Vec<ReadOnlyFile> = paths.iter().map(open).collect::<Result<_>>().map_err(reword)?;
    let mut members = Vec::with_capacity(files.len());
    let mut faults = Vec::new();
    let (mut lost, mut blank) = (Vec::new(), Vec::new());
    for file in files {
        match SuperblockPair::decode(file.head()) {
            SuperblockPair::Valid { superblock, .. } => {
                faults.extend(damaged_copies(&file, &superblock));
                members.push((superblock, file));
            }
            // A torn head is an interrupted creation, or a store whose superblocks are damaged.
            SuperblockPair::Torn | SuperblockPair::Bad(SuperblockError::Damaged | SuperblockError::Field(_)) => {
                faults.push(fault(&file, 0, FaultKind::Superblocks));
                lost.push(file);
            }
            SuperblockPair::Blank if file.is_blank()? => blank.push(file),
            head @ (SuperblockPair::Blank | SuperblockPair::Bad(_)) => return Err(no_store(&file, &head).into()),
        }
    }
    members.sort_by_key(|(superblock, _)| superblock.member);
    if !members.iter().any(|(superblock, _)| superblock.state == StoreState::Whole) {
        return Ok(unfinished(members, blank, lost, faults)?);
    }
    check_complete(&members, lost.len() + blank.len() + gone)
        .map_err(|error| Refused { state: "incomplete", error })?;
    faults.extend(blank.iter().map(|file| fault(file, 0, FaultKind::Blank)));
    lost.extend(blank);
    if lost.len() + gone > 0 {
        lost.extend(members.into_iter().map(|(_, file)| file));
        return Ok(Rest::Opened(Opened::Lost { files: lost, faults }));
    }
    let config = settings(&members)?;
    let stripe = Stripe::new(&config);
    let cut = cut_short(&members, &stripe);
    let (superblocks, files): (Vec<Superblock>, Vec<ReadOnlyFile>) = members.into_iter().unzip();
    if !cut.is_empty() {
        faults.extend(cut);
        return Ok(Rest::Opened(Opened::Lost { files, faults }));
    }
    let found: Vec<Found<'_>> = files.iter().map(ReadOnlyFile::found).collect();
    survey(&found, &config).map_err(reword)?;
    let first = &superblocks[0];
    let shape = Shape {
        version: first.version,
        uuid: first.uuid,
        namespace: first.namespace.clone(),
        block_bytes: first.block_bytes,
        slot_bytes: first.slot_bytes,
        slots: stripe.slots(),
    };
    Ok(Rest::Opened(Opened::Store(Box::new(OpenStore { files, superblocks, config, stripe, shape, faults }))))
}

/// Refuses a file that begins with none of this program's superblocks.
fn no_store(file: &ReadOnlyFile, head: &SuperblockPair) -> Error {
    match head {
        SuperblockPair::Blank => {
            Error::store(&file.path, "no store (zeros)", "a store", if file.device { ACTION } else { ZEROS })
        }
        SuperblockPair::Bad(SuperblockError::Newer(version)) => newer(&file.path, *version),
        _ => {
            let found = format!("data that kvhoist did not write (it begins with {})", Hex(&file.head()[..8]));
            refuse(&file.path, found, "a store")
        }
    }
}

/// What files without a whole superblock are: a creation that was cut off, unless one is damaged or has records.
fn unfinished(
    members: Vec<(Superblock, ReadOnlyFile)>,
    blank: Vec<ReadOnlyFile>,
    lost: Vec<ReadOnlyFile>,
    mut faults: Vec<Fault>,
) -> Result<Rest> {
    let mut is_lost = !lost.is_empty();
    let mut files = lost;
    for (superblock, file) in members {
        if file.has_records(geometry(&superblock).table_bytes())? {
            faults.push(fault(&file, 0, FaultKind::Superblocks));
            is_lost = true;
        }
        files.push(file);
    }
    files.extend(blank);
    Ok(if is_lost { Rest::Opened(Opened::Lost { files, faults }) } else { Rest::Unfinished(files) })
}

/// The sizes of a member, by its superblock.
pub(super) fn geometry(superblock: &Superblock) -> MemberGeometry {
    let slots = u32::try_from(superblock.slots).expect("a superblock with more slots is refused");
    MemberGeometry::of(slots, superblock.slot_bytes)
}

fn refuse(path: &Path, found: impl ToString, expected: impl Into<String>) -> Error {
    Error::store(path, found, expected, ACTION)
}

/// Rewords refusals that mention settings of a cache.
pub(super) fn reword(error: Error) -> Error {
    match error {
        Error::Store { path, found, expected, action } if action.contains("disks") || action.contains("remove") => {
            // What else there is to do needs no setting.
            let action = action.strip_suffix(", or choose another path in `disks`").unwrap_or(ACTION);
            Error::store(path, found, expected, action)
        }
        other => other,
    }
}

fn fault(file: &ReadOnlyFile, offset: u64, kind: FaultKind) -> Fault {
    Fault { path: file.path.clone(), offset, slot: None, key_prefix: None, kind }
}

/// Copies of the superblock that are neither equal to the valid one nor an older version or the state of an unfinished
/// creation.
fn damaged_copies(file: &ReadOnlyFile, counts: &Superblock) -> Vec<Fault> {
    let sound = |copy: usize| {
        let bytes = file.head()[copy * PAGE_BYTES..].first_chunk().expect("a head has two pages");
        match Superblock::decode(bytes) {
            Ok(other) => Superblock { state: counts.state, sequence: counts.sequence, ..other } == *counts,
            // Not yet written when the creation was interrupted.
            Err(SuperblockError::Blank) => copy == 1 && counts.state == StoreState::Forming,
            Err(_) => false,
        }
    };
    let damaged = (0..SUPERBLOCK_OFFSETS.len()).filter(|&copy| !sound(copy));
    damaged.map(|copy| fault(file, SUPERBLOCK_OFFSETS[copy], FaultKind::SuperblockCopy)).collect()
}

/// Checks that the members, which are sorted, are those of one store, each once, but for so many that are `absent`.
fn check_complete(members: &[(Superblock, ReadOnlyFile)], absent: usize) -> Result<()> {
    let Some((first, first_file)) = members.first() else { return Ok(()) };
    for (at, (superblock, file)) in members.iter().enumerate() {
        if superblock.uuid != first.uuid {
            return Err(refuse(
                &file.path,
                "a member of another store",
                format!("one of {}", first_file.path.display()),
            ));
        }
        let is_twice = at > 0 && members[at - 1].0.member == superblock.member;
        if is_twice || absent == 0 && usize::from(superblock.member) != at {
            let found = format!("member {} of a store of {}", superblock.member, superblock.members);
            return Err(refuse(&file.path, found, format!("member {at}, which is missing or here twice")));
        }
    }
    let named = members.len() + absent;
    if usize::from(first.members) != named {
        let found = format!("a store of {} members", first.members);
        return Err(refuse(&first_file.path, found, format!("one of {named}, as many as paths are named")));
    }
    Ok(())
}

/// The settings that the store was created with.
fn settings(members: &[(Superblock, ReadOnlyFile)]) -> Result<Config> {
    let first = &members[0].0;
    let slots: u64 = members.iter().map(|(superblock, _)| superblock.slots).sum();
    // The fields within each superblock were checked against each other, but not across superblocks.
    if slots > SLOTS_MAX {
        let found = format!("{slots} slots in all members");
        return Err(refuse(&members[0].1.path, found, format!("{SLOTS_MAX} at most")));
    }
    let disk = |(superblock, file): &(Superblock, ReadOnlyFile)| {
        DiskPath::with_blocks(PathBuf::from(&file.path), u32::try_from(superblock.slots).expect("the sum fits"))
    };
    let config = Config::default()
        .block_bytes(usize::try_from(first.block_bytes).expect("checked to be 1 GiB at most"))
        .disks(members.iter().map(disk).collect())
        .namespace(first.namespace.clone());
    config.validate()?;
    Ok(config)
}

fn cut_short(members: &[(Superblock, ReadOnlyFile)], stripe: &Stripe) -> Vec<Fault> {
    let geometry = members.iter().zip(stripe.members());
    let short = geometry.filter(|((_, file), geometry)| file.bytes < geometry.bytes);
    short.map(|((_, file), g)| fault(file, file.bytes, FaultKind::CutShort { expected: g.bytes })).collect()
}

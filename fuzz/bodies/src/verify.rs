//! `Store::verify` and `Store::inspect`: a sound store with bytes from anywhere in it.

use std::{
    fs,
    ops::{ControlFlow, Range},
    path::{Path, PathBuf},
    sync::OnceLock,
};

use arbitrary::{Arbitrary, Unstructured};
use kvhoist::{
    BlockKey, Cache, Config, DirectIo, DiskPath, StorageKind, block_on,
    internals::disk::format::stripe::Stripe,
    store::{Store, Verification},
};
use tempfile::TempDir;

const BLOCK_BYTES: usize = 4096;
const SLOTS: u32 = 12;
const BLOCKS: u8 = 8;

#[derive(Debug, Arbitrary)]
struct Input {
    edits: Vec<Edit>,
    /// Bytes that the file lacks at its end.
    cut: Option<u16>,
}

#[derive(Debug, Arbitrary)]
enum Edit {
    /// Near the start, where superblocks and records are.
    Early {
        at: u16,
        bytes: Vec<u8>,
    },
    Anywhere {
        at: u32,
        bytes: Vec<u8>,
    },
    /// One place of the file in another.
    Copy {
        from: u32,
        to: u32,
        len: u16,
    },
}

impl Edit {
    fn apply(&self, file: &mut [u8]) {
        let len = file.len();
        match self {
            Edit::Early { at, bytes } => overwrite(file, usize::from(*at), bytes),
            Edit::Anywhere { at, bytes } => overwrite(file, *at as usize % len, bytes),
            Edit::Copy { from, to, len: most } => {
                let (from, to) = (*from as usize % len, *to as usize % len);
                let most = usize::from(*most).min(len - from).min(len - to);
                file.copy_within(from..from + most, to);
            }
        }
    }
}

fn overwrite(file: &mut [u8], at: usize, bytes: &[u8]) {
    let at = at.min(file.len());
    let len = bytes.len().min(file.len() - at);
    file[at..at + len].copy_from_slice(&bytes[..len]);
}

/// A store that a cache has written.
struct Sound {
    bytes: Vec<u8>,
    /// Where its blocks are, one slot each.
    blocks: Vec<Range<usize>>,
}

fn sound() -> &'static Sound {
    static SOUND: OnceLock<Sound> = OnceLock::new();
    SOUND.get_or_init(|| {
        let directory = directory();
        let config = Config::default()
            .block_bytes(BLOCK_BYTES)
            .host_blocks(2)
            .disks(vec![DiskPath::with_blocks(directory.path(), SLOTS)])
            .direct_io(DirectIo::Prefer);
        let cache = block_on(Cache::open(config.clone())).expect("a new store");
        for n in 1..=BLOCKS {
            let stored = block_on(cache.store(&BlockKey::new([n; 32]), None, &[n; BLOCK_BYTES]));
            stored.expect("there is room");
        }
        block_on(cache.close()).expect("a sound disk");
        let bytes = fs::read(path_in(&directory)).expect("the store's file");
        let (_, start) = Stripe::new(&config).locate(0);
        let slots = bytes[start as usize..].chunks_exact(BLOCK_BYTES).take(SLOTS as usize).enumerate();
        let full = slots.filter(|(_, slot)| slot[0] != 0);
        let at = |(n, _): (usize, &[u8])| start as usize + n * BLOCK_BYTES..start as usize + (n + 1) * BLOCK_BYTES;
        let blocks: Vec<_> = full.map(at).collect();
        assert_eq!(blocks.len(), usize::from(BLOCKS), "every block is somewhere");
        Sound { bytes, blocks }
    })
}

fn directory() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

fn path_in(directory: &TempDir) -> PathBuf {
    directory.path().join("kvhoist.store")
}

fn look(path: &Path) -> Result<Verification, kvhoist::Error> {
    let store = Store::at([path]).storage(StorageKind::Blocking).depth(2);
    // Not a word of the answer is promised; it comes.
    drop(store.inspect());
    store.verify(|_| ControlFlow::Continue(()))
}

/// A store with the edits of `data`: what is wrong is found, what is not is not, and nothing is changed.
pub fn run(data: &[u8]) {
    let Ok(input) = Unstructured::new(data).arbitrary::<Input>() else { return };
    let sound = sound();
    let mut file = sound.bytes.clone();
    input.edits.iter().for_each(|edit| edit.apply(&mut file));
    file.truncate(file.len() - usize::from(input.cut.unwrap_or(0)).min(file.len()));
    let directory = directory();
    let path = path_in(&directory);
    fs::write(&path, &file).expect("room for a small file");
    let found = look(&path);
    assert!(fs::read(&path).expect("still there") == file, "the store was changed");

    let head = sound.blocks[0].start.min(file.len());
    if file.len() < sound.bytes.len() || file[..head] != sound.bytes[..head] {
        return;
    }
    // The superblocks and records are what they were.
    let report = found.expect("the store opens");
    let bad = sound.blocks.iter().filter(|&block| file[block.clone()] != sound.bytes[block.clone()]).count() as u64;
    let (all, clean) = (u64::from(BLOCKS), report.is_clean());
    assert_eq!((report.committed, report.payloads_good, report.payloads_bad), (all, all - bad, bad), "{report:?}");
    assert_eq!(clean, bad == 0, "{report:?}");
}

//! What SECURITY.md promises: files are private, nothing is followed to where it does not belong, nothing secret is
//! logged, tenants cannot see each other, and no claim of a file is believed before it is checked.

#[path = "../common/mod.rs"]
mod common;
mod files;
mod log;

use std::{
    fmt::{Debug, Write},
    fs::{self, File, Permissions},
    ops::ControlFlow,
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink},
    path::Path,
    process::Command,
};

use common::{config, directory, key, payload, store_file};
use kvhoist::{
    BlockKey, Cache, Config, DirectIo, DiskPath, Error, Namespace, PrefixChain, StorageKind, Tier, WritePolicy,
    block_on,
    internals::{
        checksum::checksum,
        disk::format::{
            PAGE_BYTES, RECORD_BYTES, TABLE_OFFSET,
            record::{Record, RecordSeal},
            stripe::SLOTS_MAX,
            superblock::Superblock,
        },
    },
    store::{Store, Verification},
};
use tempfile::TempDir;

const CHILD: &str = "KVHOIST_SECURITY_CHILD";

fn refusal<T>(result: Result<T, kvhoist::Error>) -> String {
    match result.err().expect("a refusal") {
        error @ Error::Store { .. } => error.to_string(),
        other => panic!("not a refusal of a store: {other}"),
    }
}

fn verify(path: &Path) -> Result<Verification, kvhoist::Error> {
    Store::at([path]).verify(|_| ControlFlow::Continue(()))
}

fn flip(path: &Path, offset: u64) {
    let file = File::options().read(true).write(true).open(path).expect("open");
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).expect("read");
    file.write_all_at(&[byte[0] ^ 0x10], offset).expect("damage");
}

/// Not a test of its own: what the next one runs with a umask of its own.
#[test]
fn child() {
    let Ok(directory) = std::env::var(CHILD) else { return };
    let disks = vec![DiskPath::with_blocks(directory, 4)];
    let cache = block_on(Cache::open(Config::default().disks(disks))).expect("open");
    block_on(cache.close()).expect("close");
}

/// Text that is easy to find, in whatever form it is written, and is no part of any word.
fn secret_key(n: u8) -> BlockKey {
    let text = format!("key-{n:03}~xqzvj~kwpyf~gnbtd~hjlmrc");
    BlockKey::new(text.as_bytes()[..32].try_into().expect("32 bytes"))
}

fn secret_payload(n: u8) -> Vec<u8> {
    format!("{n:03}~vxkqz~wqhat~smbdy~tyqpd~").into_bytes().into_iter().cycle().take(common::BLOCK_BYTES).collect()
}

/// The ways in which bytes get into a text by accident.
fn forms(bytes: &[u8]) -> [String; 6] {
    let list = |format: fn(&u8) -> String| bytes.iter().map(format).collect::<Vec<_>>();
    [
        String::from_utf8(bytes.to_vec()).expect("text"),
        list(|b| format!("{b:02x}")).concat(),
        list(|b| format!("{b:02X}")).concat(),
        list(|b| format!("{b}")).join(", "),
        list(|b| format!("{b:x}")).join(", "),
        list(|b| format!("{b:#x}")).join(", "),
    ]
}

/// Every window of this many bytes, in every form, is not in the text.
fn assert_absent(text: &str, what: &str, bytes: &[u8], window: usize) {
    for window in bytes.windows(window) {
        for form in forms(window) {
            assert!(!text.contains(&form), "{form:?} of {what} is in:\n{text}");
        }
    }
}

#[test]
fn nothing_logged_and_no_message_tells_what_was_asked_or_answered() {
    log::keep();
    let mut said = String::new();
    let mut say = |what: &dyn Debug| writeln!(said, "{what:?}").expect("a string takes all");
    for (policy, storage) in
        [(WritePolicy::WriteThrough, StorageKind::Auto), (WritePolicy::WriteBack, StorageKind::Blocking)]
    {
        let dir = directory();
        let settings = config(&dir, storage, 4, 16).write_policy(policy).device_blocks(2);
        block_on(async {
            let cache = Cache::open(settings.clone()).await.expect("open");
            for n in 0..24 {
                let parent = (n % 4 > 0).then(|| secret_key(n - 1));
                cache.store(&secret_key(n), parent.as_ref(), &secret_payload(n)).await.expect("stored");
            }
            say(&cache);
            say(&secret_key(20));
            say(&cache.match_prefix(&[secret_key(20), secret_key(21)]));
            say(&cache.store(&secret_key(1), None, b"too short").await.expect_err("another length"));
            say(&Cache::open(settings.clone()).await.expect_err("open already"));
            cache.close().await.expect("close");
        });
        damage(&store_file(&dir), &mut say);
        block_on(async {
            let other = settings.clone().namespace("another");
            say(&Cache::open(other).await.expect_err("another namespace"));
            let cache = Cache::open(settings.clone()).await.expect("open");
            say(&cache.prefetch(&[secret_key(20)]));
            for n in 0..24 {
                if let Ok(Some(lease)) = cache.fetch_to_device(&secret_key(n)).await {
                    say(&lease);
                }
                say(&cache.fetch(&secret_key(n)).await.expect("fetched"));
            }
            assert!(cache.stats().checksum_failures > 0 && cache.stats().records_bad > 0);
            let mut reservation = cache.reserve().await.expect("room");
            reservation.copy_from_slice(&secret_payload(30));
            say(&reservation);
            reservation.commit(&secret_key(30), None).await.expect("committed");
            say(&cache.remove(&secret_key(30)).await);
            say(&(cache.stats(), cache.config()));
            cache.close().await.expect("close");
            say(&cache.fetch(&secret_key(2)).await.expect_err("closed"));
        });
    }
    let text = log::text() + &said;
    // Both speak: of a bad block, of a bad superblock, and of what was refused.
    for wanted in ["a block on disk was given up", "rewriting a torn", "`namespace` = ", "Lease {"] {
        assert!(text.contains(wanted), "{wanted:?} is not in:\n{text}");
    }
    for n in 0..=30 {
        // Its first four bytes may be shown: enough to follow it, too little to use it.
        assert_absent(&text, "a key", &secret_key(n).as_bytes()[4..], 4);
    }
    assert_absent(&text, "a block", &secret_payload(7)[..64], 4);
}

/// A payload, a record, and a superblock; and what a look says of them.
fn damage(path: &Path, say: &mut impl FnMut(&dyn Debug)) {
    let bytes = fs::read(path).expect("the store");
    let payload = b"~wqhat~smbdy~tyqpd~";
    let at = bytes.windows(payload.len()).position(|window| window == payload).expect("a block");
    flip(path, at as u64);
    flip(path, PAGE_BYTES as u64 + 100);
    let record = (0..16).map(|slot| TABLE_OFFSET + slot * 128).rev().find(|at| bytes[*at as usize] != 0);
    flip(path, record.expect("a full slot") + 40);
    let report = verify(path).expect("a store");
    assert_eq!(report.fault_counts().values().sum::<u64>(), 3, "{report:?}");
    report.faults().iter().for_each(|fault| say(&fault.to_string()));
    say(&report);
    say(&Store::at([path]).inspect().expect("a store"));
}

#[test]
fn a_tenant_cannot_name_the_blocks_of_another() {
    let tokens: Vec<u32> = (0..64).collect();
    // Names that are alike, or would be one another's if parts were joined without care.
    let names =
        ["a", "b", "A", "a ", " a", "aa", "a\0", "\0a", "ab", "", "kvhoist namespace v1\0a", "a/1", "a\u{301}", "á"];
    let mut keys: Vec<(&str, Vec<BlockKey>)> = Vec::new();
    for name in names {
        let mut of_name = PrefixChain::new(name).extend_tokens(&tokens, 16).expect("keys");
        of_name.push(Namespace::new(name).key(b"page"));
        // The tokens that another name's bytes would be.
        of_name.push(Namespace::new("").key(name.as_bytes()));
        keys.push((name, of_name));
    }
    let mut all: Vec<BlockKey> = keys.iter().flat_map(|(_, keys)| keys[..5].to_vec()).collect();
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), count, "no two namespaces share a key");
    let dir = directory();
    block_on(async {
        let cache = Cache::open(config(&dir, StorageKind::Auto, 4, 16)).await.expect("open");
        let (_, ours) = &keys[0];
        for (n, key) in (0..).zip(&ours[..5]) {
            cache.store(key, None, &payload(n, common::BLOCK_BYTES)).await.expect("stored");
        }
        for (name, theirs) in &keys[1..] {
            assert_eq!(cache.match_len(&theirs[..4]), 0, "{name:?}");
            for key in theirs.iter().filter(|key| !ours.contains(key)) {
                assert!(cache.fetch(key).await.expect("fetched").is_none(), "{name:?}");
                assert!(!cache.remove(key).await.expect("removed"), "{name:?}");
            }
        }
        assert_eq!(cache.stats().tier(Tier::Disk).resident, 5);
        cache.close().await.expect("close");
    });
}

#[test]
fn a_store_is_bound_to_its_namespace() {
    let dir = directory();
    let settings = |name: &str| config(&dir, StorageKind::Auto, 4, 16).namespace(name);
    block_on(async {
        let cache = Cache::open(settings("tenant")).await.expect("open");
        common::store(&cache, 1).await;
        cache.close().await.expect("close");
    });
    let before = fs::read(store_file(&dir)).expect("the store");
    for name in ["tenan", "tenant2", "Tenant", "tenant\0", "tenant ", "x"] {
        let text = refusal(block_on(Cache::open(settings(name))));
        assert!(text.contains("`namespace` = \"tenant\""), "{text}");
    }
    assert!(fs::read(store_file(&dir)).expect("the store") == before);
    let cache = block_on(Cache::open(settings("tenant"))).expect("open");
    assert!(block_on(common::fetch_verified(&cache, 1)));
    assert!(!block_on(common::fetch_verified(&cache, 2)));
    block_on(cache.close()).expect("close");
}

/// Sizes that a file claims are held against the file before memory is given for them.
#[test]
fn no_claim_of_a_file_is_believed() {
    let dir = directory();
    let settings = Config::default().disks(vec![DiskPath::with_blocks(dir.path(), 4)]);
    block_on(async {
        let cache = Cache::open(settings.clone()).await.expect("open");
        cache.close().await.expect("close");
    });
    let claims: [&[(usize, u64)]; 4] = [
        &[(56, SLOTS_MAX), (64, SLOTS_MAX)],
        &[(40, 1 << 30), (48, 1 << 30)],
        &[(40, 1 << 30), (48, 1 << 30), (56, SLOTS_MAX), (64, SLOTS_MAX)],
        &[(40, u64::MAX), (48, u64::MAX), (56, u64::MAX), (64, u64::MAX)],
    ];
    let sound = fs::read(store_file(&dir)).expect("the store");
    let peak = peak_bytes();
    for claim in claims {
        let mut bytes = sound.clone();
        for copy in [0, PAGE_BYTES] {
            for (offset, value) in claim {
                bytes[copy + offset..copy + offset + 8].copy_from_slice(&value.to_le_bytes());
            }
            let crc = checksum(&bytes[copy..copy + 504]);
            bytes[copy + 504..copy + 512].copy_from_slice(&crc.to_le_bytes());
        }
        fs::write(store_file(&dir), &bytes).expect("written");
        refusal(block_on(Cache::open(settings.clone())));
        refusal(Store::at([dir.path()]).inspect());
        assert!(verify(dir.path()).is_ok_and(|report| !report.is_clean()), "{claim:?}");
    }
    let grown = peak_bytes() - peak;
    assert!(grown < 256 << 20, "{grown} bytes more at the peak");
}

/// The most memory that this process ever had.
fn peak_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

/// Records that name each other, or themselves, as parents: no order of the disk tier begins with any of them.
#[test]
fn blocks_that_are_their_own_ancestors_can_be_evicted() {
    for ring in [1, 2, 4] {
        let dir = directory();
        let settings = config(&dir, StorageKind::Auto, 4, 4).deadline_ms(60_000);
        let cache = block_on(Cache::open(settings.clone())).expect("open");
        (0..4).for_each(|n| block_on(common::store(&cache, n)));
        block_on(cache.close()).expect("close");
        let file = File::options().read(true).write(true).open(store_file(&dir)).expect("open");
        let mut head = [0; PAGE_BYTES];
        file.read_exact_at(&mut head, 0).expect("read");
        let seal = RecordSeal::new(&Superblock::decode(&head).expect("sound").uuid, 0);
        for slot in 0..4 {
            let (mut bytes, offset) = ([0; RECORD_BYTES], TABLE_OFFSET + u64::from(slot) * RECORD_BYTES as u64);
            file.read_exact_at(&mut bytes, offset).expect("read");
            let record = seal.decode(slot, common::BLOCK_BYTES as u32, &bytes).expect("sound").expect("full");
            let n = (0..4).find(|n| key(*n) == record.key).expect("one of them");
            let parent = Some(key(n / ring * ring + (n + 1) % ring));
            file.write_all_at(&seal.encode(slot, &Record { parent, ..record }), offset).expect("written");
        }
        let cache = block_on(Cache::open(settings)).expect("open");
        (0..4).for_each(|n| assert!(block_on(common::fetch_verified(&cache, n))));
        for n in 10..20 {
            block_on(common::store(&cache, n));
        }
        assert_eq!(cache.stats().tier(Tier::Disk).evictions, 10, "rings of {ring}");
        kvhoist::internals::validate(&cache).expect("valid");
        block_on(cache.close()).expect("close");
    }
}

/// Keys are compared whole: one that differs in its last bit is another.
#[test]
fn a_key_that_is_almost_right_is_a_miss() {
    let dir: TempDir = directory();
    let settings = config(&dir, StorageKind::Auto, 4, 16).direct_io(DirectIo::Prefer);
    let cache = block_on(Cache::open(settings)).expect("open");
    block_on(common::store(&cache, 1));
    for bit in 0..256 {
        let mut bytes = *key(1).as_bytes();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(block_on(cache.fetch(&BlockKey::new(bytes))).expect("fetched").is_none(), "bit {bit}");
    }
    block_on(cache.close()).expect("close");
}

//! Settings: text from anywhere, and numbers from anywhere under the right names.

use arbitrary::{Arbitrary, Unstructured};
use kvhoist::{BlockGeometry, Cache, Config, DiskPath, Error, Layout};

use crate::memory::bounded;

#[derive(Debug, Arbitrary)]
struct Numbers {
    block_bytes: usize,
    sizes: [u64; 4],
    counts: [u32; 6],
    selective_hits: u8,
    blocking_threads: u16,
    watermarks: [f64; 2],
    segments: Option<Vec<usize>>,
    disks: Vec<(u8, u32)>,
    namespace: String,
    geometry: [usize; 5],
}

/// Reads settings from text where `data` begins with a brace, else from numbers.
pub fn run(data: &[u8]) {
    if data.first() == Some(&b'{') {
        return text(data);
    }
    let Ok(numbers) = Numbers::arbitrary_take_rest(Unstructured::new(data)) else { return };
    geometry(numbers.geometry);
    builder(&numbers);
    judge(&config(numbers));
}

fn text(data: &[u8]) {
    // A path or a number takes more than its text, but no more than so many times more.
    let parsed = bounded(128 * data.len() + (64 << 10), || serde_json::from_slice::<Config>(data));
    if let Ok(config) = parsed {
        judge(&config);
    }
}

/// Valid or refused with a field's name; and the same when it was written and read back.
fn judge(config: &Config) {
    let slots: u128 = config.disk.paths.iter().map(|disk| u128::from(config.path_slots(disk))).sum();
    match config.validate() {
        Ok(()) => {
            assert!(slots <= u128::from(u32::MAX >> 1) && config.disk_slots() as u128 == slots);
            assert!(config.slot_bytes() >= config.block_bytes && config.slot_bytes().is_multiple_of(4096));
            assert!(
                (0.0..=config.host.high_watermark).contains(&config.host.low_watermark)
                    && config.host.high_watermark <= 1.0
            );
            let written = serde_json::to_string(config).expect("valid settings can be written");
            let read: Config = serde_json::from_str(&written).expect("what was written can be read");
            assert_eq!(read, *config);
        }
        Err(Error::Config { field, found, expected }) => {
            assert!(!field.is_empty() && !found.is_empty() && !expected.is_empty(), "{field}: {found}, {expected}");
        }
        Err(other) => panic!("an error of another kind: {other}"),
    }
}

fn config(numbers: Numbers) -> Config {
    let [read_bytes_in_flight_max, write_bytes_in_flight_max, ..] = numbers.sizes;
    let [host_blocks, device_blocks, movements_max, waiters_max, background_max, quarantine_max] = numbers.counts;
    let [low_watermark, high_watermark] = numbers.watermarks;
    let disk = |(name, blocks): (u8, u32)| DiskPath::with_blocks("d".repeat(usize::from(name)), blocks);
    // No number of these is wrong, so it says as well which of the others are as they should be.
    let sane = |bit: u32| quarantine_max >> bit & 1 == 1;
    let default = Config::default();
    Config::default()
        .block_bytes(if sane(0) { default.block_bytes } else { numbers.block_bytes })
        .host_blocks(if sane(1) { default.host_slots() } else { host_blocks })
        .device_blocks(if sane(2) { default.device_slots() } else { device_blocks })
        .device_layout(numbers.segments.filter(|_| !sane(3)).and_then(layout))
        .disks(if sane(4) { Vec::new() } else { numbers.disks.into_iter().map(disk).collect() })
        .namespace(if sane(5) { default.namespace.clone() } else { numbers.namespace })
        .selective_hits(if sane(6) { default.disk.selective_hits } else { numbers.selective_hits })
        .blocking_threads(if sane(7) { default.disk.blocking_threads } else { numbers.blocking_threads.into() })
        .read_bytes_in_flight_max(if sane(8) {
            default.limits.read_bytes_in_flight_max
        } else {
            read_bytes_in_flight_max
        })
        .write_bytes_in_flight_max(if sane(9) {
            default.limits.write_bytes_in_flight_max
        } else {
            write_bytes_in_flight_max
        })
        .movements_max(if sane(10) { default.limits.movements_max } else { movements_max })
        .waiters_max(if sane(11) { default.limits.waiters_max } else { waiters_max })
        .background_max(if sane(12) { default.limits.background_max } else { background_max })
        .low_watermark(if sane(13) { default.host.low_watermark } else { low_watermark })
        .high_watermark(if sane(14) { default.host.high_watermark } else { high_watermark })
        .quarantine_max(quarantine_max)
}

fn layout(segments: Vec<usize>) -> Option<Layout> {
    let sum = segments.iter().map(|&len| len as u128).sum::<u128>();
    let layout = Layout::new(segments.clone()).ok();
    if let Some(layout) = &layout {
        assert_eq!((layout.segments(), layout.block_bytes() as u128), (&segments[..], sum));
    }
    layout
}

/// Sizes in bytes come to whole slots, or to an error.
fn builder(numbers: &Numbers) {
    let [host_bytes, device_bytes, disk_bytes, _] = numbers.sizes;
    let config = Cache::builder()
        .block_bytes(numbers.block_bytes.clamp(1, 1 << 30))
        .host_bytes(host_bytes)
        .device_bytes(device_bytes)
        .disk("disk", disk_bytes)
        .namespace(numbers.namespace.clone());
    if config.validate().is_err() {
        return;
    }
    let slot_bytes = config.slot_bytes() as u64;
    let blocks: [u64; 2] = [config.host_slots().into(), config.device_slots().into()];
    assert_eq!(blocks, [host_bytes, device_bytes].map(|bytes| bytes / slot_bytes));
    let file_bytes = |blocks| DiskPath::file_bytes(blocks, config.block_bytes as u64);
    let slots = config.disk_slots();
    assert!(file_bytes(slots) <= disk_bytes);
    assert!(slots == u64::from(u32::MAX >> 1) || file_bytes(slots + 1) > disk_bytes);
    judge(&config);
}

/// A model's shape gives a size as in wide numbers, or an error if a field is 0 or the size is out of range.
fn geometry([one, two, layers, tokens, dtype_bytes]: [usize; 5]) {
    let shapes = [
        (BlockGeometry::Mha { kv_heads: one, head_dim: two, layers, tokens, dtype_bytes }, 2, two),
        (BlockGeometry::Mla { latent_dim: one, layers, tokens, dtype_bytes }, 1, 1),
    ];
    for (geometry, halves, factor) in shapes {
        let factors = [one, factor, layers, tokens, dtype_bytes, halves];
        let bytes = factors.iter().try_fold(1u128, |product, &factor| product.checked_mul(factor as u128));
        let bytes = bytes.filter(|&bytes| bytes > 0 && bytes <= isize::MAX as u128);
        assert_eq!(geometry.block_bytes().ok().map(|bytes| bytes as u128), bytes, "{geometry:?}");
        // Segments are bounded, and so is what a list of them takes.
        let layouts = bounded(2 << 20, || [geometry.layer_first(), geometry.page_first()]);
        for layout in layouts.into_iter().flatten() {
            assert_eq!(Some(layout.block_bytes() as u128), bytes, "{geometry:?}");
        }
    }
}

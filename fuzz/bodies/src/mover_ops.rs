//! A whole cache, call by call, over a disk that fails where the input says so, against a map.
//!
//! The simulation has many callers at once and draws everything from a seed; here one caller makes the calls that the
//! fuzzer finds worth making, so that rare orders are found by coverage and findings are short.

mod life;
mod model;
mod ops;
mod spare;

use std::rc::Rc;

use arbitrary::{Arbitrary, Unstructured};
use kvhoist::{BlockKey, Config, DiskPath, Layout, WritePolicy};
use kvhoist_simulation::sim;

use life::Life;
use model::Model;

/// Blocks that an input can name. The parent of each is the one before it, but for every fourth.
const KEYS: u8 = 12;
/// Lives of one input that end as it says; one more looks at what is left.
const LIVES_MAX: usize = 4;
/// Sizes of blocks. Those that are no multiple of 4096 leave a part of each slot unused.
const BLOCK_BYTES: [usize; 4] = [512, 4096, 300, 5000];

#[derive(Debug, Arbitrary)]
struct Settings {
    seed: u64,
    policy: u8,
    block: u8,
    host: u8,
    device: u8,
    disks: [u8; 2],
    watermarks: [u8; 2],
    limits: [u8; 5],
    failures: [u8; 2],
}

impl Settings {
    fn config(&self) -> Config {
        let policies = [
            WritePolicy::WriteThrough,
            WritePolicy::WriteBack,
            WritePolicy::WriteThroughSelective,
            WritePolicy::ByValue,
        ];
        let write_policy = policies[usize::from(self.policy) % policies.len()];
        // None, or up to what lets a few blocks through in a life, which takes seconds.
        let writes_a_day = [0, 0, 1 << 10, 1 << 16, 1 << 20][usize::from(self.policy / 4 % 5)];
        let block_bytes = BLOCK_BYTES[usize::from(self.block % 4)];
        let slot_bytes = (block_bytes as u64).next_multiple_of(4096);
        let disk = |(n, &blocks): (usize, &u8)| {
            (blocks % 20 > 0).then(|| DiskPath::with_blocks(format!("disk{n}"), (blocks % 20).into()))
        };
        let share = |part: u8| f64::from(part % 5) / 4.0;
        let limit = |which: usize| [65_536, 1, 2, 8][usize::from(self.limits[which] % 4)];
        let device_blocks = u32::from(self.device % 4);
        let layout = || Layout::new(vec![100, block_bytes - 100]).expect("two segments");
        let [low, high] = self.watermarks;
        Config::default()
            .block_bytes(block_bytes)
            .host_blocks(1 + u32::from(self.host % 6))
            .device_blocks(device_blocks)
            .device_layout((device_blocks > 1).then(layout))
            .disks(self.disks.iter().enumerate().filter_map(disk).collect())
            .write_policy(write_policy)
            .write_budget(
                (write_policy == WritePolicy::ByValue && writes_a_day > 0).then(|| writes_a_day * (slot_bytes + 4096)),
            )
            .selective_hits(1 + self.policy % 3)
            .movements_max(limit(0))
            .waiters_max(limit(1))
            .background_max(limit(2))
            .read_bytes_in_flight_max(slot_bytes * u64::from(limit(3)))
            .write_bytes_in_flight_max(slot_bytes * u64::from(limit(4)))
            .low_watermark(share(low).min(share(high)))
            .high_watermark(share(low).max(share(high)))
            .quarantine_max([1024, 0, 2][usize::from(self.failures[0] % 3)])
            .disk_failures_max([16, 1, 3][usize::from(self.failures[1] % 3)])
            .deadline_ms(1000)
    }
}

/// What all lives of an input share.
pub(crate) struct Run {
    config: Config,
    model: Model,
    /// A disk lied, in this life or before: nothing is promised but right bytes.
    lied: bool,
    /// A life before was cut off.
    cut_off: bool,
    /// The last one was.
    torn_off: bool,
    /// For what is not worth a choice.
    rng: sim::Rng,
    payloads: Rc<[Rc<[u8]>]>,
}

impl Run {
    /// The content that the key of a block names.
    fn payload(&self, block: u8) -> Rc<[u8]> {
        Rc::clone(&self.payloads[usize::from(block)])
    }

    /// True where callers may run into a limit.
    fn has_tight_limits(&self) -> bool {
        let config = &self.config;
        config.limits.movements_max.min(config.limits.waiters_max).min(config.limits.background_max) < 100
    }
}

/// Lives on the same disks, one after the other, as `data` says.
pub fn run(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let Ok(settings) = input.arbitrary::<Settings>() else { return };
    let config = settings.config();
    config.validate().expect("every choice is within its limits");
    let mut files = spare::blank_files(&config);
    let keeps = !config.disk.paths.is_empty() && config.disk.write_policy != WritePolicy::WriteThroughSelective;
    let writes_through = config.disk.write_policy == WritePolicy::WriteThrough;
    let model = Model::new(keeps, writes_through);
    let payloads = spare::payloads(KEYS, config.block_bytes);
    let rng = sim::Rng::new(settings.seed);
    let mut run = Run { config, model, lied: false, cut_off: false, torn_off: false, rng, payloads };
    for _ in 0..LIVES_MAX {
        if input.is_empty() {
            break;
        }
        let Some(left) = Life::live(&mut run, files, &mut input) else { return };
        files = left;
    }
    // Of the stores that were closed in order one in four is looked at: a life costs more than ten calls.
    let looks = run.torn_off || run.rng.below(4) == 0;
    if run.model.is_empty() || !looks {
        return spare::give_back(files);
    }
    if let Some(left) = Life::live(&mut run, files, &mut Unstructured::new(&[])) {
        spare::give_back(left);
    }
}

fn block_key(block: u8) -> BlockKey {
    BlockKey::new([block + 1; 32])
}

fn parent_key(block: u8) -> Option<BlockKey> {
    (!block.is_multiple_of(4)).then(|| block_key(block - 1))
}

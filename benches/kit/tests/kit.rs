//! The benches' own tools: the bare ring loop reads and writes what it says, and the measuring adds up.

#[path = "../../../tests/common/skip.rs"]
mod skip;

mod ring {
    use kvhoist_bench_kit::{pattern::*, ring::*, scratch::Scratch};

    const BLOCK: usize = 8192;

    /// A ring and a filled file, or `None` with the reason where this machine refuses either.
    fn fixture(setup: Setup, depth: usize) -> Option<(BareRing, Scratch)> {
        let ring = BareRing::open(BLOCK, depth, setup);
        let scratch = Scratch::filled(env!("CARGO_MANIFEST_DIR").as_ref(), BLOCK, 64);
        match (ring, scratch) {
            (Ok(ring), Ok(scratch)) => Some((ring, scratch)),
            (ring, scratch) => {
                crate::skip::skipped(format_args!(
                    "no ring or no direct I/O here: {:?}, {:?}",
                    ring.err(),
                    scratch.err()
                ));
                None
            }
        }
    }

    #[test]
    fn every_offset_is_visited_once_and_holds_its_own_block() {
        for setup in Setup::ALL {
            for depth in [1, 3, 64, 100] {
                let Some((mut ring, scratch)) = fixture(setup, depth) else { return };
                let mut seen = [0; 64];
                let offsets = shuffled(7, 64).map(|index| index * BLOCK as u64);
                let sample = ring
                    .run(scratch.file(), Op::Read, offsets, |offset, block| {
                        seen[offset as usize / BLOCK] += 1;
                        verify(block, offset / BLOCK as u64)
                    })
                    .expect("reads");
                assert_eq!(seen, [1; 64], "{setup:?} depth {depth}");
                assert_eq!(sample.bytes, 64 * BLOCK as u64);
            }
        }
    }

    #[test]
    fn what_was_written_is_read_back() {
        let Some((mut ring, scratch)) = fixture(Setup::Coop, 4) else { return };
        let offsets = || shuffled(3, 64).map(|index| index * BLOCK as u64);
        let key_of = |offset: u64| offset / BLOCK as u64 + 1000;
        ring.run(scratch.file(), Op::Write, offsets(), |offset, block| {
            stamp(block, key_of(offset));
            Ok(())
        })
        .expect("writes");
        ring.run(scratch.file(), Op::Read, offsets(), |offset, block| verify(block, key_of(offset)))
            .expect("new stamps");
    }

    #[test]
    fn a_read_past_the_end_is_an_error_and_the_ring_survives_it() {
        let Some((mut ring, scratch)) = fixture(Setup::Defer, 4) else { return };
        let offsets = [0, 64 * BLOCK as u64, BLOCK as u64];
        let error = ring.run(scratch.file(), Op::Read, offsets, |_, _| Ok(())).expect_err("past the end");
        assert!(error.to_string().contains("found 0 bytes, expected 8192"), "{error}");
        ring.run(scratch.file(), Op::Read, [0], |_, block| verify(block, 0)).expect("still usable");
    }

    #[test]
    fn a_refused_block_ends_the_run() {
        let Some((mut ring, scratch)) = fixture(Setup::Coop, 2) else { return };
        let refused = ring.run(scratch.file(), Op::Read, [0, BLOCK as u64], |_, block| verify(block, 0));
        assert!(refused.is_err(), "block 1 passed for block 0");
    }
}

mod pattern {
    use kvhoist_bench_kit::pattern::*;

    #[test]
    fn a_block_passes_for_no_other_block_and_not_in_part() {
        let mut block = vec![0; 3 * STAMP_STRIDE + 5];
        stamp(&mut block, 17);
        verify(&block, 17).expect("its own stamps");
        assert!(verify(&block, 18).is_err(), "another key");
        for page in 0..4 {
            let mut torn = block.clone();
            torn[page * STAMP_STRIDE] ^= 1;
            let error = verify(&torn, 17).expect_err("torn");
            assert!(error.to_string().starts_with(&format!("block 17, page {page}:")), "{error}");
        }
        block.copy_within(STAMP_STRIDE..2 * STAMP_STRIDE, 0);
        assert!(verify(&block, 17).is_err(), "a page in the wrong place");
    }

    #[test]
    fn random_stays_below_its_limit_and_repeats() {
        let numbers: Vec<u64> = random(5, 10, 1000).collect();
        assert!(numbers.iter().all(|&number| number < 10));
        assert!((0..10).all(|number| numbers.contains(&number)), "every number comes up");
        assert!(numbers.iter().copied().eq(random(5, 10, 1000)), "the seed decides");
        assert!(!numbers.iter().copied().eq(random(6, 10, 1000)), "another seed differs");
    }

    #[test]
    fn shuffled_is_a_permutation() {
        let mut numbers: Vec<u64> = shuffled(1, 500).collect();
        assert!(!numbers.is_sorted());
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..500));
    }
}

mod measure {
    use std::io;

    use kvhoist_bench_kit::measure::*;

    fn sample(bytes: u64, seconds: f64, cpu_seconds: f64) -> Sample {
        Sample { bytes, seconds, cpu_seconds }
    }

    #[test]
    fn units_are_what_they_say() {
        let sample = sample(1 << 30, 2.0, 0.5);
        assert_eq!((sample.mib_per_s(), sample.cpu_s_per_gib()), (512.0, 0.5));
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0]).median, 2.5);
        assert_eq!(Spread::of([7.0]), Spread { median: 7.0, min: 7.0, max: 7.0 });
    }

    #[test]
    fn rounds_are_interleaved_and_the_first_is_dropped() {
        let order = std::cell::RefCell::new(Vec::new());
        let entrant = |name: &'static str| {
            let order = &order;
            Entrant::new(name, move |round| {
                order.borrow_mut().push((round, name));
                Ok(sample(round, 1.0, 1.0))
            })
        };
        let all = interleave(2, &mut [entrant("a"), entrant("b")]).expect("no entrant fails");
        assert_eq!(*order.borrow(), [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "a"), (2, "b")]);
        for series in all {
            assert!(series.samples.iter().map(|sample| sample.bytes).eq([1, 2]), "{series:?}");
        }
    }

    #[test]
    fn a_failing_round_names_its_entrant() {
        let fail = |round| if round == 1 { Err(io::Error::other("broken")) } else { Ok(sample(1, 1.0, 1.0)) };
        let error = interleave(3, &mut [Entrant::new("a", fail)]).expect_err("round 1 fails");
        assert_eq!(error.to_string(), "a, round 1: broken");
    }

    #[test]
    fn ratios_pair_rounds() {
        // The machine is ten times slower in round 2; `a` is twice as fast as `b` in every round.
        let series = |name: &str, seconds: [f64; 3]| Series {
            name: name.into(),
            samples: seconds.map(|seconds| sample(1 << 20, seconds, 1.0)).to_vec(),
        };
        let (a, b) = (series("a", [1.0, 10.0, 1.0]), series("b", [2.0, 20.0, 2.0]));
        assert_eq!(ratio(&a, &b, Sample::mib_per_s), 2.0);
        assert!(table("t", &[b, a]).lines().last().expect("three lines").contains(" 2.000 "));
    }

    #[test]
    fn cpu_time_counts_other_threads() {
        let watch = Stopwatch::start();
        let spin = || {
            let mut rng = kvhoist_bench_kit::pattern::Rng::new(1);
            (0..20_000_000).fold(0, |sum: u64, _| sum ^ rng.next_u64())
        };
        std::hint::black_box(std::thread::spawn(spin).join().expect("no panic"));
        assert!(watch.stop(1).cpu_seconds > 0.001);
    }
}

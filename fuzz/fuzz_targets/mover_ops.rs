#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

/// Bytes of an input that is made here: the settings, and some five calls. Committed seeds are as long as they are, and
/// cover what takes more calls; most of what longer inputs do is the same again.
const INPUT_BYTES_MAX: usize = 48;

fuzz_target!(|data: &[u8]| kvhoist_fuzz_bodies::mover_ops::run(data));

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, _seed: u32| {
    fuzzer_mutate(data, size.min(INPUT_BYTES_MAX), max_size.min(INPUT_BYTES_MAX))
});

/// What `build.rs` has called in the place of libFuzzer's functions.
macro_rules! ignore {
    ($($name:ident),*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name(_: u64, _: u64) {}
        )*
    };
}

ignore!(
    __wrap___sanitizer_cov_trace_cmp1,
    __wrap___sanitizer_cov_trace_cmp2,
    __wrap___sanitizer_cov_trace_cmp4,
    __wrap___sanitizer_cov_trace_cmp8,
    __wrap___sanitizer_cov_trace_const_cmp1,
    __wrap___sanitizer_cov_trace_const_cmp2,
    __wrap___sanitizer_cov_trace_const_cmp4,
    __wrap___sanitizer_cov_trace_const_cmp8,
    __wrap___sanitizer_cov_trace_switch
);

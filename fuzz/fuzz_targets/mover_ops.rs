#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

/// Largest input that is made here: the settings take some 60 bytes, a call some 8. A seed makes the choices after the
/// last byte.
const INPUT_BYTES_MAX: usize = 256;

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

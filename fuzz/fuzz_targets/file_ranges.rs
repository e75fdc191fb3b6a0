#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvhoist_fuzz_bodies::file_ranges::run(data));

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvhoist_fuzz_bodies::resp_replies::run(data));

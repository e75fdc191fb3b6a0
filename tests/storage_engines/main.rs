//! One suite of properties over every storage engine, and what is particular to the ring.
//!
//! The simulated engine has the same suite, in `tests/simulation/tests/storage.rs`.

mod memory;
mod properties;
mod ring;
mod support;

use std::{rc::Rc, sync::Arc};

use kvhoist::internals::io::{IO_ALIGN, Storage};
use memory::{Arena, DIRECT, Operations, READ_ONLY};
use support::{on_calls, on_uring};

macro_rules! on_both_engines {
    ($($property:ident),* $(,)?) => {
        mod on_uring { $(#[test] fn $property() { super::support::on_uring(super::properties::$property) })* }
        mod on_calls { $(#[test] fn $property() { super::support::on_calls(super::properties::$property) })* }
    };
}

properties!(on_both_engines);

#[test]
fn errors_of_the_system_are_passed_on() {
    async fn writing_to_a_file_open_for_reading<S: Storage>(storage: Rc<S>, arena: Arc<Arena>) {
        for fixed in [None, Some(0)] {
            let result = storage.write(READ_ONLY, 0, arena.lend(0, IO_ALIGN, fixed)).await;
            assert_eq!(result.expect_err("open for reading").raw_os_error(), Some(libc::EBADF));
        }
        storage.write(DIRECT, 0, arena.lend(0, 2 * IO_ALIGN, None)).await.expect("written");
        let result = storage.read(DIRECT, 1, arena.lend(0, IO_ALIGN, None)).await;
        assert_eq!(result.expect_err("unaligned direct I/O").raw_os_error(), Some(libc::EINVAL));
    }
    on_uring(writing_to_a_file_open_for_reading);
    on_calls(writing_to_a_file_open_for_reading);
}

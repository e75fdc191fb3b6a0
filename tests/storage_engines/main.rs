//! One suite of properties over every storage engine, and what is particular to the ring.
//!
//! The simulated engine has the same suite, in `tests/simulation/tests/storage.rs`.

mod memory;
mod properties;
mod ring;
mod support;

use std::{rc::Rc, sync::Arc};

use kvhoist::internals::io::{AnyStorage, IO_ALIGN, Storage, write_full};
use memory::{Arena, DIRECT, READ_ONLY};
use properties::compare_with_model;
use support::{on_blocking, on_uring};

macro_rules! on_both_engines {
    ($($property:ident),* $(,)?) => {
        mod on_uring { $(#[test] fn $property() { super::support::on_uring(super::properties::$property) })* }
        mod on_blocking { $(#[test] fn $property() { super::support::on_blocking(super::properties::$property) })* }
    };
}

properties!(on_both_engines);

#[test]
fn errors_of_the_system_are_passed_on() {
    async fn writing_to_a_file_open_for_reading<S: Storage>(storage: Rc<S>, arena: Arc<Arena>) {
        for fixed in [None, Some(0)] {
            let (result, buf) = storage.write(READ_ONLY, 0, arena.lend(0, IO_ALIGN, fixed)).await;
            assert_eq!(result.expect_err("open for reading").raw_os_error(), Some(libc::EBADF));
            assert_eq!(buf.len(), IO_ALIGN);
        }
        write_full(&*storage, DIRECT, 0, arena.lend(0, 2 * IO_ALIGN, None)).await.0.expect("written");
        let (result, _) = storage.read(DIRECT, 1, arena.lend(0, IO_ALIGN, None)).await;
        assert_eq!(result.expect_err("unaligned direct I/O").raw_os_error(), Some(libc::EINVAL));
    }
    on_uring(writing_to_a_file_open_for_reading);
    on_blocking(writing_to_a_file_open_for_reading);
}

#[test]
fn the_engine_may_be_picked_at_run_time() {
    async fn both_ways(engine: AnyStorage, name: &str, arena: Arc<Arena>) {
        assert_eq!(engine.name(), name);
        compare_with_model(&engine, &arena, DIRECT, IO_ALIGN, 0x5eed_0005).await;
    }
    on_uring(async |engine, arena| {
        let engine = Rc::into_inner(engine).expect("the only handle");
        both_ways(AnyStorage::Uring(engine), "uring", arena).await;
    });
    on_blocking(async |engine, arena| {
        let engine = Rc::into_inner(engine).expect("the only handle");
        both_ways(AnyStorage::Blocking(engine), "blocking", arena).await;
    });
}

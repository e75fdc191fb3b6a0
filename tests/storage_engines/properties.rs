//! What holds for every storage engine, the simulated one included.

use std::{
    io,
    pin::pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Waker},
};

use kvhoist::internals::io::{FileId, IO_ALIGN, Storage};

use super::memory::{ARENA_BYTES, Arena, BUFFERED, DIRECT, Operations, Owner, Rng};

/// The names of all properties, as arguments of a macro.
#[macro_export]
macro_rules! properties {
    ($run:ident) => {
        $run!(
            direct_writes_read_back,
            buffered_writes_read_back_at_any_offset,
            hundreds_at_once_do_not_mix,
            reads_end_with_the_file,
            impossible_operations_are_errors,
            abandoned_writes_still_happen,
            unpolled_operations_do_nothing,
        );
    };
}

pub async fn direct_writes_read_back<S: Storage>(storage: Rc<S>, arena: Arc<Arena>) {
    compare_with_model(&*storage, &arena, DIRECT, IO_ALIGN, 0x5eed_0001).await;
}

pub async fn buffered_writes_read_back_at_any_offset<S: Storage>(storage: Rc<S>, arena: Arc<Arena>) {
    compare_with_model(&*storage, &arena, BUFFERED, 1, 0x5eed_0002).await;
}

/// Random writes and reads against a vector.
pub async fn compare_with_model<S: Storage>(storage: &S, arena: &Arc<Arena>, file: FileId, align: usize, seed: u64) {
    let mut rng = Rng(seed);
    let mut model = vec![0_u8; 64 * IO_ALIGN];
    arena.bytes(0, model.len()).fill(0);
    let result = storage.write(file, 0, arena.lend(0, model.len(), None)).await;
    result.expect("zeros written");
    for step in 0..200 {
        let len = (rng.below(4 * IO_ALIGN / align) + 1) * align;
        let offset = rng.below((model.len() - len) / align + 1) * align;
        let start = rng.below((ARENA_BYTES - len) / align + 1) * align;
        let fixed = (rng.below(2) == 0).then_some(0);
        let context = format!("seed {seed:#x} step {step}: {len} bytes at {offset}, fixed {fixed:?}");
        if rng.below(2) == 0 {
            let bytes = arena.bytes(start, len);
            bytes.iter_mut().for_each(|byte| *byte = rng.below(256) as u8);
            model[offset..][..len].copy_from_slice(bytes);
            let result = storage.write(file, offset as u64, arena.lend(start, len, fixed)).await;
            result.unwrap_or_else(|error| panic!("{context}: {error}"));
        } else {
            let result = storage.read(file, offset as u64, arena.lend(start, len, fixed)).await;
            result.unwrap_or_else(|error| panic!("{context}: {error}"));
            assert!(arena.bytes(start, len) == &model[offset..][..len], "{context}");
        }
        if step % 50 == 0 {
            storage.sync(file).await.expect("synced");
        }
    }
}

pub async fn hundreds_at_once_do_not_mix<S: Storage>(storage: Rc<S>, arena: Arc<Arena>) {
    let blocks = ARENA_BYTES / IO_ALIGN / 2;
    let both = |block: usize, write: bool| {
        let (storage, arena) = (Rc::clone(&storage), Arc::clone(&arena));
        tokio::task::spawn_local(async move {
            let place = if write { block } else { blocks + block };
            let fixed = block.is_multiple_of(2).then_some(0);
            let buf = arena.lend(place * IO_ALIGN, IO_ALIGN, fixed);
            let offset = (block * IO_ALIGN) as u64;
            match write {
                true => storage.write(DIRECT, offset, buf).await.expect("written"),
                false => storage.read(DIRECT, offset, buf).await.expect("read"),
            }
        })
    };
    for block in 0..blocks {
        arena.bytes(block * IO_ALIGN, IO_ALIGN).fill((block % 251) as u8 + 1);
    }
    for write in [true, false] {
        let tasks: Vec<_> = (0..blocks).map(|block| both(block, write)).collect();
        for task in tasks {
            task.await.expect("no panic");
        }
    }
    for block in 0..blocks {
        let expected = (block % 251) as u8 + 1;
        assert!(
            arena.bytes((blocks + block) * IO_ALIGN, IO_ALIGN).iter().all(|byte| *byte == expected),
            "block {block}"
        );
    }
}

pub async fn reads_end_with_the_file<S: Storage>(storage: Rc<S>, arena: Arc<Arena>) {
    let result = storage.write(BUFFERED, 0, arena.lend(0, 1000, None)).await;
    result.expect("written");
    for (offset, len) in [(1000, 500), (5000, 500), (900, 500), (0, IO_ALIGN)] {
        let result = storage.read(BUFFERED, offset, arena.lend(0, len, None)).await;
        assert_eq!(result.expect_err("the file is shorter").kind(), io::ErrorKind::UnexpectedEof);
    }
    storage.read(BUFFERED, 900, arena.lend(0, 100, None)).await.expect("its last bytes");
}

pub async fn impossible_operations_are_errors<S: Storage>(storage: Rc<S>, arena: Arc<Arena>) {
    let kind = |result: io::Result<()>| result.expect_err("impossible").kind();
    for offset in [u64::MAX, i64::MAX as u64] {
        let buf = || arena.lend(0, IO_ALIGN, None);
        assert_eq!(kind(storage.read(DIRECT, offset, buf()).await), io::ErrorKind::InvalidInput);
        assert_eq!(kind(storage.write(DIRECT, offset, buf()).await), io::ErrorKind::InvalidInput);
    }
    let result = storage.read(FileId(3), 0, arena.lend(0, IO_ALIGN, None)).await;
    assert_eq!(kind(result), io::ErrorKind::InvalidInput);
    let result = storage.write(FileId(u16::MAX), 0, arena.lend(0, IO_ALIGN, None)).await;
    assert!(result.expect_err("no such file").to_string().contains("file 65535"));
    assert_eq!(kind(storage.sync(FileId(3)).await), io::ErrorKind::InvalidInput);
}

pub async fn abandoned_writes_still_happen<S: Storage>(storage: Rc<S>, arena: Arc<Arena>) {
    arena.bytes(0, IO_ALIGN).fill(0x77);
    let (gone, is_gone) = tokio::sync::oneshot::channel();
    let buf = Owner::lend(&arena, 0, IO_ALIGN, move || gone.send(()).expect("the test listens"));
    start_and_drop_any(storage.write(DIRECT, 0, buf));
    is_gone.await.expect("the memory is given up once the write is done");
    let result = storage.read(DIRECT, 0, arena.lend(IO_ALIGN, IO_ALIGN, None)).await;
    result.expect("read");
    assert!(arena.bytes(IO_ALIGN, IO_ALIGN).iter().all(|byte| *byte == 0x77));
}

/// As `start_and_drop`, for engines whose threads may be faster than this one.
fn start_and_drop_any(future: impl Future) {
    let _ = pin!(future).poll(&mut Context::from_waker(Waker::noop()));
}

pub async fn unpolled_operations_do_nothing<S: Storage>(storage: Rc<S>, arena: Arc<Arena>) {
    let (gone, is_gone) = tokio::sync::oneshot::channel();
    let buf = Owner::lend(&arena, 0, IO_ALIGN, move || gone.send(()).expect("the test listens"));
    drop(storage.write(DIRECT, 0, buf));
    is_gone.await.expect("given up at once");
    let result = storage.read(DIRECT, 0, arena.lend(0, IO_ALIGN, None)).await;
    assert_eq!(result.expect_err("an empty file").kind(), io::ErrorKind::UnexpectedEof);
}

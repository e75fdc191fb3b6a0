//! Complete transfers: resumes short operations and retries interrupted ones, a bounded number of times.

use std::io;

use super::{Storage, check_offset};
use crate::{
    block::{FileId, IO_ALIGN, OpKind},
    memory::{IoBuf, Lent},
};

/// Largest number of operations in a row that are interrupted or make no progress.
const NO_PROGRESS_MAX: u32 = 8;

/// Like [`read_full`], and returns the memory's owner.
pub(crate) async fn read_into<S: Storage, O: Send + Sync + 'static>(
    storage: &S,
    file: FileId,
    offset: u64,
    buf: IoBuf<O>,
) -> (io::Result<()>, O) {
    // SAFETY: the only `Lent` of the memory; it is dropped with the result of the read.
    let result = read_full(storage, file, offset, unsafe { buf.lend() }).await.0;
    (result, buf.into_owner())
}

/// Like [`write_full`], and returns the memory's owner.
pub(crate) async fn write_from<S: Storage, O: Send + Sync + 'static>(
    storage: &S,
    file: FileId,
    offset: u64,
    buf: IoBuf<O>,
) -> (io::Result<()>, O) {
    // SAFETY: the only `Lent` of the memory; it is dropped with the result of the write.
    let result = write_full(storage, file, offset, unsafe { buf.lend() }).await.0;
    (result, buf.into_owner())
}

/// Reads until `buf` is full, and returns it.
///
/// # Errors
/// The storage's error, after 8 attempts in a row without progress if it was `EINTR` or `EAGAIN`; `UnexpectedEof` if
/// the file ends first. The content of `buf` is then undefined.
///
/// # Cancel safety
/// Dropping the future abandons the read; `buf` lives until the operation in flight is done.
pub async fn read_full<S: Storage>(storage: &S, file: FileId, offset: u64, buf: Lent) -> (io::Result<()>, Lent) {
    transfer(storage, OpKind::Read, file, offset, buf).await
}

/// Writes all of `buf`, and returns it.
///
/// # Errors
/// The storage's error, after 8 attempts in a row without progress if it was `EINTR` or `EAGAIN`; `WriteZero` if it
/// accepts no bytes. The range of the file is then undefined.
///
/// # Cancel safety
/// Dropping the future leaves the range undefined; `buf` lives until the operation in flight is done.
pub async fn write_full<S: Storage>(storage: &S, file: FileId, offset: u64, buf: Lent) -> (io::Result<()>, Lent) {
    transfer(storage, OpKind::Write, file, offset, buf).await
}

async fn transfer<S: Storage>(
    storage: &S,
    kind: OpKind,
    file: FileId,
    offset: u64,
    buf: Lent,
) -> (io::Result<()>, Lent) {
    // The caller may have skipped a part: only the rest is transferred.
    let already_skipped = buf.skipped();
    let mut progress = Progress::new(kind, file, offset, &buf);
    if let Err(error) = check_offset(offset, buf.len()) {
        return (Err(error), buf);
    }
    let mut buf = buf;
    while progress.done < progress.len {
        let at = offset + progress.done as u64;
        let (result, back) = match kind {
            OpKind::Read => storage.read(file, at, buf).await,
            OpKind::Write => storage.write(file, at, buf).await,
            OpKind::Sync => unreachable!("only read_full and write_full call this"),
        };
        buf = back.rewind().skip(already_skipped);
        if let Err(error) = progress.account(result) {
            return (Err(error), buf);
        }
        if progress.done < progress.len {
            buf = buf.skip(progress.done);
        }
    }
    (Ok(()), buf)
}

/// Progress of a transfer: pure bookkeeping, no I/O.
pub(super) struct Progress {
    kind: OpKind,
    file: FileId,
    offset: u64,
    pub(super) len: usize,
    /// Bytes from the start that are done; a short operation may have moved more.
    pub(super) done: usize,
    /// Direct I/O may be in use: resume only at multiples of [`IO_ALIGN`].
    aligned: bool,
    no_progress: u32,
}

impl Progress {
    pub(super) fn new(kind: OpKind, file: FileId, offset: u64, buf: &Lent) -> Self {
        let aligned = offset.is_multiple_of(IO_ALIGN as u64);
        Progress { kind, file, offset, len: buf.len(), done: 0, aligned, no_progress: 0 }
    }

    pub(super) fn account(&mut self, result: io::Result<usize>) -> io::Result<()> {
        match result {
            Ok(0) => Err(self.ended()),
            Ok(moved) if moved > self.len - self.done => Err(self.error(
                io::ErrorKind::InvalidData,
                &format!("the storage engine reported {moved} bytes for {} requested", self.len - self.done),
            )),
            Ok(moved) => self.advance(moved),
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {
                self.no_progress += 1;
                if self.no_progress < NO_PROGRESS_MAX { Ok(()) } else { Err(error) }
            }
            Err(error) => Err(error),
        }
    }

    fn advance(&mut self, moved: usize) -> io::Result<()> {
        let reached = self.done + moved;
        let resume_at = if self.aligned && reached < self.len { reached - reached % IO_ALIGN } else { reached };
        assert!(resume_at >= self.done, "`done` of an aligned transfer is a multiple of {IO_ALIGN}");
        self.no_progress = if resume_at > self.done { 0 } else { self.no_progress + 1 };
        self.done = resume_at;
        if self.no_progress < NO_PROGRESS_MAX { Ok(()) } else { Err(self.ended()) }
    }

    fn ended(&self) -> io::Error {
        let kind = match self.kind {
            OpKind::Write => io::ErrorKind::WriteZero,
            OpKind::Read | OpKind::Sync => io::ErrorKind::UnexpectedEof,
        };
        self.error(kind, "no further byte was moved; check the size and the health of the file")
    }

    fn error(&self, kind: io::ErrorKind, what: &str) -> io::Error {
        let (name, file, offset) = (self.kind.name(), self.file.0, self.offset);
        let text = format!("{name} of {} bytes at {offset} of file {file}: {} done, then {what}", self.len, self.done);
        io::Error::new(kind, text)
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, collections::VecDeque};

    use super::*;
    use crate::memory::AlignedBuf;

    /// Answers operations from a list, and records their offsets.
    struct Scripted {
        answers: RefCell<VecDeque<io::Result<usize>>>,
        asked: RefCell<Vec<(u64, usize)>>,
    }

    impl Scripted {
        fn new(answers: impl IntoIterator<Item = io::Result<usize>>) -> Self {
            Scripted { answers: RefCell::new(answers.into_iter().collect()), asked: RefCell::default() }
        }

        async fn answer(&self, offset: u64, buf: Lent) -> (io::Result<usize>, Lent) {
            self.asked.borrow_mut().push((offset, buf.len()));
            let answer = self.answers.borrow_mut().pop_front().expect("no more operations than answers");
            (answer, buf)
        }
    }

    impl Storage for Scripted {
        fn name(&self) -> &'static str {
            "scripted"
        }
        async fn read(&self, _: FileId, offset: u64, buf: Lent) -> (io::Result<usize>, Lent) {
            self.answer(offset, buf).await
        }
        async fn write(&self, _: FileId, offset: u64, buf: Lent) -> (io::Result<usize>, Lent) {
            self.answer(offset, buf).await
        }
        async fn sync(&self, _: FileId) -> io::Result<()> {
            Ok(())
        }
    }

    fn run(
        write: bool,
        offset: u64,
        skip: usize,
        answers: Vec<io::Result<usize>>,
    ) -> (io::Result<()>, Vec<(u64, usize)>, usize) {
        let storage = Scripted::new(answers);
        let buf = AlignedBuf::zeroed(4 * IO_ALIGN).lend().skip(skip);
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let (result, buf) = runtime.block_on(async {
            match write {
                true => write_full(&storage, FileId(0), offset, buf).await,
                false => read_full(&storage, FileId(0), offset, buf).await,
            }
        });
        assert!(storage.answers.borrow().is_empty(), "every answer was asked for");
        (result, storage.asked.into_inner(), buf.len())
    }

    fn interrupted() -> io::Result<usize> {
        Err(io::ErrorKind::Interrupted.into())
    }

    #[test]
    fn short_direct_transfers_resume_at_the_last_boundary() {
        for write in [false, true] {
            let (result, asked, len) = run(write, 8192, 0, vec![Ok(5000), Ok(512), Ok(8191), Ok(8192)]);
            result.expect("resumed");
            assert_eq!(asked, [(8192, 16384), (12288, 12288), (12288, 12288), (16384, 8192)]);
            assert_eq!(len, 4 * IO_ALIGN, "the whole buffer comes back");
        }
    }

    #[test]
    fn a_transfer_is_direct_by_its_place_in_the_file_wherever_its_memory_lies() {
        for write in [false, true] {
            let (result, asked, _) = run(write, 4096, 64, vec![Ok(5000), Ok(12224)]);
            result.expect("resumed");
            assert_eq!(asked, [(4096, 16320), (8192, 12224)]);
        }
    }

    #[test]
    fn short_buffered_transfers_resume_where_they_stopped() {
        let (result, asked, len) = run(false, 10, 84, vec![Ok(300), Ok(16000)]);
        result.expect("resumed");
        assert_eq!(asked, [(10, 16300), (310, 16000)]);
        assert_eq!(len, 16300, "what the caller had skipped stays skipped");
    }

    #[test]
    fn nothing_moved_is_an_error() {
        let (result, ..) = run(false, 0, 0, vec![Ok(4096), Ok(0)]);
        let error = result.expect_err("the file ended");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert!(error.to_string().contains("16384 bytes at 0 of file 0: 4096 done"), "{error}");
        let (result, ..) = run(true, 0, 0, vec![Ok(0)]);
        assert_eq!(result.expect_err("nothing taken").kind(), io::ErrorKind::WriteZero);
    }

    #[test]
    fn an_unaligned_end_of_file_is_an_error_not_a_loop() {
        let (result, ..) = run(false, 0, 0, (0..NO_PROGRESS_MAX).map(|_| Ok(100)).collect());
        assert_eq!(result.expect_err("no progress").kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn interruptions_are_retried_a_bounded_number_of_times() {
        let mut answers: Vec<_> = (1..NO_PROGRESS_MAX).map(|_| interrupted()).collect();
        answers.push(Ok(4096));
        answers.extend((1..NO_PROGRESS_MAX).map(|_| Err(io::ErrorKind::WouldBlock.into())));
        answers.push(Ok(12288));
        run(false, 0, 0, answers).0.expect("progress starts the count anew");
        let (result, ..) = run(true, 0, 0, (0..NO_PROGRESS_MAX).map(|_| interrupted()).collect());
        assert_eq!(result.expect_err("too many").kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn impossible_counts_and_offsets_are_refused() {
        let (result, ..) = run(false, 0, 0, vec![Ok(16385)]);
        assert_eq!(result.expect_err("more than asked").kind(), io::ErrorKind::InvalidData);
        for offset in [u64::MAX, u64::MAX - 16384, i64::MAX as u64] {
            let (result, asked, _) = run(true, offset, 0, vec![]);
            assert_eq!(result.expect_err("past the end").kind(), io::ErrorKind::InvalidInput);
            assert!(asked.is_empty());
        }
    }

    #[test]
    fn other_errors_are_passed_on() {
        let (result, ..) = run(true, 0, 0, vec![Ok(4096), Err(io::Error::from_raw_os_error(libc::ENOSPC))]);
        assert_eq!(result.expect_err("full").raw_os_error(), Some(libc::ENOSPC));
    }
}

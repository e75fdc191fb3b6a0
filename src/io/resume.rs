//! Whole transfers of several operations: resumes short ones and retries interrupted ones, a bounded number of times.
//!
//! The only place that does: the reactor's ring and the simulation by [`in_parts`], the threads' rings and system calls
//! by [`Parts`] itself.

use std::io;

use crate::{
    block::{FileId, IO_ALIGN, OpKind},
    memory::Lent,
};

/// Largest number of operations in a row that are interrupted or make no progress.
const NO_PROGRESS_MAX: u32 = 8;

/// Reads or writes all of `buf` by operations of `operate`, which reports the bytes that it moved, and returns it.
///
/// # Errors
/// The operation's error, after 8 attempts in a row without progress if it was `EINTR` or `EAGAIN`; `UnexpectedEof` if
/// the file ends before a read is complete; `WriteZero` if it takes no bytes. The range that was to be filled is then
/// undefined.
///
/// # Cancel safety
/// As of `operate`.
pub async fn in_parts(
    kind: OpKind,
    file: FileId,
    offset: u64,
    buf: Lent,
    mut operate: impl AsyncFnMut(u64, Lent) -> (io::Result<usize>, Lent),
) -> (io::Result<()>, Lent) {
    let mut parts = Parts::new(kind, file, offset, buf);
    if let Err(error) = parts.check_offset() {
        return (Err(error), parts.into_buf());
    }
    loop {
        let (result, buf) = operate(parts.offset(), parts.take_rest()).await;
        parts.rest = Some(buf);
        if let Some(ended) = parts.account(result) {
            return (ended, parts.into_buf());
        }
    }
}

/// A transfer of which a part may be done: pure bookkeeping, no I/O.
pub(super) struct Parts {
    kind: OpKind,
    file: FileId,
    offset: u64,
    /// The memory that is not done. Taken only while its range is changed, and by [`in_parts`].
    rest: Option<Lent>,
    /// Bytes that the caller had skipped.
    skipped: usize,
    len: usize,
    /// Bytes from the start that are done; a short operation may have moved more.
    done: usize,
    /// Direct I/O may be in use: resume only at multiples of [`IO_ALIGN`].
    aligned: bool,
    no_progress: u32,
}

impl Parts {
    /// A transfer of which nothing is done yet.
    pub(super) fn new(kind: OpKind, file: FileId, offset: u64, buf: Lent) -> Self {
        let (len, skipped, aligned) = (buf.len(), buf.skipped(), offset.is_multiple_of(IO_ALIGN as u64));
        Parts { kind, file, offset, rest: Some(buf), skipped, len, done: 0, aligned, no_progress: 0 }
    }

    /// Refuses offsets past the largest one of a file: `u64::MAX` is the current file position to a ring.
    pub(super) fn check_offset(&self) -> io::Result<()> {
        let Parts { offset, len, .. } = self;
        match offset.checked_add(*len as u64) {
            Some(end) if i64::try_from(end).is_ok() => Ok(()),
            _ => {
                let text =
                    format!("{len} bytes at offset {offset} reach past the largest offset of a file, {}", i64::MAX);
                Err(io::Error::new(io::ErrorKind::InvalidInput, text))
            }
        }
    }

    pub(super) fn kind(&self) -> OpKind {
        self.kind
    }

    /// Bytes of the whole transfer.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Where the next operation begins in the file.
    pub(super) fn offset(&self) -> u64 {
        self.offset + self.done as u64
    }

    /// The memory of the next operation.
    pub(super) fn rest(&self) -> &Lent {
        self.rest.as_ref().expect(PUT_BACK)
    }

    fn take_rest(&mut self) -> Lent {
        self.rest.take().expect(PUT_BACK)
    }

    /// The memory, as it was given.
    pub(super) fn into_buf(self) -> Lent {
        self.rest.expect(PUT_BACK).rewind().skip(self.skipped)
    }

    /// Notes the bytes that an operation moved. `None`: another operation is to follow.
    pub(super) fn account(&mut self, result: io::Result<usize>) -> Option<io::Result<()>> {
        if self.kind == OpKind::Sync {
            return Some(result.map(|_| ()));
        }
        let accounted = match result {
            Ok(0) if self.len > 0 => Err(self.ended()),
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
        };
        if accounted.is_err() || self.done == self.len {
            return Some(accounted);
        }
        let whole = self.take_rest().rewind();
        self.rest = Some(whole.skip(self.skipped + self.done));
        None
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

const PUT_BACK: &str = "put back after every operation";

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::memory::AlignedBuf;

    /// Runs a transfer whose operations are answered from a list; returns their offsets and lengths too.
    fn run(
        write: bool,
        offset: u64,
        skip: usize,
        answers: Vec<io::Result<usize>>,
    ) -> (io::Result<()>, Vec<(u64, usize)>, usize) {
        let (kind, buf) = (if write { OpKind::Write } else { OpKind::Read }, AlignedBuf::zeroed(4 * IO_ALIGN).lend());
        let (mut answers, mut asked) = (answers.into_iter(), Vec::new());
        let transfer = in_parts(kind, FileId(0), offset, buf.skip(skip), async |at, buf| {
            asked.push((at, buf.len()));
            (answers.next().expect("no more operations than answers"), buf)
        });
        let (result, buf) = transfer.now_or_never().expect("nothing waits");
        assert!(answers.next().is_none(), "every answer was asked for");
        (result, asked, buf.len())
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

//! The sequential pass over the record tables.

use std::{io, ops::ControlFlow};

use futures_util::stream::{FuturesOrdered, StreamExt};

use super::Member;
use crate::{
    block::{FileId, OpKind},
    disk::format::{
        PAGE_BYTES, TABLE_OFFSET,
        stripe::{PageId, Stripe},
    },
    error::{Error, Result},
    io::{Storage, is_shortage, transfer_owned},
    memory::AlignedBuf,
};

/// Bytes per read: 8192 records.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

/// Chunks being read, or parsed by threads.
const CHUNKS_IN_FLIGHT: usize = 8;

/// Pages parsed between two yields: 2048 records, less than a millisecond. No caller is served before the store is
/// open.
pub(super) const PAGES_PER_YIELD: usize = 64;

/// Visits the record pages, in the order of the tables within each member.
pub(crate) trait PageVisitor {
    /// A chunk of pages that a thread has parsed.
    type Parsed;

    /// Largest number of unreadable pages before the device is given up. Each costs a failed read.
    const UNREADABLE_MAX: u64;

    /// Announces that the page follows as zeros because it could not be read.
    fn unreadable(&mut self, page: PageId);

    /// Visits a page of records; `Break` ends the pass.
    fn page(&mut self, page: PageId, bytes: &[u8; PAGE_BYTES]) -> ControlFlow<()>;

    /// Visits a chunk that a thread has parsed, in place of its pages.
    async fn parsed(&mut self, chunk: Self::Parsed);
}

/// Consecutive record pages of one member.
struct Chunk {
    file: FileId,
    page: PageId,
    offset: u64,
    bytes: usize,
}

/// Reads all record tables until the visitor breaks. `parse` may have a chunk parsed by a thread while others are read
/// and visited; it gets the first page and the bytes, and returns the bytes.
pub(crate) async fn read_tables<S: Storage, P: PageVisitor>(
    storage: &S,
    members: &[Member],
    stripe: &Stripe,
    parse: impl AsyncFn(PageId, AlignedBuf) -> (Option<P::Parsed>, AlignedBuf),
    pages: &mut P,
) -> Result<()> {
    let chunks = chunks(stripe);
    // A small store takes no more memory than its table; a system that is short of memory gives what it has.
    let first = chunks.iter().take(CHUNKS_IN_FLIGHT);
    let mut buffers: Vec<AlignedBuf> = first.map_while(|chunk| AlignedBuf::try_zeroed(chunk.bytes)).collect();
    if buffers.is_empty() && !chunks.is_empty() {
        let found =
            format!("a record table that is read in parts of {CHUNK_BYTES} bytes, for which the system had no memory");
        return Err(Error::config("disks.blocks", found, "a system with more memory"));
    }
    // Buffers are taken from the end.
    buffers.reverse();
    let mut chunks = chunks.into_iter();
    let mut reads = FuturesOrdered::new();
    let mut unreadable = 0;
    loop {
        while !buffers.is_empty()
            && let Some(chunk) = chunks.next()
        {
            let buffer = buffers.pop().expect("there is one");
            reads.push_back(read_chunk(storage, chunk, buffer, &parse));
        }
        let Some((chunk, result, mut buffer)) = reads.next().await else { break };
        if result.is_err() {
            let path = &members[usize::from(chunk.file.0)].path;
            unreadable += read_pages(storage, &chunk, &mut buffer, pages)
                .await
                .map_err(|error| Error::io("read the record table of", path, error))?;
            if unreadable > P::UNREADABLE_MAX {
                let text = format!("more than {} pages are unreadable; replace the device", P::UNREADABLE_MAX);
                return Err(Error::io("read the record table of", path, io::Error::other(text)));
            }
        }
        match result.ok().flatten() {
            Some(parsed) => pages.parsed(parsed).await,
            None if visit(&chunk, &buffer, pages).await.is_break() => break,
            None => {}
        }
        buffers.push(buffer);
    }
    Ok(())
}

/// All chunks, interleaved over the members so that all devices are busy.
fn chunks(stripe: &Stripe) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    let mut page_first = 0;
    for (member, file) in stripe.members().iter().zip((0..).map(FileId)) {
        for (at, start) in (0..member.table_bytes()).step_by(CHUNK_BYTES).enumerate() {
            let bytes = (member.table_bytes() - start).min(CHUNK_BYTES as u64) as usize;
            let page = PageId(page_first + (start / PAGE_BYTES as u64) as u32);
            chunks.push((at, Chunk { file, page, offset: TABLE_OFFSET + start, bytes }));
        }
        page_first += member.pages;
    }
    chunks.sort_by_key(|(at, _)| *at);
    chunks.into_iter().map(|(_, chunk)| chunk).collect()
}

async fn read_chunk<S: Storage, T>(
    storage: &S,
    chunk: Chunk,
    buffer: AlignedBuf,
    parse: impl AsyncFn(PageId, AlignedBuf) -> (Option<T>, AlignedBuf),
) -> (Chunk, io::Result<Option<T>>, AlignedBuf) {
    // Only the last chunk of a member is shorter; its read gets a buffer of its own length.
    let buffer = if buffer.len() == chunk.bytes { buffer } else { AlignedBuf::zeroed(chunk.bytes) };
    let (result, buffer) = transfer_owned(storage, OpKind::Read, chunk.file, chunk.offset, buffer.into_io()).await;
    if let Err(error) = result {
        return (chunk, Err(error), buffer);
    }
    let (parsed, buffer) = parse(chunk.page, buffer).await;
    (chunk, Ok(parsed), buffer)
}

/// After a failed read of the chunk, reads its pages one by one. Unreadable pages become zeros and are reported to the
/// visitor. Returns their number.
async fn read_pages<S: Storage, P: PageVisitor>(
    storage: &S,
    chunk: &Chunk,
    buffer: &mut AlignedBuf,
    pages: &mut P,
) -> io::Result<u64> {
    let mut unreadable = 0;
    let mut page_buffer = AlignedBuf::zeroed(PAGE_BYTES);
    for (at, page) in buffer.chunks_exact_mut(PAGE_BYTES).enumerate() {
        let offset = chunk.offset + (at * PAGE_BYTES) as u64;
        let result;
        (result, page_buffer) = transfer_owned(storage, OpKind::Read, chunk.file, offset, page_buffer.into_io()).await;
        match result {
            Ok(()) => page.copy_from_slice(&page_buffer),
            // A shortage says nothing about the page.
            Err(error) if unreadable == P::UNREADABLE_MAX || is_shortage(&error) => return Err(error),
            Err(_) => {
                page.fill(0);
                pages.unreadable(PageId(chunk.page.0 + at as u32));
                unreadable += 1;
            }
        }
    }
    Ok(unreadable)
}

async fn visit<P: PageVisitor>(chunk: &Chunk, buffer: &AlignedBuf, pages: &mut P) -> ControlFlow<()> {
    for (at, bytes) in buffer[..chunk.bytes].chunks_exact(PAGE_BYTES).enumerate() {
        let bytes = bytes.first_chunk().expect("chunks of a page");
        pages.page(PageId(chunk.page.0 + at as u32), bytes)?;
        if at % PAGES_PER_YIELD == PAGES_PER_YIELD - 1 {
            crate::io::yield_now().await;
        }
    }
    ControlFlow::Continue(())
}

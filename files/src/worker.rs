//! What the threads of a transfer do: one piece after the other.

use std::{panic::AssertUnwindSafe, sync::atomic::Ordering};

use crate::{
    Error, Memory, Result, SourceFile,
    bounce::Bounce,
    cufile::{self, Routes, Target},
    file::Way,
    memory::Copies,
    plan::Piece,
    shared::Shared,
};

/// One direction of a transfer.
pub(crate) trait Carry: Send + Sync {
    /// Moves a piece; its copies from the lane's buffer may end later.
    fn carry(&self, shared: &Shared, lane: &mut Lane<'_>, piece: &Piece) -> Result<()>;

    /// Ends the transfer, after all pieces.
    fn finish(&self) -> Result<()>;
}

/// What one thread has for itself.
pub(crate) struct Lane<'a> {
    bounce: Bounce,
    /// The pieces whose copies are under way, one for each buffer.
    copied: [Option<&'a Piece>; 2],
    /// Which of the two buffers is next.
    turn: usize,
}

/// Carries pieces until there are none, or the transfer is over: the thread of this number.
pub(crate) fn run(shared: &Shared, number: usize, carry: &dyn Carry) {
    let work = || -> Result<()> {
        let bounce = Bounce::take(shared.buffer_bytes, shared.memory)?;
        let mut lane = Lane { bounce, copied: [None; 2], turn: 0 };
        let mut cursor = shared.queues.cursor(number);
        while !shared.cancelled.load(Ordering::Relaxed) {
            let Some(piece) = shared.queues.take(&mut cursor) else { break };
            lane.end_copies(shared)?;
            carry.carry(shared, &mut lane, piece)?;
            lane.copied[lane.turn] = Some(piece);
            if !lane.copies().are_under_way() {
                lane.end_copies(shared)?;
            }
            lane.turn ^= 1;
        }
        for _ in 0..2 {
            lane.end_copies(shared)?;
            lane.turn ^= 1;
        }
        Ok(())
    };
    let ended = std::panic::catch_unwind(AssertUnwindSafe(work));
    if let Err(error) = ended.unwrap_or_else(|_| Err(Error::Argument("a thread of the transfer panicked".into()))) {
        shared.fail(error);
    }
    shared.end_thread(|| carry.finish());
}

/// Reading.
pub(crate) struct Reads {
    pub(crate) files: Vec<SourceFile>,
    pub(crate) page_cache: bool,
    pub(crate) cufile: Option<Routes>,
}

impl Carry for Reads {
    fn carry(&self, shared: &Shared, lane: &mut Lane<'_>, piece: &Piece) -> Result<()> {
        let file = &self.files[piece.file];
        let way = file.way(piece.start, piece.end, self.page_cache, &shared.cancelled);
        let cufile = self.cufile.as_ref().filter(|_| way == Way::Direct);
        let align = match (way, cufile) {
            (Way::Direct, Some(_)) => file.drive_align().map(|align| align.max(cufile::ALIGN)),
            (Way::Direct, None) => file.direct_align(),
            _ => None,
        };
        let align = align.unwrap_or(1);
        // What is read straight into its place.
        let (start, end) = match piece.parts[..] {
            [part]
                if (shared.memory == Memory::Host || cufile.is_some())
                    && part.address as u64 % align == part.offset % align =>
            {
                (piece.start.next_multiple_of(align), piece.end - piece.end % align)
            }
            _ => (piece.end, piece.end),
        };
        if start >= end {
            return bounced(shared, lane, file, way, align, (piece, piece.start, piece.end));
        }
        let (address, len) = (piece.parts[0].address + (start - piece.start) as usize, (end - start) as usize);
        if let Some(routes) = cufile {
            let target = Target { offset: start, len, address };
            // SAFETY: the caller of the transfer vouches for the range's memory, of which this is a part; no other
            // piece has it. The lane's copies made the device's context current on this thread.
            if unsafe { routes.read(piece.file, file, lane.copies(), target) } {
                shared.counts.read(Way::Cufile, len);
            } else {
                return bounced(shared, lane, file, way, align, (piece, piece.start, piece.end));
            }
        } else {
            // SAFETY: as above; host memory.
            let target = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, len) };
            let took = file.read(way, start, target)?;
            shared.counts.read(took, len);
        }
        for (from, to) in [(piece.start, start), (end, piece.end)] {
            if from < to {
                bounced(shared, lane, file, way, align, (piece, from, to))?;
            }
        }
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        self.files.iter().try_for_each(SourceFile::check_unchanged)
    }
}

/// Reads `from..to` of a piece into the bounce buffer, and copies it to its places.
fn bounced(
    shared: &Shared,
    lane: &mut Lane<'_>,
    file: &SourceFile,
    way: Way,
    align: u64,
    (piece, from, to): (&Piece, u64, u64),
) -> Result<()> {
    let first = from - from % align;
    let (buffer, put) = lane.bounce.idle(lane.turn)?;
    let buffer = &mut buffer[..(to.next_multiple_of(align) - first) as usize];
    let took = file.read(way, first, buffer)?;
    shared.counts.read(took, (to - from) as usize);
    for (begin, end, address) in copies(piece, from, to) {
        let bytes = &buffer[(begin - first) as usize..(end - first) as usize];
        shared.counts.bounced(bytes.len());
        // SAFETY: the caller of the transfer vouches for the range's memory, and the buffer is idle again only when its
        // copies have ended.
        unsafe { put.put(address, bytes) }?;
    }
    put.mark()
}

/// The parts of a piece in `from..to`: where each begins and ends in the file, and its address. Neighbors in the file
/// that are neighbors in memory too are one copy.
fn copies(piece: &Piece, from: u64, to: u64) -> Vec<(u64, u64, usize)> {
    let mut copies: Vec<(u64, u64, usize)> = Vec::new();
    for part in &piece.parts {
        let (begin, end) = (part.offset.max(from), (part.offset + part.len as u64).min(to));
        if begin >= end {
            continue;
        }
        let address = part.address + (begin - part.offset) as usize;
        match copies.last_mut() {
            Some(last) if last.1 == begin && last.2 + (last.1 - last.0) as usize == address => last.1 = end,
            _ => copies.push((begin, end, address)),
        }
    }
    copies
}

impl Lane<'_> {
    /// What copies from the buffer whose turn it is.
    fn copies(&self) -> &Copies {
        self.bounce.copies(self.turn)
    }

    /// Waits for the copies of the buffer whose turn it is; their piece has arrived then.
    fn end_copies(&mut self, shared: &Shared) -> Result<()> {
        self.copies().finish()?;
        self.copied[self.turn].take().into_iter().for_each(|piece| shared.arrived(piece));
        Ok(())
    }

    /// Copies a piece from its places into the bounce buffer. The parts are all of it, in order.
    pub(crate) fn gather(&mut self, piece: &Piece) -> Result<&mut [u8]> {
        let len = (piece.end - piece.start) as usize;
        let (buffer, get) = self.bounce.idle(self.turn)?;
        let buffer = &mut buffer[..len];
        for part in &piece.parts {
            let at = (part.offset - piece.start) as usize;
            // SAFETY: as in `bounced`.
            unsafe { get.get(part.address, &mut buffer[at..at + part.len]) }?;
        }
        get.finish()?;
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Part;

    #[test]
    fn neighbors_in_the_file_and_in_memory_are_one_copy() {
        let part = |offset, len, address| Part { range: 0, offset, len, address };
        // The second follows the first in both; the third in the file only; the fourth in memory only.
        let parts = vec![part(100, 10, 1000), part(110, 20, 1010), part(130, 5, 4000), part(140, 6, 4005)];
        let piece = Piece { file: 0, start: 100, end: 146, parts };
        assert_eq!(copies(&piece, 100, 146), [(100, 130, 1000), (130, 135, 4000), (140, 146, 4005)]);
        assert_eq!(copies(&piece, 105, 132), [(105, 130, 1005), (130, 132, 4000)]);
        assert_eq!(copies(&piece, 135, 140), []);
    }
}

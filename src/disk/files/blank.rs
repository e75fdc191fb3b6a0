//! Looks for data where a new store needs zeros.

use std::{fs::File, io};

use crate::{
    disk::format::{DATA_ALIGN, PAGE_BYTES, TABLE_OFFSET},
    memory::AlignedBuf,
};

/// Offset of data in the first or last MiB of a file. Zeros at the start do not prove that a device is empty: some file
/// systems and volume managers leave the first sectors unused, others keep metadata at the end.
pub(super) fn data_at_ends(file: &File, bytes: u64) -> io::Result<Option<u64>> {
    let ends = [0, bytes.saturating_sub(DATA_ALIGN) / PAGE_BYTES as u64 * PAGE_BYTES as u64];
    let mut buf = AlignedBuf::zeroed(DATA_ALIGN as usize + PAGE_BYTES);
    for start in ends {
        if let Some(at) = data_in(file, &mut buf, start)? {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// Offset of the first record in a table of so many bytes, of a file of so many.
pub(super) fn record(file: &File, table_bytes: u64, bytes: u64) -> io::Result<Option<u64>> {
    let mut buf = AlignedBuf::zeroed(DATA_ALIGN as usize);
    for start in (0..table_bytes.min(bytes)).step_by(buf.len()) {
        let part = &mut buf[..(table_bytes - start).min(DATA_ALIGN) as usize];
        if let Some(at) = data_in(file, part, TABLE_OFFSET + start)? {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// Offset of the first byte that is not zero, from `start` on and as far as the buffer reaches.
fn data_in(file: &File, buf: &mut [u8], start: u64) -> io::Result<Option<u64>> {
    let read = super::read_up_to(file, buf, start)?;
    Ok(buf[..read].iter().position(|&byte| byte != 0).map(|at| start + at as u64))
}

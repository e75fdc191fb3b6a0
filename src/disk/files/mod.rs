//! Opens the files and devices of a store: each is inspected, locked, validated and preallocated, in that order.
//!
//! Existing content changes only once the whole store has been accepted. A file that a failed open created is removed
//! again.

mod blank;
mod lock;
mod path;
mod read_only;
mod sys;
mod unkept;

pub(crate) use lock::is_held;
pub use path::{FILE_NAME, cannot_open};
pub(crate) use path::{cannot_change, check_one_name, check_writable, is_missing};
pub use read_only::{ReadOnlyFile, open_read_only};
pub(crate) use unkept::Unkept;

use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::Arc,
};

use super::{
    format::{
        HEAD_BYTES, PAGE_BYTES, SUPERBLOCK_OFFSETS, is_zero,
        pair::{SuperblockPair, UNREADABLE_COPY},
        stripe::Stripe,
        survey::{Found, OpenPlan, survey_to_write},
    },
    recovery::Member,
};
use crate::{
    block::IO_ALIGN,
    config::{Config, DirectIo},
    error::{Error, Result},
    io::is_shortage,
    memory::AlignedBuf,
    shield::log,
};
use lock::Lock;
use path::Opened;

/// One open file or device of a store, locked against other processes until the last clone of it is dropped.
///
/// Drop it last: I/O on a clone of its `file` that outlives it is not protected by the lock.
#[derive(Debug, Clone)]
pub struct StoreFile {
    /// The store's file, if a directory was configured.
    pub path: PathBuf,
    /// Open for reading and writing.
    pub file: Arc<File>,
    /// Whether `O_DIRECT` is set, and a read with it has succeeded.
    pub direct: bool,
    /// Required alignment of I/O memory: [`IO_ALIGN`] or a smaller power of 2.
    pub memory_align_bytes: usize,
    /// Whether the file holds no store yet.
    pub fresh: bool,
    /// Whether the file is known to read as zeros.
    pub zeroed: bool,
    /// Whether it is a block device.
    pub device: bool,
    /// Size in bytes.
    pub bytes: u64,
    // Dropped last: releases the lock if this is the last clone.
    _lock: Option<Arc<Lock>>,
}

/// Opens the files of the configured disk tier, in the order of `config.disk.paths`. Files that do not
/// exist are created (mode 0600) and preallocated. Blocks, on a lock for up to `disk.lock_wait`.
///
/// # Errors
/// [`Error::Config`] for invalid settings; [`Error::Store`] if a path is not a member of this store and must not become
/// one; [`Error::Io`] if a system call fails. After an error nothing has changed.
pub fn open_files(config: &Config) -> Result<Vec<StoreFile>> {
    let (files, unkept) = open_files_unkept(config)?;
    unkept.keep();
    Ok(files)
}

/// As [`open_files`]; the caller is to keep the files once nothing more can fail.
pub(crate) fn open_files_unkept(config: &Config) -> Result<(Vec<StoreFile>, Unkept)> {
    config.validate()?;
    let stripe = Stripe::new(config);
    let mut opened = Vec::with_capacity(config.disk.paths.len());
    for disk in &config.disk.paths {
        opened.push(Opening::new(lock::open_exclusive(&disk.path, config.disk.lock_wait)?, config.disk.direct_io)?);
    }
    let found: Vec<Found<'_>> = opened.iter().map(Opening::found).collect();
    let fresh = survey_to_write(&found, config)? == OpenPlan::Create;
    for (opening, geometry) in opened.iter().zip(stripe.members()) {
        opening.check_size_limit(geometry.bytes)?;
        if fresh {
            opening.check_no_records(geometry.table_bytes())?;
        }
    }
    let mut files = Vec::with_capacity(opened.len());
    for (opening, geometry) in opened.iter_mut().zip(stripe.members()) {
        files.push(opening.prepare(geometry.bytes, fresh, config.disk.direct_io)?);
    }
    // Before any of them is a store's.
    opened.iter().try_for_each(|opening| opening.opened.flush_name())?;
    Ok((files, Unkept::new(opened.into_iter().map(|opening| opening.opened).collect())))
}

impl StoreFile {
    /// The file, as recovery needs it.
    pub(crate) fn member(&self) -> Member {
        Member { path: self.path.clone(), bytes: self.bytes, device: self.device, zeroed: self.zeroed }
    }
}

/// A random id for a new store.
pub(crate) fn random_uuid() -> Result<[u8; 16]> {
    sys::random_uuid().map_err(|error| Error::io("getrandom for", "a new store's id", error))
}

/// A file on its way to becoming a [`StoreFile`].
struct Opening {
    opened: Opened,
    direct: bool,
    bytes: u64,
    head: AlignedBuf,
}

impl Opening {
    fn new(mut opened: Opened, wanted: DirectIo) -> Result<Self> {
        opened.claim()?;
        let opening = Self::inspect(opened, wanted)?;
        opening.check_blank()?;
        Ok(opening)
    }

    /// Reads what is needed to validate the file. The caller holds the lock, except for a read of a store in use.
    fn inspect(opened: Opened, wanted: DirectIo) -> Result<Self> {
        let bytes = size(&opened)?;
        let mut opening = Opening { opened, direct: false, bytes, head: AlignedBuf::zeroed(HEAD_BYTES) };
        opening.enable_direct(wanted)?;
        opening.read_head(wanted)?;
        Ok(opening)
    }

    fn found(&self) -> Found<'_> {
        Found {
            path: &self.opened.path,
            bytes: self.bytes,
            device: self.opened.device,
            head: self.head.first_chunk().expect("the buffer has the length of a head"),
        }
    }

    fn io(&self, op: &'static str) -> impl FnOnce(io::Error) -> Error {
        let path = self.opened.path.clone();
        move |error| Error::io(op, path, error)
    }

    fn enable_direct(&mut self, wanted: DirectIo) -> Result<()> {
        let system = sys::file_system(&self.opened.file);
        let refused = match sys::set_direct(&self.opened.file, true) {
            Ok(()) if system == sys::NFS => "O_DIRECT does not bypass the caches of the server".to_owned(),
            Ok(()) => {
                self.direct = true;
                return Ok(());
            }
            Err(error) => error.to_string(),
        };
        self.without_direct(wanted, &refused)
    }

    /// Without direct I/O: an error, or the page cache and a warning.
    fn without_direct(&mut self, wanted: DirectIo, reason: &str) -> Result<()> {
        let path = &self.opened.path;
        let system = if self.opened.device { "a block device".into() } else { sys::file_system(&self.opened.file) };
        if wanted == DirectIo::Require {
            return Err(Error::store(
                path.clone(),
                format!("{system}, without direct I/O in units of {PAGE_BYTES} bytes ({reason})"),
                "direct I/O (O_DIRECT)",
                "put the store on a local ext4 or xfs file system or a raw device, or set `direct_io` to prefer",
            ));
        }
        let path = path.display();
        log(|| tracing::warn!(%path, system, reason, "no direct I/O: going through the page cache"));
        self.direct = false;
        sys::set_direct(&self.opened.file, false).map_err(self.io("set the flags of"))
    }

    fn read_head(&mut self, wanted: DirectIo) -> Result<()> {
        let read = read_up_to(&self.opened.file, &mut self.head, 0);
        let read = match read {
            // The kernel accepts the flag even if the device has sectors larger than this read.
            Err(error) if self.direct && error.raw_os_error() == Some(libc::EINVAL) => {
                self.without_direct(wanted, &error.to_string())?;
                read_up_to(&self.opened.file, &mut self.head, 0)
            }
            Err(error) if !is_shortage(&error) => self.read_each_superblock(error),
            read => read,
        };
        let read = read.map_err(self.io("read"))?;
        if (read as u64) < self.bytes.min(HEAD_BYTES as u64) {
            let text = format!("{read} bytes read of {}", self.bytes.min(HEAD_BYTES as u64));
            return Err(self.io("read")(io::Error::new(io::ErrorKind::UnexpectedEof, text)));
        }
        Ok(())
    }

    /// Reads each superblock alone after a read of both has failed: one that the device does not return is as good as
    /// damaged, if the other is sound.
    fn read_each_superblock(&mut self, failed: io::Error) -> io::Result<usize> {
        for (copy, offset) in self.head.chunks_exact_mut(PAGE_BYTES).zip(SUPERBLOCK_OFFSETS) {
            match read_up_to(&self.opened.file, copy, offset) {
                Ok(_) => {}
                Err(error) if is_shortage(&error) => return Err(error),
                Err(_) => copy.copy_from_slice(&UNREADABLE_COPY),
            }
        }
        let pair = SuperblockPair::decode(self.found().head);
        if matches!(pair, SuperblockPair::Valid { .. }) { Ok(HEAD_BYTES) } else { Err(failed) }
    }

    /// Refuses a file with data behind zeros.
    fn check_blank(&self) -> Result<()> {
        if self.bytes == 0 || !is_zero(&self.head) {
            return Ok(());
        }
        let data = blank::data_at_ends(&self.opened.file, self.bytes).map_err(self.io("read"))?;
        data.map_or(Ok(()), |at| {
            Err(Error::store(
                self.opened.path.clone(),
                format!("zeros at its start, but data at byte {at}"),
                "a store, or nothing but zeros",
                "choose another path in `disks`, or zero it (blkdiscard --zeroout) if its data is not needed",
            ))
        })
    }

    /// Refuses a file with records. A creation clears the record table before it writes the first superblock, so
    /// records behind blank superblocks, or behind those of an interrupted creation, belong to a store with damaged
    /// superblocks.
    fn check_no_records(&self, table_bytes: u64) -> Result<()> {
        let record = blank::record(&self.opened.file, table_bytes, self.bytes).map_err(self.io("read"))?;
        record.map_or(Ok(()), |at| {
            Err(Error::store(
                self.opened.path.clone(),
                format!("records of blocks (data at byte {at}), but no valid superblock (damaged or zeroed)"),
                "a sound superblock, or no record at all",
                "check the disk, or remove the store's files (wipe its devices) to start empty",
            ))
        })
    }

    /// Refuses sizes above `RLIMIT_FSIZE`: a write past that limit would end the process with SIGXFSZ.
    fn check_size_limit(&self, wanted: u64) -> Result<()> {
        let limit = sys::file_bytes_max();
        if self.opened.device || wanted <= limit {
            return Ok(());
        }
        Err(Error::store(
            self.opened.path.clone(),
            format!("a limit of {limit} bytes on the files of this process (RLIMIT_FSIZE)"),
            format!("{wanted} bytes, the size of the store"),
            "raise it (ulimit -f unlimited, systemd LimitFSIZE=infinity), or lower `disks.blocks` for this path",
        ))
    }

    /// Prepares an accepted member: size, preallocation, direct I/O.
    fn prepare(&mut self, wanted_bytes: u64, fresh: bool, wanted: DirectIo) -> Result<StoreFile> {
        let is_empty = self.bytes == 0 && !self.opened.device;
        match if self.opened.device { Ok(()) } else { self.preallocate(wanted_bytes) } {
            // What is in the store can be read all the same.
            Err(error) if !fresh => log(|| tracing::warn!(%error, "a store's file may have holes: writes may fail")),
            preallocated => preallocated?,
        }
        if fresh && is_zero(&self.head) {
            self.probe_write(wanted)?;
        }
        Ok(StoreFile {
            path: self.opened.path.clone(),
            file: Arc::clone(&self.opened.file),
            direct: self.direct,
            memory_align_bytes: self.memory_align_bytes(),
            fresh,
            zeroed: is_empty,
            device: self.opened.device,
            bytes: self.bytes,
            _lock: self.opened.lock(),
        })
    }

    /// The memory alignment that the kernel reports, verified with a read. Call after the first page is written: an
    /// unwritten page is read without the device, and so at any alignment.
    fn memory_align_bytes(&self) -> usize {
        if !self.direct {
            return 1;
        }
        let Some(reported) = sys::direct_memory_align_bytes(&self.opened.file) else { return IO_ALIGN };
        if !reported.is_power_of_two() || reported >= IO_ALIGN {
            return IO_ALIGN;
        }
        let mut buf = AlignedBuf::zeroed(2 * PAGE_BYTES);
        match self.opened.file.read_exact_at(&mut buf[reported..][..PAGE_BYTES], 0) {
            Ok(()) => reported,
            Err(error) => {
                let path = self.opened.path.display();
                let what = "direct I/O fails at the alignment that the kernel reports";
                log(|| tracing::warn!(%path, reported, %error, "{what}"));
                IO_ALIGN
            }
        }
    }

    /// Reserves all blocks of a file, also those that a copy has left out as holes: writes find no full file system.
    fn preallocate(&mut self, wanted: u64) -> Result<()> {
        if self.bytes == 0 {
            self.opened.grows();
        }
        let file = &self.opened.file;
        let available = sys::available_bytes(file).map_err(self.io("statvfs"))?;
        if wanted > available {
            return Err(self.no_space(wanted, format!("{available} bytes available")));
        }
        match sys::preallocate(file, wanted) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                return Err(self.no_space(wanted, format!("{available} bytes available, fewer for a single file,")));
            }
            Err(error) if error.raw_os_error() == Some(libc::EDQUOT) => {
                return Err(self.no_space(wanted, format!("a used up quota ({error})")));
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EFBIG)) => {
                return Err(Error::store(
                    self.opened.path.clone(),
                    format!("{} that cannot reserve {wanted} bytes ({error})", sys::file_system(file)),
                    "a file system with fallocate and files of that size",
                    "put the store on ext4 or xfs or a raw device, or lower `disks.blocks`",
                ));
            }
            Err(error) => return Err(self.io("fallocate")(error)),
        }
        self.bytes = self.bytes.max(wanted);
        self.opened.file.sync_all().map_err(self.io("fsync"))
    }

    fn no_space(&self, wanted: u64, found: String) -> Error {
        Error::store(
            self.opened.path.clone(),
            format!("{found} on {}", sys::file_system(&self.opened.file)),
            format!("room for {wanted} bytes"),
            "lower `disks.blocks` for this path, or free space",
        )
    }

    /// Checks that the file can be written and read, by overwriting zeros with zeros.
    fn probe_write(&mut self, wanted: DirectIo) -> Result<()> {
        let probe = |file: &File| {
            let mut buf = AlignedBuf::zeroed(PAGE_BYTES);
            file.write_all_at(&buf, 0)?;
            file.read_exact_at(&mut buf, 0)
        };
        match probe(&self.opened.file) {
            Err(error) if self.direct && error.raw_os_error() == Some(libc::EINVAL) => {
                self.without_direct(wanted, &error.to_string())?;
                probe(&self.opened.file)
            }
            result => result,
        }
        .map_err(|error| cannot_change("write", &self.opened.path, error))
    }
}

fn size(opened: &Opened) -> Result<u64> {
    // The metadata of a device do not contain its size.
    (&*opened.file).seek(SeekFrom::End(0)).map_err(|error| Error::io("find the size of", &opened.path, error))
}

/// Reads at `offset` until the buffer is full or the file ends.
fn read_up_to(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut read = 0;
    while read < buf.len() {
        match file.read_at(&mut buf[read..], offset + read as u64) {
            Ok(0) => break,
            Ok(bytes) => read += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        // A direct read that ends between two sectors has reached the end of the file.
        if !read.is_multiple_of(PAGE_BYTES) {
            break;
        }
    }
    Ok(read)
}

//! What the command writes: reports on standard output, and files that are whole or not there.

use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use tempfile::NamedTempFile;

use crate::{failure::Failure, shown::shown};

/// Writes a report to standard output. A reader that closed its end is no failure.
pub fn emit(text: &str) -> Result<(), Failure> {
    emit_part(text).map(drop)
}

/// Writes a part of a report. False if the reader has closed its end: nobody gets the rest.
pub fn emit_part(text: &str) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::run(format!("standard output: {error}; the report is not complete"))),
    }
}

/// A file that is written under another name and renamed when complete, so that a failed run leaves the old one.
#[derive(Debug)]
pub struct OutputFile {
    flag: &'static str,
    file: NamedTempFile,
    place: PathBuf,
}

impl OutputFile {
    /// Checks before the run that the file, which `flag` names, can be written: that which a link names.
    pub fn create(flag: &'static str, path: &Path) -> Result<Self, Failure> {
        Self::replacing(flag, fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()))
    }

    /// As [`create`](Self::create), of exactly this name: a link is replaced, which others may have put there.
    pub fn replacing(flag: &'static str, place: PathBuf) -> Result<Self, Failure> {
        let shown = shown(&place);
        let refused = |what: String| Failure::usage(format!("{flag} {shown}: {what}; name a file that can be written"));
        if place.symlink_metadata().is_ok_and(|found| found.is_dir()) {
            return Err(refused("found a directory".into()));
        }
        let parent = place.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // The umask has its say, as for any file.
        let file = tempfile::Builder::new()
            .prefix(".kvhoist-")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(parent)
            .map_err(|error| refused(error.to_string()))?;
        Ok(OutputFile { flag, file, place })
    }

    /// Lets every user read the file, whatever the umask.
    pub fn readable_by_all(self) -> Result<Self, Failure> {
        let allowed = self.file.as_file().set_permissions(Permissions::from_mode(0o644));
        allowed.map_err(|error| Failure::run(format!("{} {}: {error}", self.flag, shown(&self.place))))?;
        Ok(self)
    }

    /// Writes the contents and renames the file.
    pub fn write(mut self, bytes: &[u8]) -> Result<File, Failure> {
        let written = self.file.write_all(bytes).and_then(|()| self.file.as_file().sync_all());
        let placed = written.and_then(|()| self.file.persist(&self.place).map_err(|error| error.error));
        placed.map_err(|error| Failure::run(format!("{} {}: {error}", self.flag, shown(&self.place))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_when_it_is_whole_and_not_before() {
        let dir = tempfile::tempdir().expect("a directory");
        let (path, link) = (dir.path().join("plot.svg"), dir.path().join("link.svg"));
        fs::write(&path, "old").expect("written");
        std::os::unix::fs::symlink(&path, &link).expect("linked");
        for name in [&path, &link] {
            drop(OutputFile::create("--plot", name).expect("it can be written"));
            assert_eq!(fs::read_to_string(&path).expect("there"), "old");
        }
        OutputFile::create("--plot", &link).and_then(|file| file.write(b"new")).expect("written");
        assert_eq!(fs::read_to_string(&path).expect("there"), "new");
        assert!(link.is_symlink() && fs::read_dir(dir.path()).expect("a directory").count() == 2);
    }

    #[test]
    fn what_cannot_be_written_is_said_before_the_run() {
        for path in ["/proc/plot.svg", "/nonexistent/plot.svg", "/"] {
            let refused = OutputFile::create("--plot", Path::new(path)).expect_err(path);
            assert_eq!(refused.exit_status(), Failure::USAGE, "{refused}");
        }
    }
}

//! The folders of spaces, one below every path.
//!
//! They are made and removed on other threads, which a file system that hangs keeps. These are the threads that unmap
//! clients' memory ([`helpers`](crate::helpers)), so few of them do this at a time.

use std::path::PathBuf;

use tokio::sync::{Semaphore, SemaphorePermit};

use super::{Spaces, manifest::SpaceManifest};
use crate::{
    config::ServerConfig,
    error::{Error, Result},
    system::{FILE_NAME, Made},
};

/// Spaces whose folders are made or removed at a time.
const TURNS: usize = 16;

/// A permit a space whose folders are made or removed.
pub(super) fn turns() -> Semaphore {
    Semaphore::new(TURNS)
}

/// The folders of a space.
pub(super) fn of(config: &ServerConfig, folder: &str) -> Vec<PathBuf> {
    config.paths.iter().map(|path| path.join(folder)).collect()
}

impl Spaces {
    /// Makes the folders of a space, and its file.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Store`] for a new space that has a file already.
    pub(super) async fn make_folders(&self, manifest: &SpaceManifest, is_new: bool) -> Result<()> {
        let _turn = self.folder_turn().await;
        let (name, folders) = (manifest.folder(), of(&self.config, &manifest.folder()));
        let file = folders.first().map(|folder| folder.join(FILE_NAME)).unwrap_or_default();
        let made = self.system.make_space(folders, manifest.text(), is_new).await?;
        self.entries.borrow_mut().get_mut(&name).expect("entries that are being opened stay").made = Some(made);
        match made {
            Made::Space => Ok(()),
            Made::Others(_) => {
                let (found, expected) = ("the file of a space that was not there at the start", "none for a new space");
                Err(Error::store(file, found, expected, "restart the service, which reads the file"))
            }
        }
    }

    /// Removes the file and the folders of a space that was made and could not be opened; false if they may have a
    /// store, or the file stays.
    pub(super) async fn forget_folders(&self, folder: &str) -> bool {
        let _turn = self.folder_turn().await;
        self.system.forget_space(of(&self.config, folder)).await
    }

    /// Removes the folders of a space with all they hold.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(super) async fn remove_folders(&self, folder: &str) -> Result<()> {
        let _turn = self.folder_turn().await;
        // The first path has the file that makes it a space: last.
        let folders = of(&self.config, folder).into_iter().rev().collect();
        self.system.remove_space(folders).await
    }

    async fn folder_turn(&self) -> SemaphorePermit<'_> {
        self.folder_turns.acquire().await.expect("nobody closes it")
    }
}

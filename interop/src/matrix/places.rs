//! Files and folders that the matrix uses.

use std::path::{Path, PathBuf};

/// An error that ends the program, or all cases of one combination.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Paths of the programs that the matrix starts.
#[derive(Debug)]
pub(crate) struct Places {
    /// The root of the repository.
    pub(crate) root: PathBuf,
    /// The folder with the installed peers.
    pub(crate) stock: PathBuf,
    /// Our test server and client.
    pub(crate) interop: PathBuf,
    /// The command `tonic-rdma`, which has the bridge.
    pub(crate) command: PathBuf,
}

impl Places {
    /// Finds our programs beside this one. `stock` is relative to the root of the repository.
    ///
    /// # Errors
    /// The program does not run in the root of the repository, or one of our programs is not built.
    pub(crate) fn find(stock: &Path) -> Result<Self, Failure> {
        let root = std::env::current_dir()?;
        if !root.join("interop/stock").is_dir() {
            return Err(format!("{} is not the repository's root", root.display()).into());
        }
        let this_program = std::env::current_exe()?;
        let built = |name: &str| {
            let path = this_program.with_file_name(name);
            if path.is_file() {
                Ok(path)
            } else {
                Err(Failure::from(format!("{} is not built", path.display())))
            }
        };
        Ok(Self { stock: root.join(stock), interop: built("interop")?, command: built("tonic-rdma")?, root })
    }
}

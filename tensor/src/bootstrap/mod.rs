//! The bootstrap of the processes of a job, and their watch over one another: the ranks of a group (`tonic-rdma-collective`), or the parts of
//! a split graph (`tonic-rdma-graph`).
//!
//! ```text
//!  join    a member calls another one. Both must speak one version, and have the same in common: a job, or a graph and its partition. A
//!          caller that fits gets a key, which all its later calls carry.
//!          Ranks know the address of rank 0 alone: they join there, and wait until all have come. The answer has all addresses.
//!          Parts know all addresses: each joins each other one.
//!  watch   a call to each other member stays open, as a sign of life. It says whether that member is ready, has failed or has left, and
//!          what else it has to say, of type `D`.
//! ```
//!
//! A member is called by its noun, `rank` or `part`, and its number. The user of this module serves the [`service`], opens the connections,
//! and decides what the end of a watch means. Nothing here waits on a thread of the caller's runtime.

mod calls;
mod members;
pub mod proto;
mod state;

use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinHandle;

pub use self::calls::{Joined, MemberStateStream, endpoint, server, service};
pub use self::members::{JoinError, VERSION};
pub use self::state::{
    Bootstrap, BootstrapCell, Details, Key, MemberInfo, MemberState, WatchEnd, fresh_key, shortened,
};

/// A runtime that belongs to a member of a bootstrap: connections and calls go on whatever the caller's runtime does, and without one.
#[derive(Debug)]
pub struct OwnRuntime {
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
    handle: Handle,
}

impl OwnRuntime {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn new(name: &str, threads: usize) -> io::Result<Self> {
        let threads = threads.max(1);
        let runtime =
            Builder::new_multi_thread().worker_threads(threads).thread_name(name).enable_all().build()?;
        let handle = runtime.handle().clone();
        Ok(Self { runtime: Some(runtime), handle })
    }

    /// Returns the handle.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Carries out `future` on this runtime, and waits for its result on any other one. Ends the future if the caller stops waiting.
    ///
    /// # Errors
    /// The future's, or the task has panicked or was ended, which `ended` describes.
    pub async fn run<T: Send + 'static, E: Send + 'static>(
        &self,
        future: impl Future<Output = Result<T, E>> + Send + 'static,
        ended: impl FnOnce(String) -> E,
    ) -> Result<T, E> {
        struct AbortOnDrop<T>(JoinHandle<T>);
        impl<T> Drop for AbortOnDrop<T> {
            fn drop(&mut self) {
                self.0.abort();
            }
        }
        let mut task = AbortOnDrop(self.handle.spawn(future));
        (&mut task.0).await.map_err(|error| ended(format!("a task of the bootstrap has ended: {error}")))?
    }

    /// Ends the runtime, and waits for its tasks, at most for `limit`. Must not be called on a runtime's thread.
    pub fn end_within(mut self, limit: Duration) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(limit);
        }
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        // The ordinary drop waits for the threads, which is not allowed on a runtime's thread.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

//! The bootstrap of a job: its processes find one another, and then watch one another. They are the ranks of
//! a group (`tonic-rdma-collective`), or the parts of a split graph (`tonic-rdma-graph`).
//!
//! ```text
//!  join    A member calls another one. If both have the same version and describe the same job, the
//!          caller gets a key, which all its later calls carry.
//!          Ranks know only the address of rank 0: they join there, and wait until all have joined.
//!          The answer has all addresses. Parts know all addresses: each joins each other one.
//!  watch   A call to each other member stays open, as a sign of life. Its stream reports whether that
//!          member is ready, has failed or has left, and its details, of type `D`.
//! ```
//!
//! `calls` has the service and the calls, `members` decides who may join, and `state` is what both share.
//! Messages name a member by its noun, `rank` or `part`, and its number. The user of this module serves the
//! [`service`], opens the connections, and decides what the end of a watch means. Nothing here blocks a
//! thread of the caller's runtime.

mod calls;
mod members;
pub mod proto;
mod state;

use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinHandle;

pub use self::calls::{BootstrapService, Joined, MemberStateStream, endpoint, server, service};
pub use self::members::{JoinError, VERSION};
pub use self::state::{
    Bootstrap, BootstrapCell, Details, Key, MemberInfo, MemberState, WatchEnd, fresh_key, shortened,
};

/// A runtime of a member's own, because its connections and calls must not depend on the caller's runtime.
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

    /// Returns the handle, for tasks of this member.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Carries out `future` on this runtime, and waits for its result on any other one. Ends the future if
    /// the caller stops waiting.
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

    /// Ends the runtime, and waits for its tasks for at most `limit`. Must not be called on a thread of a
    /// runtime, because it blocks.
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

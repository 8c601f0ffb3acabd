//! The runtime of a group, with a thread of its own.

use std::future::Future;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinHandle;

use crate::error::CollectiveError;
use crate::group::launch::setup;

/// A runtime that belongs to the group: connections and calls go on whatever the caller's runtime does, and without one.
#[derive(Debug)]
pub(crate) struct OwnRuntime {
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
    handle: Handle,
}

impl OwnRuntime {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system gives no thread.
    pub(crate) fn new() -> Result<Self, CollectiveError> {
        let runtime =
            Builder::new_multi_thread().worker_threads(1).thread_name("rdma-collective").enable_all().build();
        let runtime =
            runtime.map_err(|error| setup(format!("can't start the thread of a group: {error}")))?;
        let handle = runtime.handle().clone();
        Ok(Self { runtime: Some(runtime), handle })
    }

    /// Returns the handle.
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Carries out `future` on this runtime, and waits for its result on any other one.
    ///
    /// # Errors
    /// The future's, or the task has panicked or was ended.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        future: impl Future<Output = Result<T, CollectiveError>> + Send + 'static,
    ) -> Result<T, CollectiveError> {
        let task = AbortOnDrop(self.handle.spawn(future));
        task.result().await
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

/// Ends the task if the caller stops waiting.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> AbortOnDrop<Result<T, CollectiveError>> {
    async fn result(mut self) -> Result<T, CollectiveError> {
        (&mut self.0).await.map_err(|error| setup(format!("a task of the group ended: {error}")))?
    }
}

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

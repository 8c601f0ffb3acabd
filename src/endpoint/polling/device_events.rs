//! Events of a device that belong to no request: port down, queue pair failed, device removed.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::queue::Queue;
use tonic_rdma_verbs::{Context, VerbsError};

/// Starts a task that takes the device's events and ends the connections of `queues` that an event concerns. Returns `None`
/// for a device without events.
#[allow(deprecated, reason = "sound for a descriptor that is owned; its successor is unsafe to call")]
pub(super) fn watch(
    context: &Arc<dyn Context>,
    queues: &[Arc<Queue>],
    runtime: &Handle,
) -> Result<Option<AbortHandle>, VerbsError> {
    let Some(descriptor) = context.async_event_fd() else { return Ok(None) };
    let failed = |error| VerbsError::os("watching a device for events", error);
    let descriptor = descriptor.try_clone_to_owned().map_err(failed)?;
    let descriptor = AsyncFd::with_interest(descriptor, Interest::READABLE).map_err(failed)?;
    let queues = queues.iter().map(Arc::downgrade).collect();
    let task = runtime.spawn(run(descriptor, Arc::clone(context), queues));
    Ok(Some(task.abort_handle()))
}

/// Longest time between two looks at the device, because some devices fail without an event.
const LOOK_EVERY: Duration = Duration::from_secs(1);

async fn run(descriptor: AsyncFd<OwnedFd>, context: Arc<dyn Context>, queues: Vec<Weak<Queue>>) {
    loop {
        match timeout(LOOK_EVERY, descriptor.readable()).await {
            // The flag is cleared before the events are taken, so that an event that comes meanwhile is not missed.
            Ok(Ok(mut ready)) => ready.clear_ready(),
            Ok(Err(_)) => return,
            Err(_) => {}
        }
        context.handle_events();
        queues.iter().filter_map(Weak::upgrade).for_each(|queue| queue.fail_with_device());
    }
}

//! Idle polling: a tokio runtime that polls completion queues when it would otherwise go to sleep.

use std::sync::Arc;

use tokio::runtime::Builder;

use super::reactor::IdleHook;

/// Makes the runtime under construction poll the completion queues of its connections when it has nothing else to do. This
/// gives the lowest latency, since no other thread and no wake-up stands between a completion and the task.
///
/// It sets the builder's [`on_thread_park`](Builder::on_thread_park), and so replaces a callback of your own there. It is made
/// for current-thread runtimes; a multi-thread runtime polls from a task instead, with this or without. Other ways of
/// polling than [`PollMode::Adaptive`](super::PollMode::Adaptive) are not affected.
///
/// ```
/// let runtime = tonic_rdma::runtime::idle_polling(&mut tokio::runtime::Builder::new_current_thread())
///     .enable_all()
///     .build()?;
/// # drop(runtime);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn idle_polling(builder: &mut Builder) -> &mut Builder {
    let hook = Arc::new(IdleHook::default());
    builder.on_thread_park(move || hook.park())
}

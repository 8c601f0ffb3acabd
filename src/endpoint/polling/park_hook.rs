//! The hook of a tokio runtime that polls completion queues when a thread is about to park (idle polling).

use std::sync::{Arc, Mutex, Weak};

use tokio::runtime::{Builder, Handle, Id};

use super::reactor::{REACTORS, Reactor};

/// Makes the runtime under construction poll the completion queues of its connections when it has nothing else to do. This
/// gives the lowest latency, because no other thread and no wake-up is between a completion and the task.
///
/// This function sets the builder's [`on_thread_park`](Builder::on_thread_park), and so replaces a callback of your own there.
/// It is made for current-thread runtimes; a multi-thread runtime polls from a task, with or without this function. It changes
/// only [`PollMode::Adaptive`](crate::PollMode::Adaptive).
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

/// Polls the reactors of one runtime when a thread of the runtime is about to park.
#[derive(Debug, Default)]
struct IdleHook {
    known: Mutex<KnownReactors>,
}

/// A copy of the registry's entries for one runtime.
#[derive(Debug, Default)]
struct KnownReactors {
    runtime: Option<Id>,
    generation: usize,
    reactors: Vec<Weak<Reactor>>,
}

impl IdleHook {
    fn park(&self) {
        // If another worker has the lock, that worker polls.
        let Ok(mut known) = self.known.try_lock() else { return };
        known.refresh();
        for reactor in known.reactors.iter().filter_map(Weak::upgrade) {
            reactor.idle();
        }
    }
}

impl KnownReactors {
    fn refresh(&mut self) {
        if self.runtime.is_some() && self.generation == REACTORS.generation() {
            return;
        }
        let Ok(handle) = Handle::try_current() else { return };
        self.runtime = Some(handle.id());
        (self.generation, self.reactors) = REACTORS.of_runtime(handle.id());
    }
}

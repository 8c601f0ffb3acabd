//! Polling: completion queues, and the threads and tasks that poll them.
//!
//! This module has the completion queues of each runtime (`Reactor`, `Queue`), and decides how long to spin before a sleep
//! (`Pace`). It does not look into messages: completions go to the `Participant` that posted the request.

mod callers;
mod pace;
mod queue;
mod reactor;
mod threads;

pub(crate) use callers::CallUnderWay;
pub use callers::OwnPolling;
pub use pace::{Observation, Pace};
pub use queue::Participant;
pub use queue::{Polled, Queue, QueueFull};
pub use queue::{UnannouncedArrival, Watched};
pub use reactor::idle_polling;
pub use reactor::{Reactor, may_spin};
pub(crate) use threads::Accepting;
pub(crate) use threads::this_thread;

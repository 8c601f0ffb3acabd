//! Polling: completion queues, and the threads and tasks that poll them.
//!
//! This module has the completion queues of each runtime (`Reactor`, `Queue`), and decides how long to spin before a sleep
//! (`Pace`). It does not look into messages: completions go to the `Participant` that posted the request.

mod accepting;
mod busy;
mod callers;
mod device_events;
mod late_arrivals;
mod pace;
mod park_hook;
mod participant;
mod poll_task;
mod queue;
mod reactor;
mod registry;
mod short_waits;
mod spin;
mod this_thread;
mod watched;

pub(crate) use accepting::Accepting;
pub(crate) use callers::CallUnderWay;
pub use callers::OwnPolling;
pub use pace::{Observation, Pace};
pub use park_hook::idle_polling;
pub use participant::Participant;
pub use queue::{Polled, Queue, QueueFull};
pub use reactor::{Reactor, may_spin};
pub(crate) use this_thread::this_thread;
pub use watched::{UnannouncedArrival, Watched};

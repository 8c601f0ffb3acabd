//! Polling: completion queues, and the threads and tasks that poll them.
//!
//! This module has the completion queues of each runtime (`Reactor`, `Queue`), and decides how long to spin
//! before a sleep (`Pace`). It does not read messages: completions go to the `Participant` that posted the
//! request.

mod callers;
mod own;
mod pace;
mod pollers;
mod processors;
mod queue;
mod reactor;
pub mod waits;

pub(crate) use callers::CallInFlight;
pub use callers::OwnPolling;
pub(crate) use own::{OwnQueue, Wait};
pub use pace::{Observation, Pace};
pub(crate) use pollers::{Accepting, this_thread};
pub use processors::Processors;
pub use queue::{Participant, Polled, Queue, QueueFull, UnannouncedArrival, Watched};
pub use reactor::{Reactor, idle_polling, may_spin};

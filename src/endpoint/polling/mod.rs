//! Polling: completion queues, and the threads and tasks that poll them.
//!
//! Owns the completion queues of each runtime (`Reactor`, `Queue`) and the decision how long to spin (`Pace`). Never looks
//! into a message: completions go to the `Participant` that posted the request.

mod busy;
mod events;
mod idle;
mod late;
mod pace;
mod participant;
mod poll_task;
mod queue;
mod reactor;
mod registry;
mod watched;

pub use idle::idle_polling;
pub use pace::{Observation, Pace};
pub use participant::Participant;
pub use queue::{Polled, Queue, QueueFull};
pub use reactor::{Reactor, may_spin};
pub use watched::{UnannouncedArrival, Watched};

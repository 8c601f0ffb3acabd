//! The machinery, for the other crates of this repository, their tests and their benches.
//!
//! Nothing here is a promise: any release may change or remove it. Programs use what the root of the crate exports.

pub use crate::endpoint::{
    Observation, OpenError, Pace, Participant, Polled, Provider, Queue, QueueFull, Reactor,
    UnannouncedArrival, Watched, WorkId, WorkKind, may_spin,
};

pub use crate::endpoint::tuner;

/// The protocol's state machine, without IO.
pub mod protocol {
    pub use crate::protocol::*;
}

/// The formats of headers and of the hello.
pub mod wire {
    pub use crate::wire::*;
}

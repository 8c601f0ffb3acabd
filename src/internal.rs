//! The machinery, for the other packages of this repository, their tests and their benches.
//!
//! Any release may change or remove these names. Programs use the names at the root of the crate.

pub use crate::endpoint::{
    Aftermath, Devices, Lost, Observation, OpenError, OwnPolling, Pace, Participant, Place, Places, Polled,
    Provider, Queue, QueueFull, Reactor, Run, Source, TooManyWait, UnannouncedArrival, Watched, WorkId,
    WorkKind, connect_tcp, known_variables, may_spin, tuner, warn_of_unknown_variables,
};

pub use crate::transport::request::grpc_timeout;

pub use tonic_rdma_verbs::unstable::{chain, lock, units, wake_all, with_causes};

/// The protocol's state machine, without IO.
pub mod protocol {
    pub use crate::protocol::*;
}

/// The formats of headers and of the hello.
pub mod wire {
    pub use crate::wire::*;
}

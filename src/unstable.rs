//! What the other packages of tonic-rdma need and applications do not. It changes only with a new minor
//! version (0.1 to 0.2), never with a patch, so `version = "0.1"` is enough.

pub use crate::endpoint::{
    ClientSlot, ClientSlots, Deferred, Devices, Observation, OwnPolling, Pace, Participant, Polled,
    Processors, Queue, QueueFull, Reactor, Run, SentHeaders, SlotLost, Source, TooManyWaiters,
    UnannouncedArrival, Watched, WorkId, WorkKind, connect_tcp, known_variables, may_spin, open_device,
    waits, warn_of_unknown_variables,
};

pub use crate::grpc::status_of_http;
pub use crate::grpc::times::CODES;
pub use crate::transport::gather::body::gathered_bytes;
pub use crate::transport::gather::landed::landed_length;
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

/// The measurement of devices, by which [`EagerThreshold::Auto`](crate::EagerThreshold::Auto) decides.
pub mod tuner {
    pub use crate::endpoint::calibrate;
    pub use crate::endpoint::tuner::{Calibration, Point, Times};
}

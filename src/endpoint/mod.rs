//! The endpoint: connections between two processes, over RDMA where both sides have it, and over TCP
//! elsewhere.
//!
//! This layer has the negotiation on one TCP port, the byte stream over a queue pair, and the polling of
//! completion queues. It does not use tonic, and of HTTP/2 it knows the first bytes only; the layer above
//! knows tonic.
//!
//! ```text
//!  Dialer ── TCP ──▶ Listener        first bytes: HTTP/2 or TLS → a stock client, served over that TCP connection
//!     │  ClientHello  │                            our magic    → negotiation
//!     │──────────────▶│  asks the client's device for an answer, opens a queue pair, connects it to the client's
//!     │  ServerHello  │
//!     │◀──────────────│  accept, or decline with the reason (then both go on over TCP)
//!     │  Confirm      │
//!     │──────────────▶│  "I read this nonce in your memory"
//!     │  Confirm      │
//!     │◀──────────────│  "and I this one in yours": RDMA from here on; TCP stays open as a sign of life
//! ```
//!
//! A connection is one `Connection` under one lock. A `Reactor` polls the connection's `Queue`, which hands
//! completions to the connection. A `Supervisor` watches the TCP connection and the timers.
#![forbid(unsafe_code)]

mod config;
mod connection;
mod deferred;
mod error;
mod held;
mod histogram;
mod info;
mod journal;
mod link;
mod meeting;
mod messages;
mod meters;
mod negotiate;
mod polling;
mod provider;
mod reason;
mod stream;
pub(crate) mod tuner;

pub use config::{
    Config, EagerThreshold, Policy, PollMode, Provider, SharedReceive, StockClients, known_variables,
    warn_of_unknown_variables,
};
pub(crate) use deferred::OwnedTask;
pub(crate) use deferred::task_is_ready;
pub use deferred::{Deferred, Run, SentHeaders};
pub(crate) use error::{ConnectionFault, not_in_time};
#[cfg(test)]
pub(crate) use held::HeldBudget;
pub(crate) use held::HeldShare;
pub(crate) use histogram::{BYTES, Histogram, Histograms, SECONDS, histogram};
pub(crate) use info::Role;
pub use info::{CounterSnapshot, RdmaConnectInfo, Verdict};
pub use link::{WorkId, WorkKind};
pub(crate) use messages::{
    Kept, LandedContent, MessageEndpoint, MessageHandler, MessageSettings, Negotiated, ReadRefused,
    ReadSegment, Sender, Wire,
};
pub use meters::describe_metrics;
pub use negotiate::{
    ClientSlot, ClientSlots, Devices, Dialer, Listener, SlotLost, Source, TooManyWaiters, calibrate,
    connect_tcp,
};
pub(crate) use polling::{Accepting, CallInFlight, this_thread};
pub use polling::{
    Observation, OwnPolling, Pace, Participant, Polled, Processors, Queue, QueueFull, Reactor,
    UnannouncedArrival, Watched, idle_polling, may_spin, waits,
};
pub use provider::open_device;
#[cfg(test)]
pub(crate) use reason::RdmaUnavailable;
pub use reason::ReasonCode;
pub use stream::EndpointStream;

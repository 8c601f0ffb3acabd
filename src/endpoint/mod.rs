//! The endpoint: connections between two processes, over RDMA where both can and over TCP where not.
//!
//! Owns negotiation on one TCP port, the byte stream over a queue pair, and the polling of completion queues. Never
//! knows HTTP/2 or tonic; the floor above does.
//!
//! ```text
//!  Dialer ── TCP ──▶ Listener        first bytes: HTTP/2 or TLS → a stock client, served over that TCP connection
//!     │  ClientHello  │                            our magic    → negotiation
//!     │──────────────▶│  opens a queue pair, connects it to the client's
//!     │  ServerHello  │
//!     │◀──────────────│  accept, or decline with the reason (then both go on over TCP)
//!     │  Confirm      │
//!     │──────────────▶│  "I read this nonce in your memory"
//!     │  Confirm      │
//!     │◀──────────────│  "and I this one in yours": RDMA from here on; TCP stays open as a sign of life
//! ```
//!
//! A connection is one `Connection` under one lock. Completions come to it from its `Queue`, which a `Reactor` polls; a
//! `Supervisor` watches its TCP connection and its timers.
#![forbid(unsafe_code)]

mod budget;
mod config;
mod connection;
mod counters;
mod error;
mod fault;
mod info;
mod journal;
mod link;
mod lock;
mod negotiate;
mod polling;
mod provider;
mod stream;
pub mod tuner;

pub use config::{
    Config, ConfigError, EagerThreshold, Policy, PollMode, ProviderChoice, SharedReceive, StockClients,
    TuneCache,
};
pub use counters::CounterSnapshot;
pub use error::{ConnectError, NegotiationError, RdmaUnavailable};
pub use fault::ConnectionFault;
pub use info::{RdmaConnectInfo, Verdict};
pub use link::work_id::{WorkId, WorkKind};
pub use negotiate::{Dialer, Listener};
pub use polling::{
    Observation, Pace, Participant, Polled, Queue, QueueFull, Reactor, UnannouncedArrival, Watched,
    idle_polling, may_spin,
};
pub use provider::{NoDevice, OpenError, Provider};
pub use stream::EndpointStream;

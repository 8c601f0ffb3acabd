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

mod busy;
mod config;
mod connection;
mod counters;
mod device;
mod dial;
mod error;
mod events;
mod fault;
mod identity;
mod idle;
mod info;
mod isolation;
mod journal;
mod link;
mod listen;
mod member;
mod negotiate;
mod pace;
mod poll_task;
mod queue;
mod reactor;
mod read;
mod receive;
mod session;
mod shared_receive;
mod source;
mod stream;
mod supervisor;
pub mod tuner;
mod variables;
mod work_id;
mod write;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use device::Provider;
pub use pace::{Pace, Seen};
pub use queue::{Participant, Queue, Untold, Watched};
pub use reactor::{Reactor, may_spin};
pub use work_id::{Kind, WorkId};

pub use config::{Config, EagerThreshold, Policy, PollMode, ProviderChoice, SharedReceive, StockClients};
pub use counters::CounterSnapshot;
pub use dial::Dialer;
pub use error::{ConnectError, NegotiationError};
pub use fault::ConnectionFault;
pub use idle::idle_polling;
pub use info::{RdmaConnectInfo, Verdict};
pub use listen::Listener;
pub use stream::EndpointStream;
pub use variables::ConfigError;

/// Locks. State behind our locks is consistent whenever one is released, so a panic elsewhere poisons nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

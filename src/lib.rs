//! A gRPC-compatible RDMA transport for tonic.

pub mod endpoint;
pub mod memory;
pub mod protocol;
pub mod transport;
pub mod verbs;
pub mod wire;

pub use endpoint::{
    Config, ConfigError, ConnectError, CounterSnapshot, EagerThreshold, Policy, PollMode, ProviderChoice, Verdict,
};
pub use transport::{RdmaConnectInfo, RdmaConnector, RdmaIncoming};

/// Help for building tokio runtimes.
pub mod runtime {
    pub use crate::endpoint::idle_polling;
}

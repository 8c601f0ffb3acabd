//! A gRPC-compatible RDMA transport for tonic.
//!
//! Two lines of a tonic service change, the listener's and the connector's; its calls then go over RDMA where both ends
//! can, and over TCP where not, on the same port. Stock gRPC clients and servers notice nothing.
//!
//! ```no_run
//! use tonic::transport::{Endpoint, Server};
//! use tonic_rdma::{RdmaConnector, RdmaIncoming};
//!
//! # async fn example(service: tonic::service::Routes) -> Result<(), Box<dyn std::error::Error>> {
//! let incoming = RdmaIncoming::bind("0.0.0.0:50051").await?;
//! let server = Server::builder().add_routes(service).serve_with_incoming(incoming);
//!
//! let channel = Endpoint::from_static("http://ps0:50051").connect_with_connector(RdmaConnector::new()).await?;
//! # drop((server, channel));
//! # Ok(())
//! # }
//! ```
//!
//! Floors, from below: [`wire`] (formats), [`protocol`] (a sans-IO state machine) and [`verbs`] (RDMA devices; the
//! software one, [`verbs::soft`], is always there), [`memory`] (registered memory), [`endpoint`] (negotiation and byte
//! streams), [`transport`] (the fit with tonic), [`tensor`] (tensors without RPC). Imports go down only.
//!
//! What happens is told by `tracing` events, by counters on every [`RdmaConnectInfo`], and through the `metrics` facade
//! under names that begin with `tonic_rdma_`.

pub mod endpoint;
pub mod memory;
pub mod protocol;
#[doc(hidden)]
pub mod telemetry;
pub mod tensor;
pub mod transport;
pub mod verbs;
pub mod wire;

pub use endpoint::{
    Config, ConfigError, ConnectError, CounterSnapshot, EagerThreshold, Policy, PollMode, ProviderChoice,
    SharedReceive, StockClients, Verdict,
};
pub use transport::balance::{BalancedChannel, balance_channel, balance_list};
pub use transport::{RdmaConnectInfo, RdmaConnector, RdmaIncoming, RdmaRequestExt, gather};

/// Help for building tokio runtimes.
pub mod runtime {
    pub use crate::endpoint::idle_polling;
}

//! One channel over several endpoints, as tonic's `Channel::balance_list` is over TCP.
//!
//! This module chooses the endpoint for each call, and dials endpoints that are down. It sends a call once only: the caller gets the
//! answer, or the error, of the endpoint that the call went to.
//!
//! ```text
//!              ┌── dialled, first bytes ───▶ up ──┐
//!  connecting ─┤                                  │ the connection ended
//!      ▲       └── no connection ──▶ down ◀───────┤ sooner than the back-off allows the next dial
//!      │                              │           │
//!      └─────────── later ────────────┼───────────┘
//!                                     └── dialled again by back-off ──▶ up
//! ```
//!
//! Each endpoint has a task (`keep.rs`). The task dials the endpoint, waits for the server's first bytes, and puts the connection into
//! the table (`table.rs`). When the connection ends or takes no further calls (GOAWAY), the task takes it out of the table. A call picks
//! two connections of the table at random, and takes the connection with fewer calls in flight. No queue and no other task is between a
//! call and its connection.
//!
//! A call waits while the first dial to an endpoint is under way, after the endpoint was added or after its connection ended. Otherwise
//! the call fails at once with UNAVAILABLE and the reason of the last failure. The wait ends with the dial, which has its own limits.
//! As on tonic's own channel, the wait is not a part of a call's deadline.
//!
//! The table and the tasks are those of [`RdmaChannel`](crate::RdmaChannel) as well, whose connections are of another type. A channel to
//! one endpoint has a table that dials on demand: when a call needs the endpoint.

mod backoff;
mod channel;
pub(crate) mod connection;
pub(crate) mod error;
pub(crate) mod keep;
pub(crate) mod table;

use std::hash::Hash;

use tokio::sync::mpsc;
use tonic::transport::Endpoint;
use tonic::transport::channel::Change;

use super::RdmaConnector;

pub use channel::BalancedChannel;
pub use error::BalanceError;
pub use table::{EndpointState, EndpointStatus};

/// Makes a channel that spreads its calls over `endpoints`. `connector` connects each of them, over RDMA where both ends have it and
/// over TCP elsewhere.
///
/// An endpoint that is down gets no calls, is dialled again by back-off (at first after 100 ms, at last every 10 s), and
/// gets calls again as soon as it is up. If no endpoint is up, calls fail with UNAVAILABLE and the reason of the last
/// failure. As on tonic's own channel, a call that is in flight when its connection ends fails; it is not sent again.
///
/// ```no_run
/// # async fn example() {
/// use tonic::transport::Endpoint;
/// use tonic_rdma::{RdmaConnector, balance_list};
/// use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
///
/// let endpoints = ["http://ps0:50051", "http://ps1:50051"].map(Endpoint::from_static);
/// let channel = balance_list(endpoints, RdmaConnector::new());
/// let client = GreeterClient::new(channel); // as with any other channel
/// # drop(client);
/// # }
/// ```
///
/// # Panics
/// Outside a tokio runtime, as tonic's function does.
pub fn balance_list(
    endpoints: impl IntoIterator<Item = Endpoint>,
    connector: RdmaConnector,
) -> BalancedChannel {
    let endpoints: Vec<_> = endpoints.into_iter().collect();
    let (channel, changes) = balance_channel(endpoints.len().max(1), connector);
    for (key, endpoint) in endpoints.into_iter().enumerate() {
        // There is room for all.
        let _ = changes.try_send(Change::Insert(key, endpoint));
    }
    channel
}

/// Makes a channel as [`balance_list`] does, with endpoints that come and go. A change that was sent to the `Sender` holds for all
/// later calls.
///
/// An endpoint inserted under a key that is taken replaces the endpoint of that key. A removed endpoint gets no further calls; its calls
/// in flight go on. `capacity` is the number of changes that may wait in the `Sender`. Dropping the `Sender` changes nothing.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use tonic::transport::Endpoint;
/// use tonic::transport::channel::Change;
/// use tonic_rdma::{RdmaConnector, balance_channel};
/// use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
///
/// let (channel, changes) = balance_channel(16, RdmaConnector::new());
/// let client = GreeterClient::new(channel);
/// changes.send(Change::Insert("ps0", Endpoint::from_static("http://ps0:50051"))).await?;
/// changes.send(Change::Remove("ps0")).await?;
/// # drop(client);
/// # Ok(())
/// # }
/// ```
///
/// # Panics
/// Outside a tokio runtime, and with a `capacity` of 0, as tonic's function does.
pub fn balance_channel<K>(
    capacity: usize,
    connector: RdmaConnector,
) -> (BalancedChannel, mpsc::Sender<Change<K, Endpoint>>)
where
    K: Hash + Eq + Send + 'static,
{
    let (sender, changes) = mpsc::channel(capacity);
    (BalancedChannel::new(changes, connector), sender)
}

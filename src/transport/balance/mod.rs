//! One channel over several endpoints: what tonic's `Channel::balance_list` is over TCP.
//!
//! Owns which endpoint a call goes to, and when an endpoint that is down is dialled again. Never sends a call twice: the
//! caller gets the answer, or the error, of the one endpoint that the call went to.
//!
//! ```text
//!              ┌── dialled, and heard of ──▶ up ──┐
//!  connecting ─┤                                  │ the connection ended
//!      ▲       └── no connection ──▶ down ◀───────┤ sooner than the back-off allows the next dial
//!      │                              │           │
//!      └─────────── later ────────────┼───────────┘
//!                                     └── dialled again by back-off ──▶ up
//! ```
//!
//! Each endpoint has a task, which dials it, waits for the server's first bytes, offers the connection to callers, and
//! withdraws it as soon as it ends or is not to be used for further calls (the server said so: GOAWAY). Calls pick two
//! of the connections offered and take the one with fewer calls in flight. No queue and no other task is between a
//! call and its connection.
//!
//! A call waits while there is an endpoint that may come up presently: one that was not dialled to the end yet since it was
//! added, or since its connection ended. Otherwise it fails at once with UNAVAILABLE and the reason of the last failure.
//! That wait ends with the dial, which has limits of its own, and is not a part of a call's deadline: nor is it on tonic's
//! own channel.

mod backoff;
mod body;
mod channel;
mod line;
mod link;
mod members;
mod table;

use std::hash::Hash;
use std::sync::Arc;

use tokio::sync::mpsc;
use tonic::transport::Endpoint;
use tonic::transport::channel::Change;

use super::RdmaConnector;

pub use channel::{BalanceError, BalancedChannel};
pub use table::{EndpointState, EndpointStatus};

use members::Members;
use table::Shared;

/// Makes a channel that spreads its calls over `endpoints`. `connector` connects each of them: over RDMA where it can, over
/// TCP where not.
///
/// An endpoint that is down gets no calls, is dialled again by back-off (at first after 100 ms, at last every 10 s), and
/// gets calls again as soon as it is up. Without any that is up, calls fail with UNAVAILABLE and the reason of the last
/// failure. A call that was in flight on a connection that ended fails as it does on tonic's own channel; it is not sent
/// again.
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
/// Outside a tokio runtime, as tonic's does.
pub fn balance_list(
    endpoints: impl IntoIterator<Item = Endpoint>,
    connector: RdmaConnector,
) -> BalancedChannel {
    let (_, changes) = mpsc::channel(1);
    let shared = Arc::new(Shared::default());
    let members = Members::new(changes, connector, Arc::clone(&shared));
    for (key, endpoint) in endpoints.into_iter().enumerate() {
        members.insert(key, endpoint);
    }
    BalancedChannel::new(shared, Arc::new(members))
}

/// Makes a channel as [`balance_list`] does, with endpoints that come and go. A change that was sent to the `Sender` is in
/// force for all calls made after.
///
/// An endpoint inserted under a key that is taken replaces the other. One that is removed gets no further calls; those in
/// flight end as they would have. `capacity` is that of the `Sender`: how many changes may wait to be applied. Dropping the
/// `Sender` changes nothing.
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
/// Outside a tokio runtime, and with a `capacity` of 0, as tonic's does.
pub fn balance_channel<K>(
    capacity: usize,
    connector: RdmaConnector,
) -> (BalancedChannel, mpsc::Sender<Change<K, Endpoint>>)
where
    K: Hash + Eq + Send + 'static,
{
    let (sender, changes) = mpsc::channel(capacity);
    let shared = Arc::new(Shared::default());
    let members = Members::new(changes, connector, Arc::clone(&shared));
    (BalancedChannel::new(shared, Arc::new(members)), sender)
}

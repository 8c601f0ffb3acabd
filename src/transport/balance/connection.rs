//! A connection to one endpoint, and the count of the calls on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};

use super::error::DialError;
use super::watch::{ConnectionWatch, WatchedConnector};
use crate::endpoint::RdmaConnectInfo;
use crate::transport::RdmaConnector;

/// A connection to one endpoint.
#[derive(Debug)]
pub(super) struct EndpointConnection {
    channel: Channel,
    watch: Arc<ConnectionWatch>,
    info: RdmaConnectInfo,
    in_flight: AtomicUsize,
}

impl EndpointConnection {
    /// The time that a server has to send its first bytes of HTTP/2.
    const SILENCE: Duration = Duration::from_secs(10);

    /// Connects, and waits for the first bytes from the server.
    pub(super) async fn connect(endpoint: &Endpoint, connector: &RdmaConnector) -> Result<Self, DialError> {
        let watch = Arc::new(ConnectionWatch::default());
        let connector = WatchedConnector::new(connector.clone(), Arc::clone(&watch));
        let channel = endpoint.connect_with_connector(connector).await?;
        if timeout(Self::SILENCE, watch.first_bytes()).await.is_err() {
            return Err(DialError::Silent(Self::SILENCE));
        }
        match watch.info() {
            Some(info) if !watch.is_ended() => {
                Ok(Self { channel, watch, info, in_flight: AtomicUsize::new(0) })
            }
            _ => Err(DialError::Closed),
        }
    }

    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    pub(super) fn info(&self) -> &RdmaConnectInfo {
        &self.info
    }

    /// Returns true if the connection takes no further calls.
    pub(super) fn is_ended(&self) -> bool {
        self.watch.is_ended()
    }

    /// Marks the connection as ended, so that it gets no further calls.
    pub(super) fn retire(&self) {
        self.watch.end();
    }

    /// Waits until the connection takes no further calls.
    pub(super) async fn ended(&self) {
        self.watch.ended().await;
    }

    /// Returns the number of calls in flight.
    pub(super) fn load(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }
}

/// A call in flight on a connection. Dropping it ends the count of this call.
#[derive(Debug)]
pub(super) struct InFlight {
    connection: Arc<EndpointConnection>,
}

impl InFlight {
    pub(super) fn new(connection: Arc<EndpointConnection>) -> Self {
        connection.in_flight.fetch_add(1, Ordering::Relaxed);
        Self { connection }
    }

    pub(super) fn connection(&self) -> &EndpointConnection {
        &self.connection
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.connection.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

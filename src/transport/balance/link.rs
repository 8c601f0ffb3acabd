//! A connection that calls may take, and how many are on it.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};

use super::line::{Line, LineConnector};
use crate::endpoint::ConnectError;
use crate::endpoint::RdmaConnectInfo;
use crate::transport::RdmaConnector;

/// A connection to one endpoint.
#[derive(Debug)]
pub(super) struct Link {
    channel: Channel,
    line: Arc<Line>,
    info: RdmaConnectInfo,
    in_flight: AtomicUsize,
}

impl Link {
    /// How long a server may take to say its first word of HTTP/2.
    const SILENCE: Duration = Duration::from_secs(10);

    /// Connects, and waits until the server was heard of. The error is a reason in words.
    pub(super) async fn connect(endpoint: &Endpoint, connector: &RdmaConnector) -> Result<Self, String> {
        let line = Arc::new(Line::default());
        let connector = LineConnector::new(connector.clone(), Arc::clone(&line));
        let channel = endpoint.connect_with_connector(connector).await.map_err(|error| reason(&error))?;
        if timeout(Self::SILENCE, line.heard()).await.is_err() {
            return Err(format!(
                "the server took the connection, and no HTTP/2 came within {:?}",
                Self::SILENCE
            ));
        }
        match line.info() {
            Some(info) if !line.is_over() => Ok(Self { channel, line, info, in_flight: AtomicUsize::new(0) }),
            _ => Err("the server took the connection and closed it".into()),
        }
    }

    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    pub(super) fn info(&self) -> &RdmaConnectInfo {
        &self.info
    }

    /// Whether calls may still take it.
    pub(super) fn is_over(&self) -> bool {
        self.line.is_over()
    }

    /// Offers it to no further calls.
    pub(super) fn retire(&self) {
        self.line.end();
    }

    /// Waits until they may not.
    pub(super) async fn ended(&self) {
        self.line.ended().await;
    }

    /// Calls on it now.
    pub(super) fn load(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }
}

/// A call's place on a connection.
#[derive(Debug)]
pub(super) struct InFlight {
    link: Arc<Link>,
}

impl InFlight {
    pub(super) fn new(link: Arc<Link>) -> Self {
        link.in_flight.fetch_add(1, Ordering::Relaxed);
        Self { link }
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.link.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a connector said; tonic's errors have it at some depth, with less telling ones above and below.
fn reason(error: &(dyn Error + 'static)) -> String {
    if let Some(error) = error.downcast_ref::<ConnectError>() {
        return error.to_string();
    }
    error.source().map_or_else(|| error.to_string(), reason)
}

//! The coordinator's ends of the streams to all parts.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;
use tonic_rdma_commands::Failure;

use super::messages::{self, Order, Report};
use super::proto::part_client::PartClient;
use super::{proto, proto::part_server::SERVICE_NAME};

/// The number of orders that may wait for a part. The pieces of a model are orders too.
const ORDERS: usize = 8;
/// How often the peer is asked whether it lives, and how long it may take to answer. Parts that compute leave little time to others.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const ALIVE: Duration = Duration::from_secs(30);
/// The longest time for a connection to a part.
const CONNECT: Duration = Duration::from_secs(10);
/// The largest message of a part: a tensor that differs.
const LARGEST: usize = 1 << 30;

/// What a part did.
#[derive(Debug)]
pub(crate) enum Event {
    Report(Report, Bytes),
    /// The stream has ended, and why.
    Ended(String),
}

/// The streams to all parts.
#[derive(Debug)]
pub(crate) struct Links {
    orders: Vec<mpsc::Sender<proto::Order>>,
    events: mpsc::UnboundedReceiver<(usize, Event)>,
    sender: mpsc::UnboundedSender<(usize, Event)>,
    readers: Vec<JoinHandle<()>>,
}

impl Links {
    /// Makes streams to no part.
    pub(crate) fn new() -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        Self { orders: Vec::new(), events, sender, readers: Vec::new() }
    }

    /// Opens the stream to the next part. If the part can't be reached, `hint` returns how its process ended, or how to start it.
    pub(crate) async fn open(&mut self, address: &str, hint: impl FnOnce() -> String) -> Result<(), Failure> {
        let part = self.orders.len();
        let refused = |reason: String| {
            Failure::run(format!("can't reach part {part} at {address}: {reason}; {}", hint()))
        };
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| Failure::usage(format!("part {part}: bad address {address:?}: {error}")))?;
        let endpoint = endpoint
            .connect_timeout(CONNECT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(ALIVE)
            .keep_alive_while_idle(true);
        let channel = match timeout(CONNECT, endpoint.connect()).await {
            Ok(Ok(channel)) => channel,
            Ok(Err(error)) => {
                return Err(refused(Failure::run("no connection").because(error).with_causes()));
            }
            Err(_) => return Err(refused(format!("no connection within {} s", CONNECT.as_secs()))),
        };
        let (orders, waiting) = mpsc::channel(ORDERS);
        let mut client = PartClient::new(channel).max_decoding_message_size(LARGEST);
        let call = client.work(ReceiverStream::new(waiting));
        let mut reports = match timeout(CONNECT, call).await {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return Err(refused(format!("{SERVICE_NAME}: {}", status.message()))),
            Err(_) => return Err(refused(format!("no answer within {} s", CONNECT.as_secs()))),
        };
        let events = self.sender.clone();
        let reader = async move {
            let reason = loop {
                let message = match reports.message().await {
                    Ok(Some(message)) => message,
                    Ok(None) => break "it closed the stream".to_owned(),
                    Err(status) => break status.message().to_owned(),
                };
                let event = match messages::read(&message.json, &format!("part {part}")) {
                    Ok(report) => Event::Report(report, message.content),
                    Err(failure) => break failure.with_causes(),
                };
                if events.send((part, event)).is_err() {
                    return;
                }
            };
            let _ = events.send((part, Event::Ended(reason)));
        };
        self.readers.push(tokio::spawn(reader));
        self.orders.push(orders);
        Ok(())
    }

    /// Returns the number of parts.
    pub(crate) fn len(&self) -> usize {
        self.orders.len()
    }

    /// Sends an order to a part. If the stream has ended, an event says so.
    pub(crate) async fn send(&self, part: usize, order: &Order, content: Bytes) -> Result<(), Failure> {
        if let Some(orders) = self.orders.get(part) {
            let _ = orders.send(messages::order(order, content)?).await;
        }
        Ok(())
    }

    /// Waits for the next event, at most this long.
    pub(crate) async fn next(&mut self, limit: Duration) -> Option<(usize, Event)> {
        timeout(limit, self.events.recv()).await.ok().flatten()
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        for reader in &self.readers {
            reader.abort();
        }
    }
}

//! A Flight service that stores streams by name.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use arrow_array::RecordBatch;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_server::FlightService;
use arrow_flight::{
    Action, ActionType, Criteria, Empty, FlightData, FlightDescriptor, FlightInfo, HandshakeRequest,
    PollInfo, PutResult, SchemaResult, Ticket,
};
use arrow_schema::SchemaRef;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::memory::Pool;
use tonic_rdma::{RdmaChannel, RdmaIncoming, RdmaServer};
use tonic_rdma_flight::{BatchEncoder, BatchStream, FlightClient, FlightServer, Placement};

use super::stubs::flight_stubs;

/// A stored stream, with the counts of its arrival.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) schema: SchemaRef,
    pub(crate) batches: Vec<RecordBatch>,
    pub(crate) placement: Placement,
}

/// Stores what is put, under the first word of its descriptor's path. An exchange sends every batch back.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    pub(crate) streams: Arc<Mutex<HashMap<String, Stored>>>,
    /// Puts that began.
    pub(crate) begun: Arc<AtomicUsize>,
    /// Puts that ended, in whatever way.
    pub(crate) ended: Arc<AtomicUsize>,
    pool: Pool,
}

/// Counts an end when it is dropped.
struct CountOnDrop(Arc<AtomicUsize>);

impl Drop for CountOnDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Store {
    pub(crate) fn new() -> Self {
        let pool = Pool::for_sending(256 << 20);
        Self { streams: Arc::default(), begun: Arc::default(), ended: Arc::default(), pool }
    }

    pub(crate) fn insert(&self, name: &str, batches: &[RecordBatch]) {
        let (schema, batches) = (batches[0].schema(), batches.to_vec());
        let stored = Stored { schema, batches, placement: Placement::default() };
        self.streams.lock().unwrap().insert(name.to_owned(), stored);
    }

    pub(crate) fn stored(&self, name: &str) -> Option<Stored> {
        self.streams.lock().unwrap().get(name).cloned()
    }

    async fn receive(&self, messages: Streaming<FlightData>) -> Result<(), FlightError> {
        let mut messages = messages;
        let first = messages.next().await.ok_or_else(|| FlightError::protocol("no message"))??;
        let name = first.flight_descriptor.as_ref().map(|descriptor| descriptor.path[0].clone());
        let name = name.ok_or_else(|| FlightError::protocol("no descriptor"))?;
        let mut arriving = BatchStream::new(tokio_stream::once(Ok(first)).chain(messages));
        let mut batches = Vec::new();
        while let Some(batch) = arriving.next().await {
            batches.push(batch?);
        }
        let schema = Arc::clone(arriving.schema().unwrap());
        let stored = Stored { schema, batches, placement: arriving.placement() };
        self.streams.lock().unwrap().insert(name, stored);
        Ok(())
    }
}

#[tonic::async_trait]
impl FlightService for Store {
    flight_stubs! {
        handshake: Streaming<HandshakeRequest> => Self::HandshakeStream,
        list_flights: Criteria => Self::ListFlightsStream,
        get_flight_info: FlightDescriptor => FlightInfo,
        poll_flight_info: FlightDescriptor => PollInfo,
        get_schema: FlightDescriptor => SchemaResult,
        do_action: Action => Self::DoActionStream,
    }

    /// The ticket is a name, and after a `+` the text of an error that ends the stream. After an `@` stands
    /// the number of bytes of metadata beside each body.
    async fn do_get(&self, request: Request<Ticket>) -> Result<Response<Self::DoGetStream>, Status> {
        let ticket = String::from_utf8(request.into_inner().ticket.to_vec()).unwrap();
        let (name, error) =
            ticket.split_once('+').map_or((&*ticket, None), |(name, text)| (name, Some(text)));
        let (name, metadata) =
            name.split_once('@').map_or((name, 0), |(name, bytes)| (name, bytes.parse().unwrap()));
        let stored = self.stored(name).ok_or_else(|| Status::not_found(format!("no flight {name}")))?;
        let encoder = BatchEncoder::new(&stored.schema, &self.pool)?;
        let error = error.map(|text| Err(FlightError::from(Status::data_loss(text))));
        let batches = tokio_stream::iter(stored.batches.into_iter().map(Ok).chain(error));
        let messages = beside(metadata, encoder.stream(batches)).map(|message| message.map_err(Status::from));
        Ok(Response::new(Box::pin(messages)))
    }

    async fn do_put(
        &self,
        request: Request<Streaming<FlightData>>,
    ) -> Result<Response<Self::DoPutStream>, Status> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        let _end = CountOnDrop(Arc::clone(&self.ended));
        self.receive(request.into_inner()).await?;
        let reply = PutResult { app_metadata: "stored".into() };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(reply)))))
    }

    async fn do_exchange(
        &self,
        request: Request<Streaming<FlightData>>,
    ) -> Result<Response<Self::DoExchangeStream>, Status> {
        let (replies, response) = mpsc::channel(1);
        let pool = self.pool.clone();
        tokio::spawn(async move {
            let mut arriving = BatchStream::new(request.into_inner());
            let mut encoder = None;
            while let Some(batch) = arriving.next().await {
                let encoded = batch.and_then(|batch| {
                    let encoder = match &mut encoder {
                        Some(encoder) => encoder,
                        encoder @ None => encoder.insert(BatchEncoder::new(&batch.schema(), &pool)?),
                    };
                    encoder.encode(&batch)
                });
                let messages = encoded.map_or_else(
                    |error| vec![Err(Status::from(error))],
                    |messages| messages.into_iter().map(Ok).collect(),
                );
                for message in messages {
                    if replies.send(message).await.is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(response))))
    }

    async fn list_actions(&self, _: Request<Empty>) -> Result<Response<Self::ListActionsStream>, Status> {
        let action = ActionType { r#type: "nothing".to_owned(), description: "does nothing".to_owned() };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(action)))))
    }
}

/// Serves `store` over RDMA, with messages of at most `limit` bytes.
pub(crate) async fn serve(store: &Store, limit: usize) -> SocketAddr {
    let incoming = RdmaIncoming::builder().config(support::config()).bind("127.0.0.1:0").await.unwrap();
    let address = incoming.local_addr();
    let flight = FlightServer::new(store.clone()).max_message_size(limit);
    tokio::spawn(RdmaServer::new().add_service(flight).serve_with_incoming(incoming));
    address
}

/// Connects to a server of [`serve`].
pub(crate) async fn connect(address: SocketAddr) -> (FlightClient<RdmaChannel>, RdmaChannel) {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = RdmaChannel::builder(endpoint).config(support::config()).connect().await.unwrap();
    assert!(
        channel.last_connection().unwrap().is_native(),
        "{}",
        channel.last_connection().unwrap().reason()
    );
    (FlightClient::new(channel.clone()), channel)
}

/// Starts a server with a store, and connects to it.
pub(crate) async fn start() -> (Store, FlightClient<RdmaChannel>, RdmaChannel) {
    let store = Store::new();
    let (client, channel) = connect(serve(&store, 64 << 20).await).await;
    (store, client, channel)
}

/// Encodes `batches` for a put of the flight `name`.
pub(crate) fn encoded(
    name: &str,
    batches: Vec<RecordBatch>,
) -> impl Stream<Item = Result<FlightData, FlightError>> + Send + 'static {
    let descriptor = FlightDescriptor::new_path(vec![name.to_owned()]);
    let pool = Pool::for_sending(256 << 20);
    let encoder = BatchEncoder::new(&batches[0].schema(), &pool).unwrap().descriptor(descriptor);
    encoder.stream(tokio_stream::iter(batches.into_iter().map(Ok)))
}

/// Adds `bytes` bytes of the application's metadata to each message with a body.
pub(crate) fn beside(
    bytes: usize,
    messages: impl Stream<Item = Result<FlightData, FlightError>> + Send + 'static,
) -> impl Stream<Item = Result<FlightData, FlightError>> + Send + 'static {
    messages.map(move |message| {
        message.map(|message| match message.data_body.is_empty() {
            true => message,
            false => message.with_app_metadata(vec![7; bytes]),
        })
    })
}

//! The client process, and how the bench starts it.

use std::time::{Duration, Instant};

use arrow_flight::Ticket;
use arrow_flight::flight_service_client::FlightServiceClient;
use tokio_stream::{Stream, StreamExt as _};
use tonic::Request;
use tonic::transport::{Channel, Endpoint};
use tonic_rdma::RdmaChannel;
use tonic_rdma::memory::Pool;
use tonic_rdma_commands::Named as _;
use tonic_rdma_commands::process::{self, Child};
use tonic_rdma_flight::{BatchStream, FlightClient, Placement};

use super::content::{Check, Content, batches_in_stream};
use super::options::{Cell, Checked, Direction, Options, Path};
use super::server::{self, CONNECTION_WINDOW, FRAME, LIMIT, STREAM_WINDOW};
use super::service::{CHECK_ALL, check, encode, from_numbers, pool, to_numbers};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    /// Content of batches in a second, in MiB.
    pub(crate) mib_per_second: f64,
    pub(crate) placement: Placement,
}

/// Measures `cell` with two new processes.
pub(crate) fn measure(cell: Cell, options: &Options) -> Measured {
    let (_server, address) = server::start(cell);
    let mut command = process::again().unwrap();
    command.arg("client").args(cell.arguments());
    command.args([&address, &options.millis.to_string(), options.check.name()]);
    let mut client = Child::with_lines(format!("the client ({cell})"), command).unwrap();
    let limit = LIMIT + Duration::from_millis(options.millis);
    let (mib_per_second, numbers) = client.report(limit).unwrap();
    Measured { mib_per_second, placement: from_numbers(numbers) }
}

/// Runs the client process.
pub(crate) fn run(cell: Cell, address: &str, millis: u64, checked: Checked) {
    let Cell { runtime, direction, bytes, path } = cell;
    let (duration, check_all) = (Duration::from_millis(millis), checked == Checked::All);
    runtime.build().unwrap().block_on(async {
        let mut client = Client::connect(path, bytes, address).await;
        // The first stream is checked whole, and warms up memory and thresholds.
        client.stream(direction, true).await;
        let (start, mut streams, mut placement) = (Instant::now(), 0, Placement::default());
        while start.elapsed() < duration || streams == 0 {
            placement = client.stream(direction, check_all).await;
            streams += 1;
        }
        let content = streams * batches_in_stream(bytes) * bytes;
        let mib_per_second = content as f64 / f64::from(1 << 20) / start.elapsed().as_secs_f64();
        process::report(&(mib_per_second, to_numbers(placement))).unwrap();
    });
}

struct Client {
    channel: Connected,
    path: Path,
    bytes: usize,
    content: Content,
    pool: Pool,
}

enum Connected {
    Ours(FlightClient<RdmaChannel>),
    Stock(FlightServiceClient<Channel>),
}

impl Client {
    async fn connect(path: Path, bytes: usize, address: &str) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        let channel = match path {
            Path::Ours => {
                let channel = RdmaChannel::builder(endpoint).connect().await.unwrap();
                let connection = channel.last_connection().unwrap();
                assert!(connection.is_native(), "{}", connection.reason());
                Connected::Ours(FlightClient::new(channel).max_message_size(usize::MAX))
            }
            Path::Stock | Path::StockSplit => {
                let endpoint = endpoint
                    .tcp_nodelay(true)
                    .initial_stream_window_size(STREAM_WINDOW)
                    .initial_connection_window_size(CONNECTION_WINDOW)
                    .max_frame_size(FRAME);
                let client = FlightServiceClient::new(endpoint.connect().await.unwrap());
                Connected::Stock(client.max_decoding_message_size(usize::MAX))
            }
        };
        Self { channel, path, bytes, content: Content::new(bytes), pool: pool() }
    }

    /// Carries one stream. Returns how the receiver got it.
    async fn stream(&mut self, direction: Direction, check_all: bool) -> Placement {
        match direction {
            Direction::Get => {
                let ticket = Ticket::new("batches");
                let batches = match &mut self.channel {
                    Connected::Ours(client) => client.do_get(ticket).await.unwrap(),
                    Connected::Stock(client) => {
                        BatchStream::new(client.do_get(ticket).await.unwrap().into_inner())
                    }
                };
                check(batches, Check::new(self.bytes, check_all)).await.unwrap()
            }
            Direction::Put => {
                let messages = encode(&self.content, self.path, &self.pool);
                let reply = match &mut self.channel {
                    Connected::Ours(client) => {
                        only(client.do_put(request(messages, check_all)).await.unwrap()).await
                    }
                    Connected::Stock(client) => {
                        let messages = messages.map(|message| message.unwrap());
                        only(client.do_put(request(messages, check_all)).await.unwrap().into_inner()).await
                    }
                };
                from_numbers(serde_json::from_slice(&reply.app_metadata).unwrap())
            }
        }
    }
}

/// Makes the request of a put.
fn request<M>(messages: M, check_all: bool) -> Request<M> {
    let mut request = Request::new(messages);
    if check_all {
        request.metadata_mut().insert(CHECK_ALL, "1".parse().unwrap());
    }
    request
}

/// Returns the only reply of a put.
async fn only<T, E: std::fmt::Debug>(mut replies: impl Stream<Item = Result<T, E>> + Unpin) -> T {
    let reply = replies.next().await.unwrap().unwrap();
    assert!(replies.next().await.is_none());
    reply
}

//! The measuring client.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use tokio::task::JoinSet;
use tonic::Streaming;
use tonic::body::Body;
use tonic_rdma::RdmaChannel;
use tonic_rdma::gather::{self, GatherBoth};
use tonic_rdma::memory::Pool;
use tonic_rdma_proto::transfer::PutRequest;
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tower_service::Service as _;

use super::LENGTH;

/// A way to make a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rung {
    /// A request and a response with bodies of bytes, without generated code.
    Plain,
    /// tonic's generated code.
    Generated,
}

/// One connection.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    plain: RdmaChannel,
    generated: TransferClient<RdmaChannel>,
    /// The same, with large fields by reference.
    gathering: TransferClient<GatherBoth<RdmaChannel>>,
}

impl Client {
    pub(crate) async fn connect(uri: &str) -> Self {
        let channel = RdmaChannel::connect(uri.to_owned()).await.unwrap();
        assert!(channel.last_connection().is_some_and(|info| info.is_native()));
        let generated = TransferClient::new(channel.clone());
        let gathering = TransferClient::new(gather::both(channel.clone()));
        let client = Self { plain: channel, generated, gathering };
        client.clone().call(Rung::Generated).await;
        client
    }

    /// Makes one small call.
    async fn call(&mut self, rung: Rung) {
        match rung {
            Rung::Plain => {
                let body = Body::new(Full::new(Bytes::from_static(&[0; LENGTH])));
                let request = http::Request::post("/native.Plain/Call").body(body).unwrap();
                let response = self.plain.call(request).await.unwrap();
                assert_eq!(response.into_body().collect().await.unwrap().to_bytes().len(), LENGTH);
            }
            Rung::Generated => {
                let payload = Bytes::from_static(&[0; LENGTH]);
                let reply =
                    self.generated.put(PutRequest { payload, ..PutRequest::default() }).await.unwrap();
                assert_eq!(reply.into_inner().bytes, LENGTH as u64);
            }
        }
    }

    /// Makes calls for `length`, so many at a time. Returns their times.
    pub(crate) async fn calls(&self, rung: Rung, inflight: usize, length: Duration) -> Vec<Duration> {
        let mut callers = JoinSet::new();
        let end = Instant::now() + length;
        for _ in 0..inflight {
            let mut client = self.clone();
            callers.spawn(async move {
                let mut times = Vec::with_capacity(1 << 18);
                loop {
                    let start = Instant::now();
                    client.call(rung).await;
                    let now = Instant::now();
                    times.push(now - start);
                    if now >= end {
                        return times;
                    }
                }
            });
        }
        callers.join_all().await.concat()
    }

    /// Opens a stream of messages without a reader, and waits until its window is full.
    pub(crate) async fn block(&self) -> Streaming<PutRequest> {
        let message = PutRequest { payload: vec![1; 10_000].into(), ..PutRequest::default() };
        let requests = tokio_stream::iter([message]);
        let stream = self.generated.clone().echo(requests).await.unwrap().into_inner();
        tokio::time::sleep(Duration::from_millis(20)).await;
        stream
    }

    /// Sends `bytes` again and again from registered memory, as long as `goes_on`. Returns the number of transfers.
    pub(crate) async fn transfer(self, bytes: usize, goes_on: Arc<AtomicBool>) -> u64 {
        let mut buffer = Pool::for_sending(2 * bytes as u64).allocate(bytes).unwrap();
        buffer.fill(1);
        let payload = buffer.freeze();
        let (mut client, mut count) = (self.gathering, 0);
        while goes_on.load(Ordering::Relaxed) {
            let request = PutRequest { payload: payload.clone(), ..PutRequest::default() };
            assert_eq!(client.put(request).await.unwrap().into_inner().bytes, bytes as u64);
            count += 1;
        }
        count
    }
}

//! Streams and large messages.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::BoxStream;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_rdma::{CallConfig, RdmaServer};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest};

use crate::server_acts::{Acts, in_every_runtime, serve, serve_as};
use support::{Content, Runtime, say, within};

fn name(name: impl Into<String>) -> HelloRequest {
    HelloRequest { name: name.into() }
}

#[test]
fn both_directions_stream_at_once() {
    in_every_runtime(|| async {
        let running = serve(&Acts::default(), CallConfig::default()).await;
        let mut client = running.client().await;
        let (names, sent) = mpsc::channel(4);
        let mut chat = client.chat(ReceiverStream::new(sent)).await.unwrap().into_inner();
        // One by one.
        for number in 0..50 {
            names.send(name(number.to_string())).await.unwrap();
            assert_eq!(chat.next().await.unwrap().unwrap().message, number.to_string());
        }
        // In one go.
        let sender = tokio::spawn(async move {
            for number in 0..2000 {
                names.send(name(number.to_string())).await.unwrap();
            }
        });
        for number in 0..2000 {
            assert_eq!(chat.next().await.unwrap().unwrap().message, number.to_string());
        }
        sender.await.unwrap();
        assert!(chat.next().await.is_none());
        let none = client.chat(tokio_stream::empty()).await.unwrap().into_inner().collect::<Vec<_>>().await;
        assert!(none.is_empty());
    });
}

#[test]
fn a_response_may_have_many_messages_and_end_before_the_request() {
    in_every_runtime(|| async {
        let running = serve(&Acts::default(), CallConfig::default()).await;
        let mut client = running.client().await;
        let mut request = Request::new(tokio_stream::pending());
        request.metadata_mut().insert("count", "20000".parse().unwrap());
        let mut chat = client.chat(request).await.unwrap().into_inner();
        for number in 0..20_000 {
            assert_eq!(chat.next().await.unwrap().unwrap().message, number.to_string());
        }
        assert!(chat.next().await.is_none());

        // Names that nothing reads follow the last reply.
        let mut request =
            Request::new(tokio_stream::iter((0..10_000).map(|number| name(number.to_string()))));
        request.metadata_mut().insert("only", "3".parse().unwrap());
        let replies: Vec<_> = client.chat(request).await.unwrap().into_inner().collect().await;
        assert_eq!(
            replies.into_iter().map(|reply| reply.unwrap().message).collect::<Vec<_>>(),
            ["0", "1", "2"]
        );
        assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
    });
}

#[test]
fn an_error_follows_the_messages_before_it() {
    in_every_runtime(|| async {
        let running = serve(&Acts::default(), CallConfig::default()).await;
        let names = tokio_stream::iter(["one", "two", "fail late", "three"].map(name));
        let mut chat = running.client().await.chat(names).await.unwrap().into_inner();
        assert_eq!(chat.next().await.unwrap().unwrap().message, "one");
        assert_eq!(chat.next().await.unwrap().unwrap().message, "two");
        let status = chat.next().await.unwrap().unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::DataLoss, "late"));
    });
}

#[test]
fn ten_thousand_streams_share_one_connection() {
    for runtime in [Runtime::Idle, Runtime::MultiThread] {
        runtime.run(within(async {
            const STREAMS: usize = 10_000;
            let acts = Acts::default();
            let running = serve(&acts, CallConfig::default()).await;
            let client = running.client().await;
            let mut chats = Vec::with_capacity(STREAMS);
            for number in 0..STREAMS {
                let (names, sent) = mpsc::channel(1);
                names.send(name(format!("first {number}"))).await.unwrap();
                let chat = client.clone().chat(ReceiverStream::new(sent)).await.unwrap().into_inner();
                chats.push((names, chat));
            }
            for (number, (_, chat)) in chats.iter_mut().enumerate() {
                assert_eq!(chat.next().await.unwrap().unwrap().message, format!("first {number}"));
            }
            assert_eq!(say(&mut client.clone(), "between").await.unwrap(), "between");
            for (number, (names, _)) in chats.iter_mut().enumerate() {
                names.send(name(format!("second {number}"))).await.unwrap();
            }
            for (number, (names, mut chat)) in chats.into_iter().enumerate() {
                drop(names);
                assert_eq!(chat.next().await.unwrap().unwrap().message, format!("second {number}"));
                assert!(chat.next().await.is_none());
            }
        }));
    }
}

#[test]
fn calls_beyond_the_limit_of_streams_wait() {
    Runtime::MultiThread.run(within(async {
        let acts = Acts::default();
        let running = serve(&acts, CallConfig::default().max_concurrent_streams(3)).await;
        let client = running.client().await;
        let calls: Vec<_> = (0..9)
            .map(|_| {
                let mut client = client.clone();
                tokio::spawn(async move { say(&mut client, "wait").await })
            })
            .collect();
        support::until(|| acts.waiting() == 3).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(acts.waiting(), 3);
        acts.release(9);
        for call in calls {
            assert_eq!(call.await.unwrap().unwrap(), "wait");
        }
    }));
}

/// Checks and sends back what arrives.
#[derive(Debug)]
struct Mirror;

#[tonic::async_trait]
impl Transfer for Mirror {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let PutRequest { seed, payload, .. } = request.into_inner();
        Content::new(seed).check(&payload);
        Ok(Response::new(PutReply { bytes: payload.len() as u64, ..PutReply::default() }))
    }

    async fn echo(
        &self,
        request: Request<Streaming<PutRequest>>,
    ) -> Result<Response<BoxStream<PutRequest>>, Status> {
        let replies = request.into_inner().map(|request| {
            let PutRequest { seed, check, payload } = request?;
            Content::new(seed).check(&payload);
            let payload = Bytes::from(Content::new(seed + 1).take(payload.len()));
            Ok(PutRequest { seed: seed + 1, check, payload })
        });
        Ok(Response::new(Box::pin(replies)))
    }
}

fn content(seed: u64, length: usize) -> PutRequest {
    PutRequest { seed, check: 0, payload: Bytes::from(Content::new(seed).take(length)) }
}

#[test]
fn large_messages_arrive_whole_both_ways() {
    const MOST: usize = 64 << 20;
    let lengths = [0, 1, 4095, 4096, 16 << 10, (16 << 10) + 1, 65_537, (1 << 20) - 3, 9 << 20];
    in_every_runtime(|| async move {
        let service = TransferServer::new(Mirror).max_decoding_message_size(MOST);
        let running = serve_as(RdmaServer::new().add_service(service)).await;
        let client = TransferClient::new(running.channel().await).max_decoding_message_size(MOST);
        for (seed, length) in (1..).zip(lengths) {
            let reply = client.clone().put(content(seed, length)).await.unwrap().into_inner();
            assert_eq!(reply.bytes, length as u64);
        }
        let requests =
            tokio_stream::iter((1..).step_by(10).zip(lengths).map(|(seed, length)| content(seed, length)));
        let mut echo = client.clone().echo(requests).await.unwrap().into_inner();
        for (seed, length) in (1..).step_by(10).zip(lengths) {
            let reply = echo.next().await.unwrap().unwrap();
            assert_eq!((reply.seed, reply.payload.len()), (seed + 1, length));
            Content::new(seed + 1).check(&reply.payload);
        }
        assert!(echo.next().await.is_none());
        // Many at once, with small calls between.
        let calls = (0..16).map(|number| {
            let mut client = client.clone();
            let length = if number % 2 == 0 { 1 << 20 } else { 10 };
            tokio::spawn(async move {
                assert_eq!(
                    client.put(content(number, length)).await.unwrap().into_inner().bytes,
                    length as u64
                );
            })
        });
        for call in calls.collect::<Vec<_>>() {
            call.await.unwrap();
        }
    });
}

#[test]
fn a_slow_reader_stops_its_own_stream_only() {
    in_every_runtime(|| async {
        let service = TransferServer::new(Mirror).max_decoding_message_size(64 << 20);
        let running = serve_as(RdmaServer::new().add_service(service)).await;
        let client = TransferClient::new(running.channel().await).max_decoding_message_size(64 << 20);
        // Nothing reads the replies yet, so the requests stop, too.
        let (requests, sent) = mpsc::channel(1);
        let mut echo = client.clone().echo(ReceiverStream::new(sent)).await.unwrap().into_inner();
        let sender = tokio::spawn(async move {
            for seed in 0..60 {
                requests.send(content(seed, 1 << 20)).await.unwrap();
            }
        });
        for seed in 0..20 {
            let reply = client.clone().put(content(seed, 1 << 20)).await.unwrap().into_inner();
            assert_eq!(reply.bytes, 1 << 20);
        }
        assert!(!sender.is_finished(), "60 MiB went nowhere");
        for seed in 0..60 {
            let reply = echo.next().await.unwrap().unwrap();
            Content::new(seed + 1).check(&reply.payload);
            assert_eq!(reply.payload.len(), 1 << 20);
        }
        sender.await.unwrap();
        assert!(echo.next().await.is_none());
    });
}

//! Calls of all kinds, many calls at once, and bodies of all lengths.

use std::time::Duration;

use http::uri::PathAndQuery;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::client::Grpc;
use tonic::service::Interceptor;
use tonic::{Code, Request, Status};
use tonic_rdma::RdmaChannel;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};
use tower::ServiceBuilder;

use crate::servers::{Kind, everywhere};
use support::{ScriptedGreeter, say, until};

fn named(name: impl Into<String>) -> HelloRequest {
    HelloRequest { name: name.into() }
}

#[test]
fn calls_of_all_four_kinds_get_their_replies() {
    everywhere(async |kind| {
        let running = kind.serve(&ScriptedGreeter::new()).await;
        let mut grpc = Grpc::new(running.channel().await);
        let codec = tonic_prost::ProstCodec::<HelloRequest, HelloReply>::default;
        let [hello, chat] = ["SayHello", "Chat"].map(|method| {
            format!("/tonic_rdma.greeter.v1.Greeter/{method}").parse::<PathAndQuery>().unwrap()
        });

        let reply = grpc.unary(Request::new(named("one")), hello.clone(), codec()).await.unwrap();
        assert_eq!(reply.into_inner().message, "one");
        let request = Request::new(tokio_stream::once(named("a stream of one")));
        let reply = grpc.client_streaming(request, hello, codec()).await.unwrap();
        assert_eq!(reply.into_inner().message, "a stream of one");
        let reply = grpc.server_streaming(Request::new(named("again")), chat.clone(), codec()).await.unwrap();
        let replies: Vec<_> = reply.into_inner().collect().await;
        assert_eq!(replies.len(), 1);
        assert_eq!(replies[0].as_ref().unwrap().message, "again");

        let (names, requests) = mpsc::channel(1);
        let request = Request::new(ReceiverStream::new(requests));
        let mut replies = grpc.streaming(request, chat, codec()).await.unwrap().into_inner();
        for number in 0..100 {
            names.send(named(number.to_string())).await.unwrap();
            assert_eq!(replies.next().await.unwrap().unwrap().message, number.to_string());
        }
        drop(names);
        assert!(replies.next().await.is_none());
    });
}

#[test]
fn calls_made_together_all_get_their_own_replies() {
    everywhere(async |kind| {
        let running = kind.serve(&ScriptedGreeter::new()).await;
        let client = running.client().await;
        for _round in 0..20 {
            let mut calls = tokio::task::JoinSet::new();
            let joined = async {
                let pending = (0..64).map(|number| {
                    let mut client = client.clone();
                    async move { say(&mut client, number.to_string()).await }
                });
                futures_join(pending).await
            };
            for number in 64..96 {
                let mut client = client.clone();
                calls.spawn(async move { (number, say(&mut client, number.to_string()).await) });
            }
            for (number, reply) in joined.await.into_iter().enumerate() {
                assert_eq!(reply.unwrap(), number.to_string());
            }
            while let Some(done) = calls.join_next().await {
                let (number, reply) = done.unwrap();
                assert_eq!(reply.unwrap(), number.to_string());
            }
        }
    });
}

/// Polls all futures as one task, in turn.
async fn futures_join<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut waiting: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        let mut all = true;
        for (future, output) in &mut waiting {
            if output.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(value) => *output = Some(value),
                    std::task::Poll::Pending => all = false,
                }
            }
        }
        if all { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    waiting.into_iter().filter_map(|(_, output)| output).collect()
}

#[test]
fn messages_of_all_lengths_come_back_whole() {
    everywhere(async |kind| {
        let running = kind.serve(&ScriptedGreeter::new()).await;
        let mut client = running.client().await;
        for length in [0, 1, 63, 1000, 4000, 4096, 8000, 16_000, 100_000, 1 << 20, 3 << 20] {
            let name: String = (0..length).map(|at| char::from(b'a' + (at % 23) as u8)).collect();
            assert!(say(&mut client, name.clone()).await.unwrap() == name, "{length} bytes");
            let mut chat = client.chat(tokio_stream::once(named(name.clone()))).await.unwrap().into_inner();
            assert!(chat.next().await.unwrap().unwrap().message == name, "{length} bytes in a stream");
            assert!(chat.next().await.is_none());
        }
    });
}

#[test]
fn a_request_that_never_ends_stands_beside_other_calls() {
    everywhere(async |kind| {
        let running = kind.serve(&ScriptedGreeter::new()).await;
        let mut client = running.client().await;
        let (names, requests) = mpsc::channel(64);
        let feeder = tokio::spawn(async move {
            for number in 0_u64.. {
                if names.send(named(number.to_string())).await.is_err() {
                    return;
                }
                tokio::task::yield_now().await;
            }
        });
        let mut chat = client.chat(ReceiverStream::new(requests)).await.unwrap().into_inner();
        for number in 0..200 {
            assert_eq!(chat.next().await.unwrap().unwrap().message, number.to_string());
            assert_eq!(say(&mut client, "beside").await.unwrap(), "beside");
        }
        drop(chat);
        // The request's body is dropped with the call.
        feeder.await.unwrap();
    });
}

#[test]
fn the_status_of_a_failed_call_is_the_servers() {
    everywhere(async |kind| {
        let running = kind.serve(&ScriptedGreeter::new()).await;
        let mut grpc = Grpc::new(running.channel().await);
        let codec = tonic_prost::ProstCodec::<HelloRequest, HelloReply>::default;
        let nowhere = PathAndQuery::from_static("/tonic_rdma.greeter.v1.Greeter/Nothing");
        let status = grpc.unary(Request::new(named("x")), nowhere.clone(), codec()).await.unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented, "{status}");
        // As over TCP, a stream that fails before its first message fails the call.
        let status = grpc.server_streaming(Request::new(named("x")), nowhere, codec()).await.unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented, "{status}");
    });
}

#[test]
fn a_request_that_can_not_be_encoded_fails_here() {
    everywhere(async |kind| {
        let greeter = ScriptedGreeter::new();
        let running = kind.serve(&greeter).await;
        let mut client = running.client().await.max_encoding_message_size(100);
        // HTTP/2 loses the reason.
        let codes = if kind == Kind::Native {
            vec![Code::OutOfRange]
        } else {
            vec![Code::Internal, Code::Unknown, Code::Cancelled]
        };
        let status = say(&mut client, "x".repeat(200)).await.unwrap_err();
        assert!(codes.contains(&status.code()), "{status}");
        // A stream whose second message is too long.
        let names = [named("short"), named("x".repeat(200))];
        let mut replies = match client.chat(tokio_stream::iter(names)).await {
            Ok(replies) => replies.into_inner(),
            Err(status) => return assert!(codes.contains(&status.code()), "{status}"),
        };
        let end = loop {
            match replies.next().await {
                Some(Ok(reply)) => assert_eq!(reply.message, "short"),
                Some(Err(status)) => break status,
                None => panic!("the call ended in order"),
            }
        };
        assert!(
            [Code::OutOfRange, Code::Internal, Code::Cancelled, Code::Unknown].contains(&end.code()),
            "{end}"
        );
    });
}

#[derive(Clone)]
struct Marks;

impl Interceptor for Marks {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert("x-mark", "here".parse().unwrap());
        Ok(request)
    }
}

#[test]
fn interceptors_and_layers_take_the_channel() {
    everywhere(async |kind| {
        let running = kind.serve(&ScriptedGreeter::new()).await;
        let channel: RdmaChannel = running.channel().await;
        let mut client = GreeterClient::with_interceptor(channel.clone(), Marks);
        assert_eq!(say(&mut client, "header x-mark").await.unwrap(), "Some(\"here\")");
        let limited = ServiceBuilder::new()
            .concurrency_limit(2)
            .timeout(Duration::from_secs(60))
            .load_shed()
            .service(channel);
        assert_eq!(say(&mut GreeterClient::new(limited), "through layers").await.unwrap(), "through layers");
    });
}

/// They take the place of `Endpoint::concurrency_limit` and `Endpoint::rate_limit`.
#[test]
fn limits_by_layers_hold_for_all_clones_of_a_client() {
    everywhere(async |kind| {
        const CALLS: usize = 8;
        let greeter = ScriptedGreeter::new();
        let running = kind.serve(&greeter).await;
        let limited = ServiceBuilder::new()
            .buffer(CALLS)
            .concurrency_limit(2)
            .rate_limit(1_000_000, Duration::from_secs(1))
            .service(running.channel().await);
        let client = GreeterClient::new(limited);
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..CALLS {
            let mut client = client.clone();
            calls.spawn(async move { say(&mut client, "hold").await });
        }
        for released in 0..CALLS / 2 {
            until(|| greeter.calls() == 2 * (released + 1) && greeter.held() == 2).await;
            greeter.release(2);
        }
        for reply in calls.join_all().await {
            assert_eq!(reply.unwrap(), "held");
        }
        assert_eq!(greeter.most_held(), 2);
        // The code of a call goes through the layers.
        let mut late = Request::new(named("hold"));
        late.set_timeout(Duration::from_millis(1));
        let status = client.clone().say_hello(late).await.unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    });
}

#[test]
fn a_dropped_call_is_cancelled_at_the_server() {
    everywhere(async |kind| {
        let greeter = ScriptedGreeter::new();
        let running = kind.serve(&greeter).await;
        let client = running.client().await;
        for round in 1..=20 {
            let mut held = client.clone();
            let call = tokio::spawn(async move { say(&mut held, "hold").await });
            until(|| greeter.held() == 1).await;
            call.abort();
            assert!(call.await.unwrap_err().is_cancelled());
            until(|| greeter.held() == 0).await;
            assert_eq!(greeter.dropped(), round);
        }
        // A response that is not read to its end.
        let mut chats = client.clone();
        let (names, requests) = mpsc::channel(1);
        let chat = chats.chat(ReceiverStream::new(requests)).await.unwrap();
        names.send(named("unread")).await.unwrap();
        drop(chat);
        if kind == Kind::Native {
            // Its request is dropped, too. Over HTTP/2, hyper keeps a request that waits.
            names.closed().await;
        }
        assert_eq!(say(&mut chats, "after that").await.unwrap(), "after that");
    });
}

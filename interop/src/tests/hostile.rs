//! Hostile requests. Each call ends with a status, and the server goes on.

use bytes::Bytes;
use tonic::{Code, Request, Status};

use super::{serve_ours, target};
use crate::proto::checked::checked_client::CheckedClient;
use crate::proto::checked::{CheckedRequest, FailRequest};
use crate::proto::testing::test_service_client::TestServiceClient;
use crate::proto::testing::{
    EchoStatus, Empty, Payload, ResponseParameters, SimpleRequest, StreamingInputCallRequest,
    StreamingOutputCallRequest,
};
use crate::transport::CallChannel;
use crate::transport::Transport::{self, Native, Rdma};

/// Both of our transports.
const OURS: [Transport; 2] = [Rdma, Native];

async fn channel(transport: Transport) -> CallChannel {
    target(serve_ours(transport).await, transport, transport).connect().await.unwrap().channel
}

fn code<T: std::fmt::Debug>(ended: Result<T, Status>) -> Code {
    ended.unwrap_err().code()
}

fn request_of(size: i32, interval_us: i32) -> StreamingOutputCallRequest {
    StreamingOutputCallRequest {
        response_parameters: vec![ResponseParameters { size, interval_us, compressed: None }],
        ..Default::default()
    }
}

async fn output(client: &mut TestServiceClient<CallChannel>, request: StreamingOutputCallRequest) -> Code {
    code(client.streaming_output_call(request).await.unwrap().into_inner().message().await)
}

#[tokio::test]
async fn bad_sizes_and_times_are_refused() {
    for transport in OURS {
        let mut client = TestServiceClient::new(channel(transport).await);
        for (response_size, expected) in [
            (-1, Code::InvalidArgument),
            (i32::MIN, Code::InvalidArgument),
            (i32::MAX, Code::ResourceExhausted),
            ((64 << 20) + 1, Code::ResourceExhausted),
        ] {
            let request = SimpleRequest { response_size, ..Default::default() };
            assert_eq!(code(client.unary_call(request).await), expected, "{response_size} bytes");
            assert_eq!(
                output(&mut client, request_of(response_size, 0)).await,
                expected,
                "{response_size} bytes"
            );
        }
        for interval in [-1, i32::MIN, i32::MAX, 60_000_001] {
            assert_eq!(
                output(&mut client, request_of(1, interval)).await,
                Code::InvalidArgument,
                "{interval} us"
            );
        }
        client.empty_call(Empty {}).await.unwrap();
    }
}

#[tokio::test]
async fn bad_checked_requests_are_refused() {
    for transport in OURS {
        let mut client = CheckedClient::new(channel(transport).await);
        let large = CheckedRequest { reply_bytes: u32::MAX, count: u32::MAX, ..Default::default() };
        assert_eq!(code(client.unary(large.clone()).await), Code::ResourceExhausted);
        assert_eq!(code(client.produce(large.clone()).await), Code::ResourceExhausted);
        assert_eq!(code(client.collect(tokio_stream::iter([large.clone()])).await), Code::ResourceExhausted);
        let mut replies = client.exchange(tokio_stream::iter([large])).await.unwrap().into_inner();
        assert_eq!(code(replies.message().await), Code::ResourceExhausted);
        for wrong in [0, -1, 17, i32::MAX] {
            let request = FailRequest { code: wrong, ..Default::default() };
            assert_eq!(code(client.fail(request).await), Code::InvalidArgument, "code {wrong}");
        }
    }
}

#[tokio::test]
async fn large_messages_are_refused() {
    for transport in OURS {
        let channel = channel(transport).await;
        let body: Bytes = vec![0; 17 << 20].into();
        let payload = Some(Payload { body: body.clone(), ..Default::default() });
        let mut client = TestServiceClient::new(channel.clone());
        let ended = client.unary_call(SimpleRequest { payload, ..Default::default() }).await;
        assert_eq!(code(ended), Code::OutOfRange);
        let mut client = CheckedClient::new(channel);
        let payload: Bytes = vec![0; 65 << 20].into();
        assert_eq!(
            code(client.unary(CheckedRequest { payload, ..Default::default() }).await),
            Code::OutOfRange
        );
    }
}

/// Sends a message that is small on the wire and large in memory.
#[tokio::test]
async fn a_message_that_is_large_after_decompression_is_refused() {
    for transport in OURS {
        let gzip = tonic::codec::CompressionEncoding::Gzip;
        let mut client = TestServiceClient::new(channel(transport).await).send_compressed(gzip);
        let body: Bytes = vec![0; 17 << 20].into();
        let payload = Some(Payload { body, ..Default::default() });
        let ended = client.unary_call(SimpleRequest { payload, ..Default::default() }).await;
        assert_eq!(code(ended), Code::ResourceExhausted);
    }
}

#[tokio::test]
async fn half_duplex_replies_after_all_requests() {
    for transport in OURS {
        let mut client = TestServiceClient::new(channel(transport).await);
        let requests = [request_of(3, 0), request_of(5, 1000)];
        let mut replies = client.half_duplex_call(tokio_stream::iter(requests)).await.unwrap().into_inner();
        for size in [3, 5] {
            assert_eq!(replies.message().await.unwrap().unwrap().payload.unwrap().body.len(), size);
        }
        assert_eq!(replies.message().await.unwrap(), None);

        let many = StreamingOutputCallRequest {
            response_parameters: vec![ResponseParameters::default(); 40_000],
            ..Default::default()
        };
        let ended = client.half_duplex_call(tokio_stream::iter([many.clone(), many])).await;
        assert_eq!(code(ended), Code::ResourceExhausted);
    }
}

#[tokio::test]
async fn unknown_status_codes_become_unknown() {
    for transport in OURS {
        let mut client = TestServiceClient::new(channel(transport).await);
        for wrong in [-5, 17, i32::MAX] {
            let response_status = Some(EchoStatus { code: wrong, message: "\u{0}\r\n".to_owned() });
            let ended = client.unary_call(SimpleRequest { response_status, ..Default::default() }).await;
            assert_eq!(code(ended), Code::Unknown, "code {wrong}");
        }
    }
}

/// Sends a message with a wrong flag in the middle of a stream.
#[tokio::test]
async fn an_unexpected_flag_is_refused() {
    for transport in OURS {
        let mut client = TestServiceClient::new(channel(transport).await);
        let expecting = |value| StreamingInputCallRequest {
            expect_compressed: Some(crate::proto::testing::BoolValue { value }),
            ..Default::default()
        };
        let requests = tokio_stream::iter([expecting(false), expecting(true)]);
        assert_eq!(code(client.streaming_input_call(Request::new(requests)).await), Code::InvalidArgument);
    }
}

/// Checks that stock tools find the services.
#[tokio::test]
async fn health_and_reflection_answer() {
    use tonic_health::pb::health_client::HealthClient;
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

    for transport in OURS {
        let channel = channel(transport).await;
        let service = "grpc.testing.TestService".to_owned();
        let request = tonic_health::pb::HealthCheckRequest { service };
        assert_eq!(HealthClient::new(channel.clone()).check(request).await.unwrap().into_inner().status, 1);

        let message_request = Some(MessageRequest::ListServices(String::new()));
        let request = ServerReflectionRequest { host: String::new(), message_request };
        let mut client = ServerReflectionClient::new(channel);
        let call = client.server_reflection_info(tokio_stream::iter([request]));
        let reply = call.await.unwrap().into_inner().message().await.unwrap().unwrap();
        let Some(MessageResponse::ListServicesResponse(list)) = reply.message_response else {
            panic!("{reply:?}");
        };
        let names: Vec<_> = list.service.iter().map(|service| service.name.as_str()).collect();
        for expected in ["grpc.testing.TestService", "tonic_rdma.interop.v1.Checked", "grpc.health.v1.Health"]
        {
            assert!(names.contains(&expected), "{names:?}");
        }
    }
}

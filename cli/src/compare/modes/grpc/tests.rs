//! Tests of the gRPC client against the services.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::net::SocketAddr;
use std::time::Duration;

use tonic::transport::Server;
use tonic_rdma_commands::payload::content::Content;
use tonic_rdma_commands::payload::reduce::{Reduced, reduce_all};
use tonic_rdma_proto::transfer::Check;

use crate::compare::modes::call_error::CallError;
use crate::compare::modes::grpc::client::{CallSettings, GrpcCaller, tcp};
use crate::compare::modes::grpc::service::TransferService;
use crate::compare::modes::mode::Mode;
use crate::compare::operations::{CallPayload, Form, Operation, Operations};
use crate::compare::plan::Direction;
use crate::measure::settings::Http2;
use crate::measure::transport::{self, Encode, LOCALHOST, tcp_listener};
use crate::workload::Workload;

/// Starts a service in this process and returns its address.
fn serve() -> SocketAddr {
    serve_with(TransferService::default())
}

fn serve_with(service: TransferService) -> SocketAddr {
    let incoming = tcp_listener(LOCALHOST).unwrap();
    let address = incoming.local_addr().unwrap();
    let server = Server::builder().add_service(service.transfer()).add_service(service.exchange());
    let server = server.add_optional_service(service.reference());
    tokio::spawn(server.serve_with_incoming(incoming));
    address
}

#[tokio::test]
async fn a_wrong_byte_is_an_error_and_names_its_place() {
    let address = serve();
    for encode in [Encode::Copy, Encode::Gather] {
        let settings = CallSettings { encode, ..CallSettings::default() };
        let mut caller =
            GrpcCaller::new(tcp(address, Http2::DEFAULT).await.unwrap(), Mode::GrpcTcp, settings);

        let right = put(100_000, 3);
        for check in [Check::All, Check::Stamps] {
            caller.put(&right, check).await.unwrap();
        }
        let mut wrong = right.buffers[0].to_vec();
        wrong[70_001] ^= 4;
        let wrong = CallPayload { buffers: vec![wrong.into()], ..right.clone() };
        let error = caller.put(&wrong, Check::All).await.unwrap_err();
        assert!(matches!(error, CallError::BufferContent { buffer: 0, offset: 70_001 }), "{error}");
        let stale = CallPayload { seed: right.seed + 1, ..right };
        let error = caller.put(&stale, Check::Stamps).await.unwrap_err();
        assert!(matches!(error, CallError::BufferContent { buffer: 0, offset: 0 }), "{error}");
        assert!(caller.usage().await.unwrap().cpu > Duration::ZERO);
    }
}

#[tokio::test]
async fn payloads_by_reference_are_checked_as_others_are() {
    let service = TransferService::reducing(true).up_to(100_000);
    let address = serve_with(service.fetching(transport::fetching(None).unwrap().calls_itself(), false));
    let channel = tcp(address, Http2::DEFAULT).await.unwrap();
    let mut caller = GrpcCaller::new(channel, Mode::GrpcReferenceTcp, REDUCING);
    caller.own(Mode::GrpcReferenceTcp, Http2::DEFAULT, None).await.unwrap();
    let right = put(100_000, 3);
    let several = message(&mut Content::new(1000, 9).unwrap(), &[10, 500, 3]);
    for check in [Check::All, Check::Stamps] {
        caller.put(&right, check).await.unwrap();
        caller.push(&several, check).await.unwrap();
    }
    let mut wrong = right.buffers[0].to_vec();
    wrong[70_001] ^= 4;
    let wrong = CallPayload { buffers: vec![wrong.into()], ..right.clone() };
    let error = caller.put(&wrong, Check::All).await.unwrap_err();
    assert!(matches!(error, CallError::BufferContent { buffer: 0, offset: 70_001 }), "{error}");
    let error = caller.put(&wrong, Check::Stamps).await.unwrap_err();
    assert!(matches!(error, CallError::Consumed { .. }), "{error}");
    let error = caller.put(&put(2_000_000, 3), Check::Stamps).await.unwrap_err();
    assert!(error.to_string().contains("max_fetch_bytes"), "{error}");
    caller.end().await.unwrap();
    // A receiver that fetched over TCP where a device had to read is found.
    let service =
        TransferService::default().fetching(transport::fetching(None).unwrap().calls_itself(), true);
    let channel = tcp(serve_with(service), Http2::DEFAULT).await.unwrap();
    let mut caller = GrpcCaller::new(channel, Mode::GrpcReferenceTcp, CallSettings::default());
    caller.own(Mode::GrpcReferenceTcp, Http2::DEFAULT, None).await.unwrap();
    caller.put(&right, Check::All).await.unwrap();
    assert!(caller.end().await.unwrap_err().to_string().contains("by another path"));
}

/// Settings of a client that expects the results of consuming.
const REDUCING: CallSettings =
    CallSettings { encode: Encode::Copy, direction: Direction::Up, reduces: true, origin: 0 };

fn put(len: usize, seed: u64) -> CallPayload {
    message(&mut Content::new(len, seed).unwrap(), &[len])
}

fn message(content: &mut Content, lengths: &[usize]) -> CallPayload {
    let seed = content.seed();
    let buffers: Vec<_> = lengths.iter().map(|len| content.cut(*len)).collect();
    let reduced = Some(reduce_all(buffers.iter().map(|buffer| &buffer[..])));
    CallPayload { seed, buffers, reduced, pulls: None }
}

#[tokio::test]
async fn the_largest_element_that_the_server_found_is_compared() {
    let channel = tcp(serve_with(TransferService::reducing(true)), Http2::DEFAULT).await.unwrap();
    let mut reducing = GrpcCaller::new(channel, Mode::GrpcTcp, REDUCING);
    let right = put(100_001, 3);
    let push = message(&mut Content::new(1000, 9).unwrap(), &[10, 500, 3]);
    reducing.put(&right, Check::Stamps).await.unwrap();
    reducing.push(&push, Check::Stamps).await.unwrap();

    let other = right.reduced.map(|reduced| Reduced { maximum: -1.0, ..reduced });
    let error = reducing.put(&CallPayload { reduced: other, ..right.clone() }, Check::Stamps).await;
    assert!(error.unwrap_err().to_string().contains("maximum: -1.0"));
    let error = reducing.push(&CallPayload { reduced: None, ..push }, Check::Stamps).await.unwrap_err();
    assert!(matches!(error, CallError::Consumed { sent: None, arrived: Some(_) }) && error.is_mismatch());

    // A server that does not consume is found.
    let channel = tcp(serve(), Http2::DEFAULT).await.unwrap();
    let mut reducing = GrpcCaller::new(channel, Mode::GrpcTcp, REDUCING);
    let error = reducing.put(&right, Check::Stamps).await.unwrap_err();
    assert!(matches!(error, CallError::Consumed { arrived: None, .. }), "{error}");
}

#[tokio::test]
async fn a_torn_middle_that_stamps_miss_is_found_at_the_end_of_the_trial() {
    let right = Operations::new(Workload::Size(1 << 20), 3, true).unwrap();
    let torn = right.torn(500_032..500_096);
    let channel = tcp(serve(), Http2::DEFAULT).await.unwrap();
    let mut caller = GrpcCaller::new(channel, Mode::GrpcTcp, CallSettings::default());
    for number in 0..4 {
        caller.run(&right.take(number), Check::Stamps, 1).await.unwrap();
    }
    assert_eq!(caller.end().await.unwrap(), 1);
    assert_eq!(caller.end().await.unwrap(), 0);
    for number in 0..4 {
        caller.run(&torn.take(number), Check::Stamps, 1).await.unwrap();
    }
    let error = caller.end().await.unwrap_err();
    let at = |offset: u64| (499_840..500_096).contains(&offset);
    assert!(matches!(error, CallError::BufferContent { offset, .. } if at(offset)), "{error}");

    // A server that consumes finds the wrong bytes in each call.
    let channel = tcp(serve_with(TransferService::reducing(true)), Http2::DEFAULT).await.unwrap();
    let mut caller = GrpcCaller::new(channel, Mode::GrpcTcp, REDUCING);
    caller.run(&right.take(0), Check::Stamps, 1).await.unwrap();
    let error = caller.run(&torn.take(0), Check::Stamps, 1).await.unwrap_err();
    assert!(matches!(error, CallError::Consumed { .. }), "{error}");
}

#[tokio::test]
async fn a_torn_buffer_of_several_is_found_at_the_end_of_the_trial() {
    let channel = tcp(serve(), Http2::DEFAULT).await.unwrap();
    let mut caller = GrpcCaller::new(channel, Mode::GrpcTcp, CallSettings::default());
    let mut torn = message(&mut Content::new(200_000, 9).unwrap(), &[10, 100_000, 3]);
    let mut buffer = torn.buffers[1].to_vec();
    buffer[50_000..50_008].fill(0);
    torn.buffers[1] = buffer.into();
    caller.push(&torn, Check::Stamps).await.unwrap();
    let error = caller.end().await.unwrap_err();
    assert!(matches!(error, CallError::BufferContent { buffer: 1, offset: 50_000 }), "{error}");
}

#[tokio::test]
async fn buffers_in_another_order_are_an_error_that_says_so() {
    let address = serve();
    for encode in [Encode::Copy, Encode::Gather] {
        let settings = CallSettings { encode, ..CallSettings::default() };
        let mut caller =
            GrpcCaller::new(tcp(address, Http2::DEFAULT).await.unwrap(), Mode::GrpcTcp, settings);
        let push = message(&mut Content::new(300_000, 9).unwrap(), &[10, 100_000, 10_240, 100_000, 10]);
        for check in [Check::All, Check::Stamps] {
            caller
                .run(&Operation { form: Form::Push, calls: [push.clone()].into() }, check, 1)
                .await
                .unwrap();
            let mut swapped = push.clone();
            swapped.buffers.swap(1, 3);
            let error = caller
                .run(&Operation { form: Form::Push, calls: [swapped].into() }, check, 1)
                .await
                .unwrap_err();
            assert!(matches!(error, CallError::BufferContent { buffer: 1, offset: 0 }), "{error}");
        }
        let mut wrong = push.clone();
        let mut bytes = wrong.buffers[3].to_vec();
        bytes[99_999] ^= 1;
        wrong.buffers[3] = bytes.into();
        let error = caller
            .run(&Operation { form: Form::Push, calls: [wrong].into() }, Check::Stamps, 1)
            .await
            .unwrap_err();
        assert!(matches!(error, CallError::BufferContent { buffer: 3, offset: 99_999 }), "{error}");
        assert!(error.is_mismatch());
    }
}

#[tokio::test]
async fn one_wrong_message_fails_a_set_at_every_width() {
    let mut caller =
        GrpcCaller::new(tcp(serve(), Http2::DEFAULT).await.unwrap(), Mode::GrpcTcp, CallSettings::default());
    let mut content = Content::new(100_000, 2).unwrap();
    let set: Vec<CallPayload> = (1..20).map(|index| message(&mut content, &[index * 100])).collect();
    let mut spoilt = set.clone();
    spoilt[7].seed += 1;
    for width in [1, 4, 100] {
        caller
            .run(&Operation { form: Form::Set, calls: set.clone().into() }, Check::All, width)
            .await
            .unwrap();
        let error = caller
            .run(&Operation { form: Form::Set, calls: spoilt.clone().into() }, Check::All, width)
            .await
            .unwrap_err();
        assert!(matches!(error, CallError::BufferContent { buffer: 0, offset: 0 }), "{error}");
    }
}

//! Tests of both halves in one process.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tonic::Code;
use tonic::transport::Server;
use tonic_rdma_commands::payload::reduce::Reduced;
use tonic_rdma_proto::placement::placement_client::PlacementClient;
use tonic_rdma_proto::placement::placement_server::PlacementServer;
use tonic_rdma_proto::placement::prepare_request::Load as Wanted;
use tonic_rdma_proto::placement::{BeginRequest, EndRequest, PrepareRequest};
use tonic_rdma_proto::transfer::Check;

use crate::compare::modes::call_error::CallError;
use crate::compare::modes::grpc::client;
use crate::compare::modes::mode::Mode;
use crate::compare::modes::placement::geometry::Discrepancy;
use crate::compare::modes::placement::{PlacementCaller, PlacementService};
use crate::compare::operations::{Operation, Operations, Position};
use crate::measure::settings::{Consume, Http2};
use crate::measure::transport::{LOCALHOST, Rdma, tcp_listener};
use crate::workload::{Mix, Model, Workload};

/// Starts a receiver in this process, and returns its control connection and its device.
async fn serve() -> (Rdma, tonic::transport::Channel, String) {
    let rdma = Rdma::new("soft").unwrap();
    let device = rdma.tensor_device().bind("127.0.0.1:0").await.unwrap();
    let endpoint = device.endpoint();
    let incoming = tcp_listener(LOCALHOST).unwrap();
    let address = incoming.local_addr().unwrap();
    let service = PlacementServer::new(PlacementService::new(device, Consume::Auto));
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    (rdma, client::tcp(address, Http2::DEFAULT).await.unwrap(), endpoint)
}

async fn caller(mode: Mode) -> PlacementCaller {
    let (rdma, control, endpoint) = serve().await;
    let (caller, verdict) =
        PlacementCaller::connect(mode, control, &endpoint, (&rdma, LOCALHOST), true).await.unwrap();
    assert_eq!(verdict.provider, "soft");
    caller
}

/// Makes a trial of one operation.
async fn trial(caller: &mut PlacementCaller, operation: &Operation, check: Check) -> Result<(), CallError> {
    caller.begin(check).await?;
    let run = caller.run(operation).await;
    let end = caller.end().await;
    run.map(drop).and(end)
}

#[tokio::test]
async fn operations_arrive_unchanged_for_every_load() {
    for mode in Mode::all().iter().copied().filter(|mode| mode.carries_tensors()) {
        let mut caller = caller(mode).await;
        for load in [
            Workload::Size(1),
            Workload::Size(64),
            Workload::Size(100_001),
            Workload::Mix(Mix::Random),
            Workload::Model(Model::Gru),
            Workload::Blocks,
        ] {
            let operations = Operations::new(load, 9, true).unwrap();
            caller.prepare(&operations, 3).await.unwrap();
            for number in 0..5 {
                for check in [Check::All, Check::Stamps] {
                    let ended = trial(&mut caller, &operations.take(number), check).await;
                    assert!(ended.is_ok(), "{mode}, {load}, operation {number}: {ended:?}");
                }
            }
            caller.release().await;
        }
    }
}

#[tokio::test]
async fn wrong_content_another_operation_and_a_wrong_maximum_are_found() {
    let operations = Operations::new(Workload::Size(100_000), 3, true).unwrap();
    let mut caller = caller(Mode::RdmaCp).await;
    caller.prepare(&operations, 1).await.unwrap();
    let right = operations.take(0);
    let with = |at: usize| {
        right.changed(|put| {
            let mut payload = put.buffers[0].to_vec();
            payload[at] ^= 1;
            put.buffers = vec![payload.into()];
        })
    };
    let error = trial(&mut caller, &with(70_001), Check::All).await.unwrap_err();
    assert!(matches!(error, CallError::BufferContent { buffer: 0, offset: 70_001 }), "{error}");
    let error = trial(&mut caller, &with(99_999), Check::Stamps).await.unwrap_err();
    assert!(matches!(error, CallError::BufferContent { buffer: 0, offset: 99_999 }), "{error}");
    // A seed of no operation.
    let error = trial(&mut caller, &with(0), Check::Stamps).await.unwrap_err();
    assert!(matches!(error, CallError::BufferContent { buffer: 0, offset: 0 }), "{error}");
    let other = right.reduced().map(|reduced| Reduced { maximum: -1.0, ..reduced });
    let wrong = right.changed(|put| put.reduced = other);
    let error = trial(&mut caller, &wrong, Check::Stamps).await.unwrap_err();
    assert!(matches!(error, CallError::Discrepancy(Discrepancy::Consumed)) && error.is_mismatch(), "{error}");
    trial(&mut caller, &right, Check::All).await.unwrap();
}

#[tokio::test]
async fn a_torn_middle_is_found_in_every_operation() {
    let operations = Operations::new(Workload::Size(1 << 20), 3, true).unwrap().torn(500_032..500_096);
    for mode in Mode::all().iter().copied().filter(|mode| mode.carries_tensors()) {
        let mut caller = caller(mode).await;
        caller.prepare(&operations, 1).await.unwrap();
        for number in 0..4 {
            let error = trial(&mut caller, &operations.take(number), Check::Stamps).await.unwrap_err();
            let seen_by_digest = matches!(error, CallError::Discrepancy(Discrepancy::Consumed));
            assert!(seen_by_digest && error.is_mismatch(), "{mode}: {error}");
        }
        caller.release().await;
    }
}

#[tokio::test]
async fn unprepared_and_invalid_requests_are_errors() {
    let operation = Operations::new(Workload::Size(64), 3, true).unwrap().take(0);
    let mut unprepared = caller(Mode::RdmaZerocp).await;
    assert!(unprepared.begin(Check::All).await.is_err());
    let error = unprepared.run(&operation).await.unwrap_err();
    assert!(matches!(error, CallError::Unprepared) && !error.is_mismatch(), "{error}");

    let (_, control, _) = serve().await;
    let mut control = PlacementClient::new(control);
    let mode = || Mode::RdmaCp.name().to_owned();
    for (mode, load, depth, code) in [
        ("grpc-tcp".to_owned(), Some(Wanted::Bytes(64)), 1, Code::InvalidArgument),
        (mode(), None, 1, Code::InvalidArgument),
        (mode(), Some(Wanted::Bytes(0)), 1, Code::InvalidArgument),
        (mode(), Some(Wanted::Workload("resnet".to_owned())), 1, Code::InvalidArgument),
        (mode(), Some(Wanted::Bytes(64)), 0, Code::Internal),
        (mode(), Some(Wanted::Bytes(64)), 1 << 20, Code::Internal),
        (mode(), Some(Wanted::Bytes(u64::MAX)), 1, Code::Internal),
    ] {
        let request =
            PrepareRequest { mode, load: load.clone(), seed: 1, depth, ..PrepareRequest::default() };
        let refusal = control.prepare(request).await.unwrap_err();
        assert_eq!(refusal.code(), code, "{load:?}: {refusal}");
    }
    let begin = |every_byte| BeginRequest { mode: mode(), every_byte };
    assert_eq!(control.begin(begin(true)).await.unwrap_err().code(), Code::FailedPrecondition);
    let load = Some(Wanted::Bytes(64));
    let request = PrepareRequest { mode: mode(), load, seed: 1, depth: 1, ..PrepareRequest::default() };
    control.prepare(request.clone()).await.unwrap();
    for device in ["", "nowhere", "127.0.0.2:7"] {
        let request =
            PrepareRequest { mode: Mode::RdmaNamed.name().into(), device: device.into(), ..request.clone() };
        let refusal = control.prepare(request).await.unwrap_err();
        assert!(
            refusal.code() == Code::InvalidArgument && refusal.message().contains("caller's address"),
            "{refusal}"
        );
    }
    assert_eq!(control.end(EndRequest { mode: mode() }).await.unwrap_err().code(), Code::Aborted);
    control.begin(begin(true)).await.unwrap();
    assert_eq!(control.begin(begin(true)).await.unwrap_err().code(), Code::Aborted);
    assert_eq!(control.end(EndRequest { mode: mode() }).await.unwrap().into_inner().operations, 0);
}

#[tokio::test]
async fn a_trial_that_is_given_up_does_not_affect_the_next() {
    let operations = Operations::new(Workload::Size(64), 3, true).unwrap();
    for mode in [Mode::RdmaZerocp, Mode::RdmaZerocpAwait, Mode::RdmaDynamic, Mode::RdmaNamed] {
        let mut sender = caller(mode).await;
        sender.prepare(&operations, 1).await.unwrap();
        // No trial was begun, so no task polls the slots. Then the slots are released.
        let mut second = sender.clone();
        let operation = operations.take(0);
        let run = tokio::spawn(async move { second.run(&operation).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!run.is_finished());
        run.abort();
        assert!(run.await.unwrap_err().is_cancelled());
        sender.release().await;
        sender.prepare(&operations, 1).await.unwrap();
        trial(&mut sender, &operations.take(1), Check::All).await.unwrap();
    }
}

#[tokio::test]
async fn futures_wait_for_all_operations_in_flight() {
    for (load, callers) in [
        (Workload::Size(64), 1),
        (Workload::Size(100_000), 3),
        (Workload::Mix(Mix::Random), 2),
        (Workload::Model(Model::Gru), 1),
        (Workload::Size(64), 1500),
    ] {
        let operations = Operations::new(load, 7, true).unwrap();
        let mut sender = caller(Mode::RdmaZerocpAwait).await;
        sender.prepare(&operations, callers).await.unwrap();
        for callers in [1, callers] {
            sender.begin(Check::Stamps).await.unwrap();
            let end = Instant::now() + Duration::from_millis(1);
            let position = Position::default();
            let sending =
                sender.clone().keep_sending(operations.clone(), Arc::clone(&position), callers, end);
            let (done, error) = sending.await;
            assert!(error.is_none(), "{error:?}");
            assert!(done.len() >= callers && done.len() == position.load(Ordering::Relaxed));
            sender.end().await.unwrap();
        }
        sender.release().await;
    }
}

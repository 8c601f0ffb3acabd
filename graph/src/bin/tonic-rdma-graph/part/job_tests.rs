//! Jobs of callers that are not to be trusted.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::net::Ipv4Addr;
use std::time::Instant;

use tonic_rdma_graph::schedule::ReceiveMode;

use super::*;
use crate::onnx;

fn job() -> Job {
    Job {
        part: 0,
        parts: 1,
        model: "model.onnx".to_owned(),
        symbols: Vec::new(),
        lengths: vec![1],
        sets: 1,
        seed: 1,
        assignment: vec![0, 0],
        modes: vec![TransferMode::GrpcTcp],
        receive: ReceiveMode::PollingAsync,
        window: 1,
        memory: Some(1 << 20),
        threads: 1,
        limit_ms: 1000,
    }
}

/// Begins the job of a part, and returns why it is refused.
fn refused(job: Job, content: &[u8]) -> String {
    let started = RunningPart::start(job, content, Ipv4Addr::LOCALHOST.into(), |_| Ok(None));
    started.err().unwrap().with_causes()
}

#[test]
fn a_part_reads_no_file_that_a_job_names() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("passwd"), "16 secret bytes.").unwrap();
    let model = folder.path().join("x").to_str().unwrap().to_owned();
    let secret = onnx::in_file(onnx::weights("w", &[4]), "passwd");
    let of_graph = onnx::model(17, "x:float[4]", "y:float[4]", "y = Add x w", vec![secret.clone()]);
    let mut of_node = onnx::model(17, "x:float[4]", "y:float[4]", "c = Constant; y = Add x c", vec![]);
    of_node.graph.as_mut().unwrap().node[0].attribute.push(onnx::of_tensor("value", secret));
    for content in [of_graph, of_node] {
        let error = refused(Job { model: model.clone(), ..job() }, &onnx::encoded(&content));
        assert!(error.contains("the tensor w is in another file (\"passwd\")"), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}

#[test]
fn hostile_numbers_are_refused_at_once() {
    let began = Instant::now();
    for number in [0, 1025, 1 << 60] {
        let error = refused(Job { window: number, ..job() }, &onnx::convolutions());
        assert!(error.contains(&format!("window: {number}; it takes 1 to 1024")), "{error}");
    }
    for number in [0, 65] {
        let error = refused(Job { threads: number, ..job() }, &onnx::convolutions());
        assert!(error.contains(&format!("threads: {number}; it takes 1 to 64")), "{error}");
    }
    assert!(began.elapsed() < Duration::from_secs(10));
}

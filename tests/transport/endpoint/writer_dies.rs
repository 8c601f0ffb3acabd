//! A process writes, flushes and ends. The reader first gets the bytes that had arrived, and then the error.

use std::io::ErrorKind;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt as _;
use tonic_rdma::{EndpointStream, Listener, Verdict};

use support::{Child, Content, Runtime, WRITER_SEED, config, listen};

/// The length of the content and of the pieces written, and the length from which a write goes by rendezvous.
#[derive(Clone, Copy, Debug)]
struct Written {
    length: usize,
    piece: usize,
    threshold: u64,
}

/// Messages that go into the reader's receive buffers.
const EAGER: [Written; 3] = [
    Written { length: 1, piece: 1, threshold: u64::MAX },
    Written { length: 5_000, piece: 100, threshold: u64::MAX },
    Written { length: 500_000, piece: 100_000, threshold: u64::MAX },
];
/// A message that stays in the writer's memory until the reader has fetched it.
const RENDEZVOUS: Written = Written { length: 600_000, piece: 600_000, threshold: 1 };

/// Starts a child that connects to `listener` and writes in this role.
async fn writer(role: &'static str, listener: &mut Listener, written: Written) -> (Child, EndpointStream) {
    let arguments = format!("{role} {} {} {}", listener.local_addr(), written.length, written.piece);
    let threshold = format!("RDMA_EAGER_THRESHOLD={}", written.threshold);
    let child = tokio::task::spawn_blocking(move || Child::start(&["env", &threshold], &arguments));
    let stream = listener.next().await.unwrap();
    assert_eq!(stream.info().verdict(), Verdict::Rdma, "{}", stream.info().reason());
    (child.await.unwrap(), stream)
}

/// Waits until the connection has failed. Reads nothing.
async fn failed(stream: &mut EndpointStream) {
    std::future::poll_fn(|context| stream.poll_delivered(context)).await.expect_err("the writer has gone");
}

/// Reads until the connection fails, checks that the error is that of a dead process, and returns the bytes
/// before the error.
async fn read_to_the_failure(mut stream: EndpointStream) -> Vec<u8> {
    let mut received = Vec::new();
    let end = stream.read_to_end(&mut received).await;
    let error = end.expect_err("a death is no orderly end");
    assert!(matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted), "{error:?}");
    received
}

fn check(received: &[u8], written: Written) {
    Content::new(WRITER_SEED).check(received);
    assert_eq!(received.len(), written.length, "bytes that arrived of {written:?}");
}

#[test]
fn flushed_bytes_arrive_although_the_writer_exits_at_once() {
    for runtime in [Runtime::Idle, Runtime::MultiThread] {
        for written in EAGER {
            runtime.run(async {
                let mut listener = listen(config()).await;
                let (mut child, stream) = writer("write-and-exit", &mut listener, written).await;
                check(&read_to_the_failure(stream).await, written);
                assert!(child.process.wait().unwrap().success());
            });
        }
    }
}

/// The reader's runtime is blocked until the writer has ended. Then the bytes in the writer's memory are
/// lost, and the reader gets an error and no orderly end.
#[test]
fn flushed_bytes_wait_for_a_reader_that_is_late() {
    for written in EAGER.into_iter().chain([RENDEZVOUS]) {
        Runtime::Idle.run(async {
            let mut listener = listen(config()).await;
            let (mut child, mut stream) = writer("write-and-exit", &mut listener, written).await;
            // Blocks the runtime, so that the reader fetches nothing.
            assert!(child.process.wait().unwrap().success());
            failed(&mut stream).await;
            let received = read_to_the_failure(stream).await;
            if written.threshold == u64::MAX {
                check(&received, written);
            } else {
                Content::new(WRITER_SEED).check(&received);
            }
        });
    }
}

/// A writer that has waited for the delivery may exit, after any kind of write.
#[test]
fn delivered_bytes_stay_although_the_writer_exits() {
    for written in [EAGER[2], RENDEZVOUS, Written { length: 5_000_000, ..RENDEZVOUS }] {
        Runtime::Idle.run(async {
            let mut listener = listen(config()).await;
            let (mut child, mut stream) = writer("deliver-and-exit", &mut listener, written).await;
            let mut received = Vec::new();
            stream.read_to_end(&mut received).await.unwrap();
            check(&received, written);
            stream.shutdown().await.unwrap();
            std::future::poll_fn(|context| stream.poll_delivered(context)).await.unwrap();
            let end = tokio::task::spawn_blocking(move || child.process.wait()).await.unwrap();
            assert!(end.unwrap().success());
        });
    }
}

/// The test reads nothing before the kill of the writer and the failure of the connection.
#[test]
fn bytes_that_arrived_before_a_kill_are_read_first() {
    for written in EAGER.into_iter().chain([RENDEZVOUS]) {
        Runtime::Idle.run(async {
            let mut listener = listen(config()).await;
            let (mut child, mut stream) = writer("write-and-wait", &mut listener, written).await;
            // The writer waits, so that everything arrives before the kill.
            loop {
                let counters = stream.info().counters();
                let arrived = counters.eager_received_bytes + counters.rendezvous_received_bytes;
                if arrived == written.length as u64 {
                    break;
                }
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
            child.process.kill().unwrap();
            child.process.wait().unwrap();
            failed(&mut stream).await;
            check(&read_to_the_failure(stream).await, written);
        });
    }
}

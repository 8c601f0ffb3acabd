//! A task whose reads or writes never have to wait lets the other tasks of its thread run.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic_rdma::EagerThreshold;

use support::{Content, Runtime, config, pair};

/// Reads or writes of one byte each.
const STEPS: usize = 100_000;
/// Most steps between two turns of another task. tokio's budget of a task is 128 steps.
const BETWEEN_TURNS: usize = 1000;

/// Counts the turns that another task of this thread gets while `work` runs in a task of its own.
async fn turns_during(work: impl Future<Output = ()> + Send + 'static) -> usize {
    let turns = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&turns);
    // `yield_now` would wait until the runtime looks for events, which is after 61 turns of other tasks.
    let ticker = tokio::spawn(poll_fn(move |context| {
        counted.fetch_add(1, Ordering::Relaxed);
        context.waker().wake_by_ref();
        Poll::<()>::Pending
    }));
    let work = tokio::spawn(async move {
        let before = turns.load(Ordering::Relaxed);
        work.await;
        turns.load(Ordering::Relaxed) - before
    });
    let turns = work.await.unwrap();
    ticker.abort();
    turns
}

#[test]
fn a_reader_of_a_full_stream_lets_other_tasks_run() {
    for runtime in [Runtime::CurrentThread, Runtime::Idle] {
        runtime.run(async {
            // One large chunk, which has arrived as soon as its first byte can be read.
            let config = config().eager_threshold(EagerThreshold::Bytes(4096)).chunk_size(2 * STEPS);
            let (mut client, mut server) = pair(config).await;
            let content = Content::new(3).take(2 * STEPS);
            client.write_all(&content).await.unwrap();
            client.flush().await.unwrap();
            assert_eq!(server.read_u8().await.unwrap(), content[0]);
            let turns = turns_during(async move {
                for step in 0..STEPS {
                    assert_eq!(server.read_u8().await.unwrap(), content[1 + step]);
                }
            });
            let turns = turns.await;
            assert!(turns >= STEPS / BETWEEN_TURNS, "{turns} turns beside {STEPS} reads");
            drop(client);
        });
    }
}

#[test]
fn a_reader_of_a_large_message_lets_other_tasks_run() {
    const PIECE: usize = 16 << 10;
    const PIECES: usize = 64;
    /// Most pieces between two turns of another task.
    const BETWEEN_TURNS: usize = 8;
    for runtime in [Runtime::CurrentThread, Runtime::Idle] {
        runtime.run(async {
            // One large chunk, which has arrived as soon as its first byte can be read.
            let config = config().eager_threshold(EagerThreshold::Bytes(4096)).chunk_size(2 * PIECE * PIECES);
            let (mut client, mut server) = pair(config).await;
            let content = Content::new(3).take(1 + PIECE * PIECES);
            client.write_all(&content).await.unwrap();
            client.flush().await.unwrap();
            assert_eq!(server.read_u8().await.unwrap(), content[0]);
            let turns = turns_during(async move {
                let mut piece = vec![0; PIECE];
                for expected in content[1..].chunks(PIECE) {
                    server.read_exact(&mut piece).await.unwrap();
                    assert!(piece == expected, "other bytes than were sent");
                }
            });
            let turns = turns.await;
            assert!(turns >= PIECES / BETWEEN_TURNS, "{turns} turns beside {PIECES} reads of {PIECE} bytes");
            drop(client);
        });
    }
}

#[test]
fn a_writer_with_room_lets_other_tasks_run() {
    for runtime in [Runtime::CurrentThread, Runtime::Idle] {
        runtime.run(async {
            let (mut client, server) = pair(config()).await;
            // The gathered bytes fill fewer messages than the peer has receive buffers.
            let turns = turns_during(async move {
                for step in 0..STEPS {
                    client.write_u8(step as u8).await.unwrap();
                }
            });
            let turns = turns.await;
            assert!(turns >= STEPS / BETWEEN_TURNS, "{turns} turns beside {STEPS} writes");
            drop(server);
        });
    }
}

//! A task that blocks its thread, and says so to tokio, does not delay other connections. A task that does not
//! say so may keep the runtime's driver from all others, as with TCP.

use std::sync::mpsc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use support::{Runtime, config, echo_stream, pair};

/// An arrival wakes one connection's reader, which blocks its worker until the other connection has made a
/// round trip. The test has many rounds, so that the reader runs on both workers.
#[test]
fn a_reader_that_blocks_its_thread_does_not_stop_the_others() {
    const ROUNDS: usize = 50;
    Runtime::MultiThread.run(async {
        let (mut blocked, mut blocking) = pair(config()).await;
        let (mut client, server) = pair(config()).await;
        tokio::spawn(echo_stream(server));
        let (go, wait) = mpsc::channel::<()>();
        let reader = tokio::spawn(async move {
            for round in 0..ROUNDS {
                blocking.read_u8().await.unwrap();
                let waited = tokio::task::block_in_place(|| wait.recv_timeout(Duration::from_secs(60)));
                waited.unwrap_or_else(|_| panic!("round {round}: the other connection stood still"));
            }
        });
        for round in 0..ROUNDS {
            blocked.write_u8(1).await.unwrap();
            blocked.flush().await.unwrap();
            // In most rounds the reader waits already, in some not yet.
            if round % 4 != 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            client.write_all(b"round").await.unwrap();
            client.flush().await.unwrap();
            client.read_exact(&mut [0; 5]).await.unwrap();
            go.send(()).unwrap();
        }
        reader.await.unwrap();
    });
}

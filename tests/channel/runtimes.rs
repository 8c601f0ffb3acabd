//! Timers and sockets of a runtime live while its calls look for their replies; calls work from any runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tonic::Code;
use tonic_rdma::RdmaChannel;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;

use crate::servers::{Kind, everywhere};
use support::{Runtime, ScriptedGreeter, config, say};

#[test]
fn timers_and_sockets_live_while_calls_run() {
    everywhere(async |kind| {
        let running = kind.serve(&ScriptedGreeter::new()).await;
        let client = running.client().await;
        let over = Arc::new(AtomicBool::new(false));
        let mut callers = tokio::task::JoinSet::new();
        // More callers than workers.
        for _ in 0..6 {
            let (mut client, over) = (client.clone(), Arc::clone(&over));
            callers.spawn(async move {
                let mut calls = 0;
                while !over.load(Ordering::Relaxed) {
                    assert_eq!(say(&mut client, "busy").await.unwrap(), "busy");
                    calls += 1;
                }
                calls
            });
        }
        // 100 round trips of a socket and 20 ticks of a timer; a runtime whose threads all spin makes none.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let echo = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut byte = [0];
            while stream.read_exact(&mut byte).await.is_ok() {
                stream.write_all(&byte).await.unwrap();
            }
        });
        let mut stream = TcpStream::connect(address).await.unwrap();
        for round in 0..100 {
            stream.write_all(&[round]).await.unwrap();
            assert_eq!(stream.read_u8().await.unwrap(), round);
        }
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        over.store(true, Ordering::Relaxed);
        let calls: usize = callers.join_all().await.into_iter().sum();
        assert!(calls > 0);
        drop(stream);
        echo.await.unwrap();
    });
}

#[test]
fn calls_from_another_runtime_than_the_channels() {
    for home in Runtime::ALL {
        for kind in Kind::ALL {
            // A channel whose runtime runs on in a thread of its own.
            let (send, receive) = std::sync::mpsc::channel();
            let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
            let thread = std::thread::spawn(move || {
                home.run(async move {
                    let running = kind.serve(&ScriptedGreeter::new()).await;
                    let channel =
                        RdmaChannel::builder(running.endpoint()).config(config()).connect().await.unwrap();
                    send.send(channel).unwrap();
                    let _ = stopped.await;
                });
            });
            let mut client = GreeterClient::new(receive.recv().unwrap());
            for runtime in Runtime::ALL {
                runtime.run(async {
                    for number in 0..50 {
                        assert_eq!(say(&mut client, number.to_string()).await.unwrap(), number.to_string());
                    }
                });
            }
            drop((client, stop));
            thread.join().unwrap();
        }
    }
}

#[test]
fn no_call_waits_for_a_runtime_that_has_ended() {
    // Takes connections, and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = crate::servers::endpoint(silent.local_addr().unwrap());
    let home = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (alone, several) = {
        let _entered = home.enter();
        let several = RdmaChannel::balance([endpoint.clone(), endpoint.clone()]).connect_lazy();
        (RdmaChannel::builder(endpoint).connect_lazy(), several)
    };
    drop(home);
    Runtime::CurrentThread.run(async {
        for channel in [alone, several] {
            let status = say(&mut GreeterClient::new(channel), "hello").await.unwrap_err();
            assert_eq!(status.code(), Code::Unavailable, "{status}");
            assert!(status.message().contains("the channel's runtime ended"), "{status}");
        }
    });
}

#[test]
fn blocked_workers_do_not_stop_the_other_calls() {
    Runtime::MultiThread.run(async {
        let running = Kind::Native.serve(&ScriptedGreeter::new()).await;
        let client = running.client().await;
        let done = Arc::new(AtomicUsize::new(0));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let (mut client, done) = (client.clone(), Arc::clone(&done));
            tasks.spawn(async move {
                for _ in 0..50 {
                    assert_eq!(say(&mut client, "x").await.unwrap(), "x");
                    // Longer than any spin, as work between calls is.
                    std::thread::sleep(Duration::from_micros(300));
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        tasks.join_all().await;
        assert_eq!(done.load(Ordering::Relaxed), 200);
    });
}

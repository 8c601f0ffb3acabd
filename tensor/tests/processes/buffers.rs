//! Buffers by reference, when the owner or the reader dies, stops or is another process than the one that the
//! handle was sent to.

use std::io::BufRead as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use prost::Message as _;
use rustix::process::{Pid, Signal, kill_process};
use support::{Child, Runtime, announce, free_address, hex, unhex, until, within};
use tonic::transport::Server;
use tonic_rdma::{Config, Policy, RdmaIncoming, RdmaServer};
use tonic_rdma_tensor::TensorErrorKind;
use tonic_rdma_tensor::buffer::{BufferClient, BufferPool, RemoteBuffer};

use crate::{LARGE, SOON, alone, content, seed_of};

/// What carries the fetches.
#[derive(Clone, Copy, Debug)]
enum Over {
    Native,
    Tcp,
}

impl Over {
    fn named(name: &str) -> Self {
        if name == "tcp" { Self::Tcp } else { Self::Native }
    }

    fn name(self) -> &'static str {
        if matches!(self, Self::Tcp) { "tcp" } else { "native" }
    }

    fn config(self) -> Config {
        let config = Config::from_env().unwrap();
        if matches!(self, Self::Tcp) { config.policy(Policy::TcpOnly) } else { config }
    }
}

/// Serves a pool at `address`.
async fn serve(over: Over, address: &str) -> BufferPool {
    let incoming = RdmaIncoming::builder().config(over.config()).bind(address).await.unwrap();
    let owner = format!("http://{}", incoming.local_addr());
    let pool = BufferPool::builder(owner).limit(2 * LARGE as u64).build().unwrap();
    let service = pool.service();
    match over {
        Over::Native => {
            tokio::spawn(RdmaServer::new().add_service(service).serve_with_incoming(incoming));
        }
        Over::Tcp => {
            tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        }
    }
    pool
}

/// The role of an owner: shares buffers of several lengths, and announces the handles. The seed of each is
/// `first` and its index.
pub(crate) async fn own(over: &str, address: &str, first: u64) {
    let pool = serve(Over::named(over), address).await;
    let lengths = [16, 5000, 300_000, LARGE];
    let shared = lengths.into_iter().zip(first..);
    let shared: Vec<_> = shared.map(|(length, seed)| pool.share(content(seed, length)).unwrap()).collect();
    let handles: Vec<_> = shared.iter().map(|(_, handle)| text(handle)).collect();
    announce(handles.join(","));
    std::future::pending().await
}

/// The role of a reader: fetches the handles that its parent tells it, and announces each result.
pub(crate) async fn read() {
    announce("here");
    let (lines, mut told) = tokio::sync::mpsc::channel(1);
    std::thread::spawn(move || {
        std::io::stdin().lock().lines().map_while(Result::ok).all(|line| lines.blocking_send(line).is_ok())
    });
    while let Some(line) = told.recv().await {
        match handle(&line).fetch().await {
            Ok(bytes) => announce(seed_of(&bytes)),
            Err(error) => announce(format!("{:?}", error.kind())),
        }
    }
}

/// The role of a reader that fetches one handle again and again.
pub(crate) async fn read_on(text: &str) {
    announce("reads");
    let handle = handle(text);
    while handle.fetch().await.is_ok() {}
}

fn text(handle: &RemoteBuffer) -> String {
    hex(&handle.encode_to_vec()).replace('\n', "")
}

fn handle(text: &str) -> RemoteBuffer {
    RemoteBuffer::decode(&unhex(text)[..]).unwrap()
}

fn start_owner(over: Over, address: &str, first: u64) -> (Child, Vec<(u64, RemoteBuffer)>) {
    let owner = Child::start(&[], &format!("own {} {address} {first}", over.name()));
    let handles = (first..).zip(owner.word.split(',').map(handle)).collect();
    (owner, handles)
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(&child.process), signal).unwrap();
}

/// Restarts of the owner. The nightly run has more.
fn restarts() -> u64 {
    std::env::var("BUFFER_RESTARTS").map_or(12, |text| text.parse().unwrap())
}

/// Kills and restarts an owner at one address, while a reader fetches old and new handles.
fn restarted(over: Over) {
    alone(Runtime::MultiThread, async {
        let address = free_address();
        let reader = BufferClient::builder().config(over.config()).build();
        let (mut owner, handles) = start_owner(over, &address, 0);
        let known = Arc::new(Mutex::new(handles));
        let ends = Arc::new(AtomicBool::new(false));
        let load = |seed| {
            let (known, ends, reader) = (Arc::clone(&known), Arc::clone(&ends), reader.clone());
            tokio::spawn(async move {
                let mut random = fastrand::Rng::with_seed(seed);
                let (mut good, mut bad) = (0_u64, 0_u64);
                while !ends.load(Ordering::SeqCst) {
                    let (seed, handle) = {
                        let known = known.lock().unwrap();
                        known[random.usize(..known.len())].clone()
                    };
                    match reader.fetch(&handle).await {
                        Ok(bytes) => {
                            assert_eq!(seed_of(&bytes), seed, "bytes of another buffer");
                            good += 1;
                        }
                        Err(error) => {
                            let named = [
                                TensorErrorKind::PeerLost,
                                TensorErrorKind::Restarted,
                                TensorErrorKind::Timeout,
                            ];
                            assert!(named.contains(&error.kind()), "{:?}: {error}", error.kind());
                            bad += 1;
                            tokio::time::sleep(Duration::from_millis(1)).await;
                        }
                    }
                }
                (good, bad)
            })
        };
        let loads: Vec<_> = (0..3).map(load).collect();
        let mut slowest = Duration::ZERO;
        for restart in 1..=restarts() {
            drop(owner);
            let (again, handles) = start_owner(over, &address, restart * 100);
            let (back, old) = (Instant::now(), known.lock().unwrap()[0].clone());
            owner = again;
            let (seed, newest) = handles[restart as usize % handles.len()].clone();
            {
                let mut all = known.lock().unwrap();
                let kept = all.len().saturating_sub(4);
                all.drain(..kept);
                all.extend(handles);
            }
            loop {
                match reader.fetch(&newest).await {
                    Ok(bytes) => break assert_eq!(seed_of(&bytes), seed),
                    Err(error) => assert_eq!(error.kind(), TensorErrorKind::PeerLost, "{error}"),
                }
                assert!(back.elapsed() < SOON, "no fetch since the owner is back");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            slowest = slowest.max(back.elapsed());
            let error = reader.fetch(&old.1).await.unwrap_err();
            assert_eq!(error.kind(), TensorErrorKind::Restarted, "{error}");
        }
        ends.store(true, Ordering::SeqCst);
        let (mut good, mut bad) = (0, 0);
        for load in loads {
            let counts = load.await.unwrap();
            (good, bad) = (good + counts.0, bad + counts.1);
        }
        assert!(good > 0 && bad > 0, "{good} fetches, {bad} errors");
        println!("{over:?}: {good} fetches, {bad} errors; first success at most {slowest:?} after a restart");
    });
}

#[test]
fn a_restarted_owner_is_found_again_and_old_handles_say_that_it_was_restarted() {
    restarted(Over::Native);
}

#[test]
fn a_restarted_owner_is_found_again_over_tcp() {
    restarted(Over::Tcp);
}

#[test]
fn an_owner_that_stops_in_the_middle_costs_time_and_never_wrong_bytes() {
    for over in [Over::Native, Over::Tcp] {
        alone(Runtime::MultiThread, async {
            let (owner, handles) = start_owner(over, "127.0.0.1:0", 7);
            let (seed, large) = handles.into_iter().next_back().unwrap();
            let reader =
                BufferClient::builder().config(over.config()).timeout(Duration::from_millis(100)).build();
            let mut stopped = 0;
            for round in 0..4 {
                let fetching = tokio::spawn({
                    let (reader, large) = (reader.clone(), large.clone());
                    async move { reader.fetch(&large).await }
                });
                tokio::time::sleep(Duration::from_millis(2 * round)).await;
                signal(&owner, Signal::STOP);
                match within(fetching).await.unwrap() {
                    Ok(bytes) => assert_eq!(seed_of(&bytes), seed),
                    Err(error) => {
                        let named = [TensorErrorKind::PeerLost, TensorErrorKind::Timeout];
                        assert!(named.contains(&error.kind()), "{:?}: {error}", error.kind());
                        stopped += 1;
                    }
                }
                signal(&owner, Signal::CONT);
                while reader.fetch(&large).await.map(|bytes| assert_eq!(seed_of(&bytes), seed)).is_err() {}
            }
            println!("{over:?}: {stopped} of 4 fetches failed while the owner was stopped");
        });
    }
}

#[test]
fn a_handle_is_passed_on_to_a_third_process() {
    alone(Runtime::MultiThread, async {
        let mut reader = Child::start(&[], "read");
        let mut ask = |handle: &RemoteBuffer| {
            reader.tell(text(handle));
            reader.next_word()
        };
        for over in [Over::Native, Over::Tcp] {
            let (owner, handles) = start_owner(over, "127.0.0.1:0", 30);
            for (seed, handle) in &handles {
                assert_eq!(ask(handle), seed.to_string());
            }
            let mut stolen = handles[1].1.clone();
            stolen.token = vec![1; 16].into();
            assert_eq!(ask(&stolen), "NotPermitted");
            drop(owner);
            assert_eq!(ask(&handles[1].1), "PeerLost");
        }
    });
}

#[test]
fn a_reader_that_dies_in_the_middle_holds_nothing() {
    alone(Runtime::MultiThread, async {
        for over in [Over::Native, Over::Tcp] {
            let pool = serve(over, "127.0.0.1:0").await;
            let (lease, handle) = pool.share(content(1, LARGE)).unwrap();
            for killed in 1..=4 {
                let reader = Child::start(&[], &format!("read-on {}", text(&handle)));
                until(|| lease.readers().len() == killed).await;
                let reads = lease.readers().pop().unwrap();
                assert!(reads.address.is_some_and(|address| address.ip().is_loopback()));
                drop(reader);
                until(|| lease.running() == 0).await;
            }
            lease.revoke();
            lease.ended().await;
            // All memory of the pool is free.
            until(|| pool.allocate(2 * LARGE).is_ok()).await;
        }
    });
}

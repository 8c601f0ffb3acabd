//! What a small native call costs: rung by rung, beside a stream without a reader, and beside a large transfer.
//!
//! ```sh
//! cargo bench --bench native                              # all
//! cargo bench --bench native -- rungs --seconds 3         # a call without generated code, and with it
//! cargo bench --bench native -- together                  # the same, one caller, client and server on one thread
//! cargo bench --bench native -- blocked --rounds 9        # 31 callers, alone and beside a blocked stream
//! cargo bench --bench native -- beside                    # one caller, alone and beside transfers of 64 MiB
//! ```
//!
//! All calls of a measurement go over one connection. The bench starts itself once more as the server process. Each process has a core of its
//! own, and a runtime that polls when it is idle. The rung below a call, a message of the device and its answer, is
//! `cargo bench -p tonic-rdma-verbs --bench soft_device -- perf send 64`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that can't run says so by stopping")]
#![allow(clippy::panic, clippy::print_stdout, missing_docs, reason = "the same")]

mod client;
mod server;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_setaffinity};

use client::{Client, Rung};
use server::ServerProcess;

/// Length of small payloads, in bytes.
const LENGTH: usize = 64;
/// Length of large payloads, in bytes.
const LARGE: usize = 64 << 20;
/// Callers beside a blocked stream.
const CALLERS: usize = 31;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let mut words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // `cargo bench -- --test` runs every bench once.
    if words == ["--test"] {
        words = vec!["all", "--rounds", "1", "--seconds", "0.01"];
    }
    let (what, pairs) = match words.split_first() {
        Some((&server::ARGUMENT, _)) => return server::serve(),
        Some((what, pairs)) if !what.starts_with('-') => (*what, pairs),
        _ => ("all", &words[..]),
    };
    let (mut rounds, mut seconds) = (5, 0.5);
    for pair in pairs.chunks(2) {
        match *pair {
            ["--rounds", value] => rounds = value.parse().unwrap(),
            ["--seconds", value] => seconds = value.parse().unwrap(),
            _ => panic!("rungs, together, blocked or beside, --rounds N and --seconds S, not {pair:?}"),
        }
    }
    let length = Duration::from_secs_f64(seconds);
    if matches!(what, "together" | "all") {
        run(0, together(rounds, length));
    }
    if what == "together" {
        return;
    }
    let server = ServerProcess::start();
    run(0, async {
        let client = Client::connect(&server.uri).await;
        if matches!(what, "rungs" | "all") {
            rungs(&client, &[1, 32], rounds, length).await;
        }
        if matches!(what, "blocked" | "all") {
            blocked(&client, rounds, length).await;
        }
        if matches!(what, "beside" | "all") {
            beside(&client, rounds, length).await;
        }
    });
}

/// Runs `future` on a core, in a runtime that polls when it is idle.
fn run<T>(core: usize, future: impl Future<Output = T>) -> T {
    let mut cores = CpuSet::new();
    cores.set(core);
    // On a machine with one core both processes stay there.
    let _ = sched_setaffinity(None, &cores);
    let mut builder = tokio::runtime::Builder::new_current_thread();
    tonic_rdma::runtime::idle_polling(&mut builder).enable_all().build().unwrap().block_on(future)
}

/// Measures calls of this thread to itself. Nothing waits for another core, so these times are the work of both ends.
async fn together(rounds: usize, length: Duration) {
    let (uri, server) = server::bind().await;
    tokio::spawn(server);
    println!("client and server on one thread:");
    rungs(&Client::connect(&uri).await, &[1], rounds, length).await;
}

async fn rungs(client: &Client, inflight: &[usize], rounds: usize, length: Duration) {
    for &inflight in inflight {
        for rung in [Rung::Plain, Rung::Generated] {
            let mut figures = Vec::new();
            for _ in 0..rounds {
                figures.push(Figures::of(client.calls(rung, inflight, length).await, length));
            }
            show(&format!("{rung:?} × {inflight}"), figures);
        }
    }
}

async fn blocked(client: &Client, rounds: usize, length: Duration) {
    let (mut alone, mut beside, mut costs) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let before = Figures::of(client.calls(Rung::Generated, CALLERS, length).await, length);
        let stream = client.block().await;
        let during = Figures::of(client.calls(Rung::Generated, CALLERS, length).await, length);
        drop(stream);
        costs.push((1.0 - during.rate / before.rate) * 100.0);
        alone.push(before);
        beside.push(during);
    }
    show(&format!("× {CALLERS}"), alone);
    show(&format!("× {CALLERS} beside a blocked stream"), beside);
    println!("the blocked stream costs {:.1} % of the calls, the median of the rounds", median(costs));
}

async fn beside(client: &Client, rounds: usize, length: Duration) {
    let (mut alone, mut beside, mut times) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let before = Figures::of(client.calls(Rung::Generated, 1, length).await, length);
        let goes_on = Arc::new(AtomicBool::new(true));
        let transfers = tokio::spawn(client.clone().transfer(LARGE, Arc::clone(&goes_on)));
        // The first transfer touches fresh memory.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let during = Figures::of(client.calls(Rung::Generated, 1, length).await, length);
        goes_on.store(false, Ordering::Relaxed);
        assert!(transfers.await.unwrap() > 0);
        times.push(during.p99 / before.p99);
        alone.push(before);
        beside.push(during);
    }
    show("× 1", alone);
    show("× 1 beside transfers of 64 MiB", beside);
    println!(
        "beside a transfer p99 is {:.1} × that of a call alone, the median of the rounds",
        median(times)
    );
}

/// The figures of one round, in microseconds, and thousands of calls a second.
struct Figures {
    p50: f64,
    p99: f64,
    rate: f64,
}

impl Figures {
    fn of(mut times: Vec<Duration>, length: Duration) -> Self {
        times.sort_unstable();
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
        Self { p50: at(0.5), p99: at(0.99), rate: times.len() as f64 / length.as_secs_f64() / 1e3 }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn show(name: &str, rounds: Vec<Figures>) {
    let of = |figure: fn(&Figures) -> f64| median(rounds.iter().map(figure).collect());
    let (p50, p99, rate) = (of(|it| it.p50), of(|it| it.p99), of(|it| it.rate));
    println!("{name}: p50 {p50:.2} µs, p99 {p99:.2} µs, {rate:.1} k calls/s");
}

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

use client::{Client, Rung};
use tonic_rdma_commands::clap::{self, Parser, ValueEnum};
use tonic_rdma_commands::cores::{self, Cores};
use tonic_rdma_commands::statistics::{median, quantile};
use tonic_rdma_commands::{Flavour, bench_options};

/// Length of small payloads, in bytes.
const LENGTH: usize = 64;
/// Length of large payloads, in bytes.
const LARGE: usize = 64 << 20;
/// Callers beside a blocked stream.
const CALLERS: usize = 31;

#[derive(Debug, Parser)]
struct Options {
    #[arg(value_enum, default_value = "all")]
    what: What,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
    /// Measures everything once, for a moment.
    #[arg(long)]
    test: bool,
    /// The core of this process.
    #[arg(long, hide = true)]
    core: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    All,
    Rungs,
    Together,
    Blocked,
    Beside,
    #[value(hide = true)]
    Server,
}

fn main() {
    let Options { what, mut rounds, mut seconds, test, core } = bench_options();
    if what == What::Server {
        return server::serve(core);
    }
    if test {
        (rounds, seconds) = (1, 0.01);
    }
    let length = Duration::from_secs_f64(seconds);
    let cores = Cores::choose();
    let core = cores.map(|cores| cores.client);
    let does = |which| what == which || what == What::All;
    if does(What::Together) {
        run(core, together(rounds, length));
    }
    if what == What::Together {
        return;
    }
    let (_server, uri) = server::start(cores.map(|cores| cores.server));
    run(core, async {
        let client = Client::connect(&uri).await;
        if does(What::Rungs) {
            rungs(&client, &[1, 32], rounds, length).await;
        }
        if does(What::Blocked) {
            blocked(&client, rounds, length).await;
        }
        if does(What::Beside) {
            beside(&client, rounds, length).await;
        }
    });
}

/// Runs `future` on a core, in a runtime that polls when it is idle. On a machine with one core both processes stay there.
fn run<T>(core: Option<usize>, future: impl Future<Output = T>) -> T {
    if let Some(core) = core {
        cores::pin(core).unwrap();
    }
    Flavour::IdlePolling.build().unwrap().block_on(future)
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
    fn of(times: Vec<Duration>, length: Duration) -> Self {
        let micros = || times.iter().map(|time| time.as_secs_f64() * 1e6);
        let rate = times.len() as f64 / length.as_secs_f64() / 1e3;
        Self { p50: quantile(micros(), 0.5), p99: quantile(micros(), 0.99), rate }
    }
}

fn show(name: &str, rounds: Vec<Figures>) {
    let of = |figure: fn(&Figures) -> f64| median(rounds.iter().map(figure));
    let (p50, p99, rate) = (of(|it| it.p50), of(|it| it.p99), of(|it| it.rate));
    println!("{name}: p50 {p50:.2} µs, p99 {p99:.2} µs, {rate:.1} k calls/s");
}
